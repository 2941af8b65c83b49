"""``heedful round FOLDER``: sample, let people rank, train; what comes next."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from heedful.cli import simulate

DESCRIPTION = """Do what comes next in a folder of rounds, whose rounds.yaml says what they have in
common: the newest policy (and the one before it) answers new prompts, which go
into the folder's project; once people have ranked them, the reward model is
trained on the rankings of all rounds so far and measured on this round before and
after, its scores are brought to the scale of the first round, and PPO makes the
next policy. Interrupted, the same command goes on where it stopped."""


def add_parser(verbs: Any) -> None:
    """Register the verb."""
    sub = verbs.add_parser(
        "round", help="rounds of sampling, ranking by people and training", description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    sub.add_argument("folder", metavar="FOLDER", help="holds rounds.yaml, the project and a folder for each round")
    sub.add_argument("--close", action="store_true", help="train on the rankings that are there, though not all are")
    sub.add_argument("--simulate", action="store_true", help="simulated raters instead of people, as below")
    simulate.add_options(sub.add_argument_group("simulated raters"))
    sub.add_argument("--json", action="store_true", help="print what came of it as JSON")
    sub.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Take the next step and say where the round stands."""
    from heedful.pipeline.round import next_step
    from heedful.runs.progress import tell

    def rate(project: Path) -> None:
        for line in simulate.work(arguments, str(project)):
            tell(line)

    status = next_step(arguments.folder, close=arguments.close, rate=rate if arguments.simulate else None)
    if arguments.json:
        counts = {"round": status.number, "num_there": status.num_there, "num_wanted": status.num_wanted}
        print(json.dumps({**counts, "result": status.result}, indent=2, ensure_ascii=False))
    elif status.result is None:
        print(f"round {status.number}: {status.num_there:,} of {status.num_wanted:,} rankings are there")
        print(
            f"Serve the project in {arguments.folder} to people (heedful annotate serve) and give this command again "
            f"when they are done; --close goes on with the rankings that are there."
        )
    else:
        print(as_text(status.result))
    return 0


def as_text(result: dict[str, Any]) -> str:
    """What came of a round, for people."""
    lines = [f"round {result['round']}: {result['num_judgements']:,} rankings of {result['num_prompts']:,} prompts"]
    for when in ("before", "after"):
        if found := result[f"accuracy_{when}"]:
            interval = f"[{found['low']:.1%}, {found['high']:.1%}]"
            lines.append(
                f"reward model {when} this round's training: {found['value']:.1%} {interval} of {found['num_pairs']:,} "
                f"held-out pairs of this round in order"
            )
    told = ", ".join(f"{policy} {score:+.2f}" for policy, score in result["scores_by_policy"].items())
    lines.append(f"scores of this round's answers (0 and 1: mean and deviation of the first round's): {told}")
    lines.append(f"next policy: {result['policy']}")
    return "\n".join(lines)
