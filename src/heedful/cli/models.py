"""heedful models: fetch a model once, list what loads without a network."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the verb ``models`` with ``pull`` and ``list``."""
    parser = subparsers.add_parser(
        "models",
        help="fetch models once, list those that are here",
        description="Fetch a model (a run fetches by itself what it needs), or list those that load without a network.",
    )
    verbs = parser.add_subparsers(dest="models_verb", required=True, metavar="VERB")
    pull_parser = verbs.add_parser("pull", help="fetch or convert a model into the cache and print its folder")
    pull_parser.add_argument("name", metavar="NAME", help="hub id, local folder, .gguf file or alias (smollm2-135m)")
    pull_parser.set_defaults(handler=pull)
    list_parser = verbs.add_parser("list", help="models that load without a network, and where they came from")
    list_parser.add_argument("--json", action="store_true", help="print JSON")
    list_parser.set_defaults(handler=list_models)


def pull(args: argparse.Namespace) -> int:
    """Print the folder of a model, fetched first where needed."""
    from heedful.models.load import resolve

    print(resolve(args.name))
    return 0


def list_models(args: argparse.Namespace) -> int:
    """Print every cached model with its origin."""
    from heedful.models.cache import cache_folder, cached_models

    models = cached_models()
    if args.json:
        print(json.dumps([dataclasses.asdict(model) for model in models], indent=2, ensure_ascii=False))
        return 0
    if not models:
        print(f"no models in {cache_folder()} yet; fetch one with: heedful models pull smollm2-135m")
        return 0
    for model in models:
        print(f"{model.name}  {model.size_bytes / 2**20:.0f} MiB  {model.origin}\n    {model.path}")
    return 0
