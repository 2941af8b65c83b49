"""The reward card as bars, a figure and sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from heedful.errors import DataError
from heedful.evaluate.card_text import parts, sentences
from heedful.records import Calibration, RewardCard
from heedful.report import figures

Bar = tuple[str, float, float | None, float | None, str]
"""(name, rate, low, high, words)"""


MAX_BARS = 30


@dataclass(frozen=True)
class CardView:
    """What the page shows of a card below its headline; empty where the card does not say."""

    bars: tuple[Bar, ...] = ()
    sentences: tuple[str, ...] = ()
    reliability: str = ""
    """SVG of accuracy over confidence."""


def learning_curve(points: Any) -> str:
    """SVG of held-out accuracy over the number of rankings trained on; "" where there is no curve."""
    try:
        found = [
            figures.Point(p["num_rankings"], p["accuracy"], p["accuracy_low"], p["accuracy_high"]) for p in points or ()
        ]
    except (KeyError, TypeError):
        return ""
    return figures.intervals(found, ident="learning", x_label="rankings") if len(found) > 1 else ""


def view(card: dict[str, Any] | None) -> CardView:
    """The view of a card as it stands in the results; an older or newer one shows what it has elsewhere on the page."""
    try:
        found = RewardCard.from_json(card or {})
    except (DataError, TypeError, AttributeError):
        return CardView()
    if found.over_pairs is None:
        return CardView()
    calibration, said = found.calibration, sentences(found)
    if (num_more := len(parts(found)) - MAX_BARS) > 0:
        said.append(f"{num_more} more categories and sources are in report.json.")
    return CardView(
        bars=tuple(
            (name, part.value, part.low, part.high, f"{_percent(part.value)} [{100 * part.low:.0f}, "
             f"{100 * part.high:.0f}] of {part.num_pairs:,} pairs")
            for name, part in parts(found)[:MAX_BARS]
        ),
        sentences=tuple(said),
        reliability=_reliability(calibration) if calibration else "",
    )  # fmt: skip


def _reliability(found: Calibration) -> str:
    points = [figures.Point(b.confidence, b.accuracy, b.low, b.high) for b in found.bins]
    return figures.intervals(points, ident="calibration", x_label="confidence", diagonal=True)


def _percent(rate: float) -> str:
    return f"{100 * rate:.0f}\u00a0%"
