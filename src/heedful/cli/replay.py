"""heedful replay: run the batch again at which PPO stopped, and show where the first bad number comes from."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heedful.train.rerun import Findings

DESCRIPTION = """When PPO stops because a number is not finite or a proof fails, it leaves the
failing batch and the weights in stages/03-ppo/replay-step-N.pt. This runs that
batch again and prints every stream in order, the first module whose output is
not finite, and the place where the gradient goes bad. Nothing is written.

Exit code 0: it fails in the same way. 2: it does not, or FILE cannot be used."""


def add_parser(verbs: Any) -> None:
    """Register the verb."""
    sub = verbs.add_parser(
        "replay", help="run the batch again at which PPO stopped", description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    sub.add_argument("file", metavar="FILE", help="the file that the error message names")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Run the batch again and print what was found."""
    from heedful.pipeline.replay import replay

    found = replay(arguments.file)
    if arguments.json:
        print(json.dumps(as_json(found), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print(as_text(found))
    return 0 if found.reproduced else 2


def as_json(found: Findings) -> dict[str, Any]:
    """Plain values; a stream without a finite value has None for its minimum, mean and maximum."""
    streams = [
        {"name": s.name, "minimum": s.minimum, "mean": s.mean, "maximum": s.maximum, "num_bad": s.num_bad,
         "num_values": s.num_values}
        for s in found.streams.values()
    ]  # fmt: skip
    return {**dataclasses.asdict(found), "streams": streams}


def as_text(found: Findings) -> str:
    """The table and the verdict."""
    number, phase = found.step, found.phase
    lines = [f"Step {number}, {phase}. It stopped with:", f"  {found.recorded}", ""]
    lines.append(f"{'stream':<24}{'min':>12}{'mean':>12}{'max':>12}{'not finite':>20}")
    for s in found.streams.values():
        numbers = "".join("           –" if x is None else f"{x:>12.4g}" for x in (s.minimum, s.mean, s.maximum))
        lines.append(f"{s.name:<24}{numbers}{f'{s.num_bad} of {s.num_values}':>20}")
    lines.append("")
    if found.bad_weights:
        more = f" and {len(found.bad_weights) - 1} more" if len(found.bad_weights) > 1 else ""
        lines.append(f"weights not finite:   {found.bad_weights[0]}{more}")
    if found.module:
        lines.append(f"first bad module:     {found.module} ({found.module_cause})")
    if found.gradient:
        lines.append(f"first bad gradient:   {found.gradient}")
    if found.samples:
        lines.append(f"samples:              {', '.join(found.samples)}")
    if found.reproduced:
        lines.append("Reproduced: it stops in the same way." if found.error == found.recorded else
                     f"Reproduced, with another text: {found.error}")  # fmt: skip
    elif found.error is None:
        lines.append("Could not be reproduced: this time every proof held.")
    else:
        lines.append(f"Could not be reproduced; this time another proof failed: {found.error}")
    return "\n".join(lines)
