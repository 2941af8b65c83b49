"""What a person should look at: measures whose whole interval lies outside of what is tolerated."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from heedful.annotate.quality.raters import KINDS, MIN_GOLD, Measure, measures
from heedful.annotate.submitted import Submitted
from heedful.records import Record

FALSE_ALARMS = 0.05
"""The chance of one false alarm or more among all raters, per kind of measure and look, at the edge of what is
tolerated. Control items have a level of their own: 5 to 9 % for a rater who passes just ``MIN_PASS`` of
them, below 1 % for one who passes nine of ten."""
MIN_PASS = 0.80
MIN_AGREEMENT = 0.5
"""Of the middle rater's τ-b."""
MAX_TIES = 0.35
"""Share of pairs tied, beyond the middle rater's."""
MAX_POSITION = 0.1
"""Log odds that standing earlier adds: of two equal answers it wins 52.5 % instead of 50 %."""
MAX_LENGTH = 0.4
"""Log odds that doubling the length adds, beyond what it adds for the middle rater: 60 % instead of 50 %. The consensus
of two others is a noisy control, so that where longer answers are truly better everybody seems to love length; and
people without any fault differ in taste."""
MAX_SLOT = 0.05
"""A slot's share of first places, beyond chance."""
MIN_SELF = 0.2
MAX_SPEED = 2.5
"""Times as fast as the middle rater."""


@dataclass(frozen=True, slots=True)
class Finding(Record):
    """One rater stands out in one respect: for review, by a person, with the work at hand."""

    rater: str
    kind: str
    estimate: float
    low: float
    high: float
    says: str


def simultaneous(num_raters: int) -> float:
    """The level at which each rater's interval is taken, so that all of them together keep 1 - FALSE_ALARMS."""
    return 1 - FALSE_ALARMS / max(1, num_raters)


def findings(submitted: Iterable[Submitted]) -> list[Finding]:
    """What to review, of all raters; those excluded already are looked at too."""
    rows = list(submitted)
    return flagged(measures(rows, level=simultaneous(len({s.annotator for s in rows}))))


def flagged(measured: Sequence[Measure]) -> list[Finding]:
    """The measures that leave the tolerated range with their whole interval."""
    middle = middles(measured)
    results = []
    for m in measured:
        if m.estimate is None or m.low is None or m.high is None or (m.kind == "gold" and m.num_items < MIN_GOLD):
            continue
        least, most = tolerated(m, middle)
        if m.high < least or m.low > most:
            results.append(Finding(m.rater, m.kind, m.estimate, m.low, m.high, _says(m)))
    return results


def middles(measured: Iterable[Measure]) -> dict[str, float]:
    """Of each kind, the median rater's estimate; 0 where there is none."""
    values: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for m in measured:
        if m.estimate is not None:
            values[m.kind].append(m.estimate)
    return {kind: statistics.median(of_kind or [0.0]) for kind, of_kind in values.items()}


def tolerated(measure: Measure, middle: dict[str, float]) -> tuple[float, float]:
    """The range in which a measure needs no review."""
    expected = measure.details.get("expected", 0.0)
    length = middle["length"]
    return {
        "gold": (MIN_PASS, math.inf),
        "agreement": (MIN_AGREEMENT * middle["agreement"], math.inf),
        "ties": (-math.inf, middle["ties"] + MAX_TIES),
        "length": (min(0.0, length) - MAX_LENGTH, max(0.0, length) + MAX_LENGTH),
        "position": (-MAX_POSITION, MAX_POSITION),
        "slot": (expected - MAX_SLOT, expected + MAX_SLOT),
        "self": (MIN_SELF, math.inf),
        "speed": (-math.inf, MAX_SPEED),
    }[measure.kind]


def _says(m: Measure) -> str:
    assert m.estimate is not None
    between = f"({m.low:.2f} to {m.high:.2f}, {m.num_items} items)"
    more = m.estimate > 0
    card = "ABCDEFGHI"[int(m.details.get("slot", 0))]
    return {
        "gold": f"passes {m.estimate:.0%} of {m.num_items} control items",
        "agreement": f"agrees little with the others: τ-b {m.estimate:.2f} {between}",
        "ties": f"ties {m.estimate:.0%} of the pairs {between}",
        "length": f"leans to {'longer' if more else 'shorter'} answers: of two that the others rank alike, one twice as"
        f" long wins {m.details.get('win_rate', 0.5):.0%} (log odds {m.estimate:.2f}; {between[1:]}",
        "position": f"leans to cards that stand {'earlier' if more else 'later'}: of two equal answers the earlier wins"
        f" {m.details.get('win_rate', 0.5):.0%} (log odds {m.estimate:.2f}; {between[1:]}",
        "slot": f"puts card {card} first in {m.estimate:.0%} of the items, where chance is"
        f" {m.details.get('expected', 0):.0%} {between}",
        "self": f"agrees little with the own earlier rankings: τ-b {m.estimate:.2f} {between}",
        "speed": f"is {m.estimate:.1f} times as fast as the middle rater {between}",
    }[m.kind] + ": for review"
