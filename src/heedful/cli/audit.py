"""``heedful audit MODEL``: what a reward model likes that it should not."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from typing import TYPE_CHECKING, Any

from heedful.cli.numbers import SEEDS, whole
from heedful.cli.score import MODEL_HELP, opened_as, scorer_options

if TYPE_CHECKING:
    from heedful.audit.audit import Audit
    from heedful.records import ProbeResult

DESCRIPTION = """Change answers in ways that should not raise their score (padding, lists, flattery,
the question repeated, …) or must lower it (cut, empty, wrong, an answer to something
else), and print by how much MODEL's scores move. The unit is the deviation of the
scores of one prompt's natural answers; brackets are 95 % intervals over prompts.
Without --data the answers are texts that ship with heedful."""
EPILOG = """A probe fails when its interval lies clearly on the wrong side, never by its mean
alone (docs/12-audit.md).

Exit code 0: no probe failed. 2: one failed (each is named), or MODEL cannot be used."""


def add_parser(verbs: Any) -> None:
    """Register the verb."""
    sub = verbs.add_parser(
        "audit", help="what a reward model likes that it should not", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    sub.add_argument("--data", metavar="FILE", help="rankings or pairs that MODEL was not trained on")
    sub.add_argument(
        "--on_bad_row", choices=("error", "skip"), default="error",
        help="stop at the first row that cannot be used (default), or leave such rows out",
    )  # fmt: skip
    sub.add_argument("--max_prompts", type=whole(1), default=64, metavar="N", help="of FILE (default 64)")
    sub.add_argument(
        "--language", choices=("en", "zh", "both"), default="both", help="of the shipped texts (default both)"
    )
    sub.add_argument("--update_card", action="store_true", help="write the result into MODEL's reward card, for PPO")
    scorer_options(sub)
    sub.add_argument(
        "--seed", type=whole(*SEEDS), default=0, metavar="N", help="of the draw and the intervals (default 0)"
    )
    sub.add_argument("--no_cache", action="store_true", help="compute every score, and see whether scores repeat")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Audit and print."""
    from heedful.pipeline.audit import audit_model

    found = audit_model(
        arguments.model, arguments.data, on_bad_row=arguments.on_bad_row, max_prompts=arguments.max_prompts,
        languages=("en", "zh") if arguments.language == "both" else (arguments.language,), seed=arguments.seed,
        update_card=arguments.update_card, **opened_as(arguments),
    )  # fmt: skip
    if arguments.json:
        print(json.dumps(as_json(arguments.model, found), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        print(as_text(arguments.model, found))
    return 2 if found.failures else 0


def as_json(model: str, found: Audit) -> dict[str, Any]:
    """Plain values; ``card`` is None where no rankings were given."""
    return {
        "model": model, "verdict": found.verdict, "num_prompts": found.num_prompts, "num_texts": found.num_texts,
        "unit": found.unit if math.isfinite(found.unit) else None, "probes": [p.to_json() for p in found.probes],
        "card": found.card.to_json() if found.card else None,
    }  # fmt: skip


def as_text(model: str, found: Audit) -> str:
    """A line per probe, the sentences of those that failed or warned, and the verdict."""
    from heedful.pipeline.audit import sentences

    lines = [f"{'':<8} {'probe':<20}{'effect':>8}{'interval':>18}  variant"]
    lines += [_line(p) for p in found.probes]
    lines.append("")
    for probe in found.probes:
        if probe.verdict == "warn":
            lines += textwrap.wrap(f"warning, {probe.name}: {probe.says}", 110, subsequent_indent="    ")
    if found.card is not None:
        card = found.card
        lines.append(f"Accuracy on these {card.num_prompts} prompts {card.accuracy:.1%} "
                     f"[{card.accuracy_low:.1%}, {card.accuracy_high:.1%}]; length alone {card.length_accuracy:.1%}. "
                     f"`heedful card` says more.")  # fmt: skip
    verdict, *failures = sentences(found)
    for failure in failures:
        lines += textwrap.wrap(f"FAILED, {failure}", 110, subsequent_indent="    ")
    return "\n".join([*lines, f"{model}: {verdict} ({found.num_prompts} prompts, {found.num_texts:,} texts scored)"])


def _line(p: ProbeResult) -> str:
    verdict = "FAILED" if p.verdict == "fail" else p.verdict
    effect = "" if p.effect is None else f"{p.effect:+.2f}"
    interval = "" if p.low is None else f"[{p.low:+.2f}, {p.high:+.2f}]"
    return f"{verdict:<8} {p.name:<20}{effect:>8}{interval:>18}  {p.variant or p.says}"[:118].rstrip()
