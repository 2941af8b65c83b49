"""heedful data: inspect, convert, split and pair data files."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heedful.data.inspect import Inspection

FILE_HELP = "JSON, JSONL, Parquet, CSV, TSV or text file (may be .gz), or a hub data set as owner/name[:config]"


def add_parser(subparsers: Any) -> None:
    """Add the verb ``data`` with its sub-verbs."""
    parser = subparsers.add_parser(
        "data",
        help="inspect, convert, split and pair data files",
        description="Look at preference, demonstration and prompt data, and bring it into the form you need. "
        "The format of a file is recognised; rows that cannot be used are named with file, line and reason.",
    )
    verbs = parser.add_subparsers(dest="data_verb", metavar="VERB", required=True)

    inspect = verbs.add_parser(
        "inspect",
        help="what is in a file: format, counts, lengths, ties, duplicates, length bias, leakage",
        description="Print what is in a file: detected format, rows read, kept and dropped with reasons, duplicates, "
        "ties, lengths, categories, languages, how often the longer answer wins, how far the judges agree.",
    )
    _source(inspect)
    inspect.add_argument("--against", metavar="FILE", help="a second file: count the prompts that stand in both")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(handler=run_inspect)

    convert = verbs.add_parser(
        "convert",
        help="write a file in another format",
        description="Write a file in another format. Pair formats get all pairs of every ranking, ties left out.",
        epilog="formats: trl, trl_messages, openrlhf, llama_factory, hh, verl, nemo_rl, pairs, master (rankings, "
        "nothing lost), messages (demonstrations), prompts (prompts of any file)",
    )
    _source(convert)
    convert.add_argument("--to", required=True, metavar="FORMAT", help="the format to write, see below")
    convert.add_argument("--out", required=True, metavar="FILE", help="output, ending in .jsonl, .json or .parquet")
    _bad_rows(convert)
    convert.set_defaults(handler=run_convert)

    split = verbs.add_parser(
        "split",
        help="split a file into training and held-out records by prompt",
        description="Write DIR/train.jsonl and DIR/held_out.jsonl. No prompt stands on both sides, near-duplicate "
        "prompts stay together, and the same seed gives the same split whatever the order of the rows.",
    )
    _source(split)
    split.add_argument("--out_dir", required=True, metavar="DIR", help="folder for the two files")
    split.add_argument("--fraction", type=float, default=0.1, help="part of the records to hold out (default 0.1)")
    split.add_argument("--seed", type=int, default=0, help="another seed gives another split (default 0)")
    like_help = "overlap from which prompts are alike (default 0.8; 1 = only equal prompts stay together)"
    split.add_argument("--threshold", type=float, default=0.8, metavar="F", help=like_help)
    _bad_rows(split)
    split.set_defaults(handler=run_split)

    pairs = verbs.add_parser(
        "pairs",
        help="write all preference pairs of the rankings in a file",
        description="Write one preference pair a line with its votes, agreement and margin: all pairs of every ranking "
        "that the consensus does not tie.",
    )
    _source(pairs)
    pairs.add_argument("--out", required=True, metavar="FILE", help="output, ending in .jsonl, .json or .parquet")
    agree_help = "leave out pairs with less agreement (0 to 1, default 0)"
    pairs.add_argument("--min_agree", type=float, default=0.0, metavar="F", help=agree_help)
    _bad_rows(pairs)
    pairs.set_defaults(handler=run_pairs)


def _source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help=FILE_HELP)
    parser.add_argument("--format", default="auto", help="format of the file (default: recognised)")
    parser.add_argument("--split", metavar="NAME", help="split of a hub data set (default: train)")


def _bad_rows(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--on_bad_row",
        choices=("error", "skip"),
        default="error",
        help="stop at the first row that cannot be used (default), or leave such rows out and count them",
    )


def run_inspect(args: argparse.Namespace) -> int:
    """``heedful data inspect``."""
    from heedful.data.inspect import inspect

    found = inspect(args.file, args.against, format=args.format, split=args.split)
    if args.json:
        print(json.dumps(found.to_json(), ensure_ascii=False, indent=1))
    else:
        _show(f"{found.path}", inspection_lines(found))
    return 0


def run_convert(args: argparse.Namespace) -> int:
    """``heedful data convert``."""
    from heedful.data.export import convert

    done = convert(
        args.file, args.out, args.to, format=args.format, on_bad_row=args.on_bad_row, split=args.split
    )
    print(f"{done.loaded.summary()}; {done.num_rows:,} rows written as {done.to} to {done.path}")
    return 0


def run_split(args: argparse.Namespace) -> int:
    """``heedful data split``."""
    from pathlib import Path

    from heedful.data.export import record_row
    from heedful.data.files import write_jsonl
    from heedful.data.load import load
    from heedful.data.splits import split
    from heedful.data.writing import refuse_to_replace

    paths = [Path(args.out_dir) / f"{name}.jsonl" for name in ("train", "held_out")]
    for path in paths:
        refuse_to_replace(args.file, path)
    loaded = load(args.file, format=args.format, on_bad_row=args.on_bad_row, split=args.split)
    train, held_out = split(loaded.records, args.fraction, args.seed, threshold=args.threshold)
    for path, records in zip(paths, (train, held_out), strict=True):
        write_jsonl(path, (record_row(record) for record in records))
    print(f"{loaded.summary()}; {len(train):,} to train.jsonl, {len(held_out):,} to held_out.jsonl in {args.out_dir}")
    return 0


def run_pairs(args: argparse.Namespace) -> int:
    """``heedful data pairs``."""
    from heedful.data.export import convert

    done = convert(
        args.file, args.out, "pairs", format=args.format, on_bad_row=args.on_bad_row, split=args.split,
        min_agree_fraction=args.min_agree,
    )  # fmt: skip
    print(f"{done.loaded.summary()}; {done.num_rows:,} pairs written to {done.path}")
    return 0


def inspection_lines(found: Inspection) -> list[tuple[str, str]]:
    """(what, value) in the order to print them."""
    lines = [
        ("format", f"{found.format} ({found.kind})"),
        ("rows read", f"{found.num_read:,}"),
        ("records kept", f"{found.num_kept:,}"),
        ("rows dropped", f"{sum(found.dropped.values()):,}"),
    ]
    for name, count in found.dropped.items():
        lines.append((f"  {name}", f"{count:,} (first: {found.examples[name]})"))
    lines += [
        ("duplicate records", f"{found.num_duplicate_rows:,}"),
        ("distinct prompts", f"{found.num_distinct_prompts:,} ({found.num_prompt_groups:,} without near-duplicates)"),
    ]
    for part, lengths in found.lengths.items():
        for unit, spread in (("characters", lengths.characters), ("words", lengths.words)):
            marks = " / ".join(f"{spread[mark]:,.0f}" for mark in ("p5", "p50", "p95", "p100"))
            lines.append((f"{part}, {unit}", f"{marks} (5 % / median / 95 % / longest)"))
    for name, by_word in (("categories", found.categories), ("languages", found.languages)):
        if by_word:
            shown = ", ".join(f"{key} {count:,}" for key, count in list(by_word.items())[:12])
            lines.append((name, shown + (f" and {len(by_word) - 12} more" if len(by_word) > 12 else "")))
    if found.preferences is not None:
        lines += _preference_lines(found.preferences)
    if found.leakage is not None:
        leak = found.leakage
        seen = f"; such as: {leak.examples[0]!r}" if leak.examples else ""
        counts = f"{leak.num_same_prompts:,} records have a prompt of that file, {leak.num_like_prompts:,} a like one"
        lines.append((f"leakage with {leak.other}", counts + seen))
    return lines


def _preference_lines(found: Any) -> list[tuple[str, str]]:
    sizes = ", ".join(f"{size} answers: {count:,}" for size, count in found.num_answers.items())
    lines = [
        ("answers a ranking", sizes),
        ("pairs", f"{found.num_pairs:,} (and {found.num_tied_pairs:,} tied)"),
        ("identical answers", f"{found.num_identical_answers:,}"),
        ("judgements", f"{found.num_judgements:,}"),
    ]
    for name, rated in found.attributes.items():
        counts = f"{rated.num_answers:,} answers of {rated.num_rankings:,} rankings, {rated.num_pairs:,} pairs apart"
        lines.append((f"rated {name}", f"{counts}, {rated.lowest:g} to {rated.highest:g}"))
    if found.longer_wins is not None:
        shares = f"{found.longer_wins:.1%} by prompt, {found.longer_wins_pairs:.1%} by pair"
        lines.append(("longer answer wins", shares))
    if found.agreement is not None:
        kappa = f", Cohen's kappa {found.agreement.kappa:.3f}" if found.agreement.kappa is not None else ""
        lines.append(("agreement", f"{found.agreement.observed:.1%} on {found.agreement.num_pairs:,} pairs{kappa}"))
    return lines


def _show(title: str, lines: list[tuple[str, str]]) -> None:
    if not sys.stdout.isatty():
        print(title)
        for what, said in lines:
            print(f"{what}: {said}")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, show_header=False)
    for what, said in lines:
        table.add_row(what, Text(said))
    Console().print(table)
