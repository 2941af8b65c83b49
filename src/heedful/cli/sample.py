"""``heedful sample FILE --policy MODEL …``: answers for people to rank."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from heedful.cli.numbers import SEEDS, share, shares, whole

DESCRIPTION = """Let one or several policies answer the prompts of FILE and write what people are
to rank: N answers a prompt, none nearly the same as another, by whom they are
marked in the file and never shown to raters. With --project they go straight into
a project of `heedful annotate`. Interrupted, the same command goes on where it
stopped."""
EPILOG = """Prompts like an earlier one are left out first; --num_prompts then takes each
category's share (--quotas, or as the prompts are). Several temperatures make a
policy answer at each in turn. --weights 0.85 0.15 lets the first of two policies
give 85 % of the answers: newest and older mixed."""


def add_parser(verbs: Any) -> None:
    """Register the verb."""
    sub = verbs.add_parser(
        "sample", help="answers of one or several policies, for people to rank", description=DESCRIPTION,
        epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    sub.add_argument("file", metavar="FILE", help="the prompts; any file that has some, or package:prompts_train")
    sub.add_argument(
        "--policy", nargs="+", required=True, metavar="[NAME=]MODEL",
        help="who answers: folder, hub id or alias; NAME marks the answers (default: the folder's name)",
    )  # fmt: skip
    sub.add_argument("--weights", nargs="+", type=float, metavar="W", help="each policy's part of the answers")
    sub.add_argument("--out", metavar="FILE", help="rankings without judgements, .jsonl, .json or .parquet")
    sub.add_argument("--project", metavar="FOLDER", help="a project of `heedful annotate` that gets them")
    answers, prompts, controls = (sub.add_argument_group(name) for name in ("answers", "prompts", "controls"))
    answers.add_argument("--answers", type=whole(2, 9), default=4, metavar="N", help="a prompt, 2 to 9 (default 4)")
    answers.add_argument(
        "--temperatures", nargs="+", type=float, default=[1.0], metavar="T", help="of sampling (default 1)"
    )
    answers.add_argument("--max_new_tokens", type=whole(1), default=256, metavar="N", help="of an answer (default 256)")
    alike_help = "overlap from which two answers, or two prompts, are alike (default 0.8; 1 = equal ones only)"
    answers.add_argument("--threshold", type=share, default=0.8, metavar="F", help=alike_help)
    answers.add_argument("--seed", type=whole(*SEEDS), default=0, metavar="N", help="another seed, other answers")
    answers.add_argument("--batch_size", type=whole(1), default=64, metavar="N", help="decoded together (default 64)")
    answers.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, mps")
    answers.add_argument("--dtype", default="auto", help="compute precision (auto, float32, bfloat16)")
    prompts.add_argument("--num_prompts", type=whole(1), metavar="N", help="how many (default: all)")
    prompts.add_argument(
        "--quotas", type=shares, default={}, metavar="NAME=SHARE,…", help="by category, as in chat=3,safety=1"
    )
    prompts.add_argument("--max_prompt_tokens", type=whole(1), default=512, metavar="N", help="longer ones are dropped")
    prompts.add_argument("--round", type=whole(0), default=0, metavar="N", help="marks items and their ids (default 0)")
    prompts.add_argument(
        "--on_bad_row", choices=("error", "skip"), default="error",
        help="stop at the first row that cannot be used (default), or leave such rows out and count them",
    )  # fmt: skip
    controls.add_argument("--gold", metavar="FILE", help="control items: rankings with gold [[better, worse], …]")
    controls.add_argument("--gold_rate", type=share, default=0.09, metavar="F", help="their share (default 0.09)")
    controls.add_argument(
        "--bait_rate", type=share, default=0.0, metavar="F",
        help="share of the items with an answer to another prompt among the N (default 0)",
    )  # fmt: skip
    sub.add_argument("--json", action="store_true", help="print the counts as JSON")
    sub.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Sample, then print what there is to rank."""
    from heedful.errors import ConfigError
    from heedful.pipeline.sample import Policy, SampleConfig, sample

    weights = arguments.weights or [1.0] * len(arguments.policy)
    if len(weights) != len(arguments.policy):
        raise ConfigError(f"{len(arguments.policy)} policies and {len(weights)} weights; give one weight per policy")
    policies = [Policy(model, name, weight) for (name, model), weight in zip(map(named, arguments.policy), weights)]
    config = SampleConfig(
        num_answers=arguments.answers, temperatures=tuple(arguments.temperatures),
        max_new_tokens=arguments.max_new_tokens, max_prompt_tokens=arguments.max_prompt_tokens,
        num_prompts=arguments.num_prompts, quotas=arguments.quotas, threshold=arguments.threshold,
        round=arguments.round, bait_rate=arguments.bait_rate, gold_rate=arguments.gold_rate, seed=arguments.seed,
    )  # fmt: skip
    try:
        result = sample(
            arguments.file, policies, config, out=arguments.out, project=arguments.project, gold=arguments.gold,
            on_bad_row=arguments.on_bad_row, device=arguments.device, dtype=arguments.dtype,
            batch_size=arguments.batch_size,
        )  # fmt: skip
    except KeyboardInterrupt:
        print("heedful: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130
    counts = {**result.to_json(), "out": arguments.out, "project": arguments.project}
    print(json.dumps(counts, indent=2, ensure_ascii=False) if arguments.json else as_text(counts))
    return 0


def named(written: str) -> tuple[str, str]:
    """The name, "" where there is none, and the model of ``[NAME=]MODEL``."""
    name, equals, model = written.partition("=")
    return (name, model) if equals and "/" not in name else ("", written)


def as_text(counts: dict[str, Any]) -> str:
    """The counts for people."""
    where = " and ".join(str(place) for place in (counts["out"], counts["project"]) if place)
    lines = [f"{counts['num_rankings']:,} rankings of {counts['num_answers']:,} answers to judge: {where}"]
    for what in ("by_category", "by_policy"):
        told = ", ".join(f"{name or 'none'} {count:,}" for name, count in counts[what].items())
        lines.append(f"{what.replace('_', ' ')}: {told}")
    if counts["num_gold"] or counts["num_baits"]:
        lines.append(f"controls: {counts['num_gold']:,} control items, {counts['num_baits']:,} baits")
    if counts["num_cut"]:
        lines.append(f"cut by max_new_tokens: {counts['num_cut']:,} answers")
    if counts["num_prompts_left_out"]:
        told = ", ".join(f"{reason} {count:,}" for reason, count in counts["num_prompts_left_out"].items())
        lines.append(f"prompts left out: {told}")
    if counts["num_answers_left_out"]:
        lines.append(f"answers left out as empty or alike: {counts['num_answers_left_out']:,}")
    if counts["num_short"]:
        lines.append(f"rankings with fewer answers than asked for: {counts['num_short']:,}")
    return "\n".join(lines)
