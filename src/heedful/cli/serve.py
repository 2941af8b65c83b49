"""``heedful serve-reward MODEL``: a reward model as a server."""

from __future__ import annotations

import argparse
from typing import Any

from heedful.cli.numbers import whole

DESCRIPTION = """Serve a reward model in OpenRLHF's protocol, for trainers that ask over HTTP:
POST /get_reward {"query": [...], "prompts": [...], "labels": [...]}. GET /health says that it lives.
Queries are texts as the model's own chat template writes them. Ctrl-C or SIGTERM ends it once the
requests that have begun are answered."""


def add_parser(verbs: Any) -> None:
    """Register the verb."""
    sub = verbs.add_parser(
        "serve-reward", help="serve a reward model over HTTP", description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help="reward model: folder, hub id or alias")
    sub.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 = all (default 127.0.0.1)")
    sub.add_argument("--port", type=int, default=5000, help="0 = any free one (default 5000)")
    sub.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    sub.add_argument("--dtype", default="auto", help="compute precision: auto, float32, bfloat16")
    sub.add_argument(
        "--micro_batch_tokens", type=whole(1), default=4096, metavar="N",
        help="padded tokens per forward (default 4096)",
    )  # fmt: skip
    sub.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Serve until told to stop."""
    from heedful.rollout.server import open_server

    server = open_server(
        arguments.model, host=arguments.host, port=arguments.port, device=arguments.device, dtype=arguments.dtype,
        micro_batch_tokens=arguments.micro_batch_tokens,
    )  # fmt: skip
    print(f"{server.url}/get_reward", flush=True)
    server.serve_until_told()
    return 0
