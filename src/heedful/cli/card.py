"""``heedful card MODEL FILE``: how well a reward model orders the answers of a file."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from heedful.cli.numbers import SEEDS, whole
from heedful.cli.score import MODEL_HELP, opened_as, scorer_options

if TYPE_CHECKING:
    from heedful.records import RewardCard

DESCRIPTION = """Score every answer in FILE (rankings or pairs, in any format that `heedful data
inspect` knows) and print how far the scores agree with the people: accuracy as a
whole, by category and source and where the shorter answer is better, calibration,
margins, controls, baits, and how much of it length alone explains. Nothing is
written."""
EPILOG = """Pairs tied in the labels are left out, equal scores count one half. "Accuracy"
weighs every prompt the same, "over pairs" every pair. Brackets are 95 % intervals
over prompts."""


def add_parser(verbs: Any) -> None:
    """Register the verb."""
    sub = verbs.add_parser(
        "card", help="how well a reward model orders the answers of a file", description=DESCRIPTION, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    sub.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    sub.add_argument("file", metavar="FILE", help="rankings or pairs that the model was not trained on")
    sub.add_argument("--format", default="auto", help="format of FILE (default: recognised)")
    sub.add_argument("--split", metavar="NAME", help="split of a hub data set (default: train)")
    sub.add_argument(
        "--on_bad_row", choices=("error", "skip"), default="error",
        help="stop at the first row that cannot be used (default), or leave such rows out and count them",
    )  # fmt: skip
    scorer_options(sub)
    sub.add_argument("--seed", type=whole(*SEEDS), default=0, metavar="N", help="of the intervals (default 0)")
    sub.add_argument("--no_cache", action="store_true", help="compute every score, whatever is known from before")
    sub.add_argument("--json", action="store_true", help="print the card as JSON")
    sub.set_defaults(handler=handle)


def handle(arguments: argparse.Namespace) -> int:
    """Work out the card and print it."""
    from heedful.pipeline.card import card_of_file

    card = card_of_file(
        arguments.model, arguments.file, format=arguments.format, split=arguments.split,
        on_bad_row=arguments.on_bad_row, seed=arguments.seed, **opened_as(arguments),
    )  # fmt: skip
    print(json.dumps(card.to_json(), indent=2, ensure_ascii=False) if arguments.json else as_text(card))
    return 0


def as_text(card: RewardCard) -> str:
    """The card for people."""
    from heedful.evaluate.card_text import parts, percent, sentences

    def row(name: str, accuracy: str, over_pairs: str, num_pairs: int, num_prompts: int) -> str:
        return f"{name[:30]:<30}{accuracy:>21}{over_pairs:>21}{num_pairs:>8,}{num_prompts:>9,}"

    whole = percent(card.accuracy, card.accuracy_low, card.accuracy_high)
    over_pairs = percent(card.over_pairs, card.over_pairs_low, card.over_pairs_high)
    lines = [
        f"{'':<30}{'accuracy, %':>21}{'over pairs, %':>21}{'pairs':>8}{'prompts':>9}",
        row("all pairs", whole, over_pairs, card.num_pairs, card.num_prompts),
    ]
    for name, found in parts(card):
        accuracy = percent(found.value, found.low, found.high)
        over_pairs = percent(found.over_pairs, found.over_pairs_low, found.over_pairs_high)
        lines.append(row(name, accuracy, over_pairs, found.num_pairs, found.num_prompts))
    margins = "  ".join(f"{float(q):.0%} {value:+.2f}" for q, value in card.margins.items())
    return "\n".join([
        *lines, "", *sentences(card),
        f"Margins of the better answer, quantiles: {margins}",
        f"Scores: mean {card.score_mean:.3f}, deviation {card.score_std:.3f}; loss {card.loss or 0.0:.4f} nats.",
    ])  # fmt: skip
