"""``heedful score MODEL FILE --out FILE``: score every answer of a file."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from heedful.cli.numbers import seconds, whole

DESCRIPTION = """Score every answer in FILE (rankings, pairs, or prompts with answers, in any format that
`heedful data inspect` knows) and write one row per answer, in the order of FILE. Interrupted, the
same command goes on where it stopped. The distribution of the scores is printed."""
MODEL_HELP = "reward model (folder, hub id or alias), http(s)://server, or module:function"


def add_parser(verbs: Any) -> None:
    """Register the verb."""
    sub = verbs.add_parser(
        "score", help="score every answer of a file", description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    sub.add_argument("file", metavar="FILE", help="the answers; any file of rankings, pairs or conversations")
    sub.add_argument("--out", metavar="FILE", required=True, help="output, ending in .jsonl, .json or .parquet")
    sub.add_argument("--format", default="auto", help="format of FILE (default: recognised)")
    sub.add_argument("--split", metavar="NAME", help="split of a hub data set (default: train)")
    sub.add_argument(
        "--on_bad_row", choices=("error", "skip"), default="error",
        help="stop at the first row that cannot be used (default), or leave such rows out and count them",
    )  # fmt: skip
    scorer_options(sub)
    sub.add_argument("--no_cache", action="store_true", help="compute every score, whatever is known from before")
    sub.add_argument("--json", action="store_true", help="print the distribution as JSON")
    sub.set_defaults(handler=handle)


def scorer_options(parser: argparse.ArgumentParser) -> None:
    """How a MODEL is opened."""
    parser.add_argument("--template", metavar="MODEL", help="of a server: whose chat template writes the texts")
    parser.add_argument("--device", default="auto", help="of a folder: auto, cpu, cuda, cuda:1, mps")
    parser.add_argument("--dtype", default="auto", help="of a folder: compute precision (auto, float32, bfloat16)")
    parser.add_argument(
        "--micro_batch_tokens", type=whole(1), default=4096, metavar="N",
        help="of a folder: padded tokens per forward (default 4096)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout_seconds", type=seconds, default=60.0, metavar="S",
        help="of a server: for each request of at most 64 answers (default 60)",
    )  # fmt: skip


def opened_as(arguments: argparse.Namespace) -> dict[str, Any]:
    """What :func:`scorer_options` and ``--no_cache`` say, as ``open_scorer`` takes it."""
    from heedful.rollout.cache import ScoreCache

    names = ("template", "device", "dtype", "micro_batch_tokens", "timeout_seconds")
    options = {name: getattr(arguments, name) for name in names}
    return {**options, "cache": None if arguments.no_cache else ScoreCache()}


def handle(arguments: argparse.Namespace) -> int:
    """Score, then print where the scores are and how they are spread."""
    from heedful.evaluate.spread import table
    from heedful.pipeline.score import score_file

    try:
        scored = score_file(
            arguments.model, arguments.file, arguments.out, format=arguments.format, split=arguments.split,
            on_bad_row=arguments.on_bad_row, **opened_as(arguments),
        )  # fmt: skip
    except KeyboardInterrupt:
        print("heedful: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130
    if arguments.json:
        print(json.dumps(scored.to_json(), indent=2, ensure_ascii=False))
        return 0
    print(f"{scored.num_answers:,} answers scored: {scored.out}")
    print("\n".join(table({"all answers": scored.all, **scored.categories, **scored.sources})))
    return 0
