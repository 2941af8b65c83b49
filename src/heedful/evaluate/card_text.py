"""A reward card in words, the same on the terminal and in the report; every verdict is by interval."""

from __future__ import annotations

from heedful.records import Accuracy, Calibration, RewardCard


def parts(card: RewardCard) -> list[tuple[str, Accuracy]]:
    """The accuracies of a card below its headline, each with its name."""
    rows: list[tuple[str, Accuracy | None]] = [
        ("where the longer is better", card.longer_wins),
        ("where the shorter is better", card.shorter_wins),
        *((f"category {name}", found) for name, found in card.by_category.items()),
        *((f"source {name}", found) for name, found in card.by_source.items()),
        *((f"attribute {name}", found) for name, found in card.attributes.items()),
        ("where all heads agree", card.heads_agree),
        ("where heads disagree", card.heads_disagree),
        ("against baits", card.baits),
        ("by length alone (fitted)", card.length_fit.accuracy if card.length_fit else None),
    ]
    return [(name, found) for name, found in rows if found is not None]


def sentences(card: RewardCard) -> list[str]:
    """What the numbers of a card mean."""
    found = [_ties(card), *_length(card)]
    if card.calibration:
        found.append(calibration_text(card.calibration))
    if card.gold_controls:
        gold = card.gold_controls
        rate = percent(gold.rate, gold.low, gold.high)
        found.append(f"Gold controls: {gold.num_passed} of {gold.num_items} in the known order, {rate} %.")
    if card.train_accuracy is not None:
        gap = card.train_accuracy - card.accuracy
        beyond = card.train_accuracy > card.accuracy_high
        found.append(
            f"Accuracy on the pairs it was trained on: {card.train_accuracy:.1%}, {abs(gap):.1%} "
            f"{'above' if gap > 0 else 'below'} the held-out one"
            + (", beyond its interval: part of it is learned by heart." if beyond else ", within its interval.")
        )
    return found


def _ties(card: RewardCard) -> str:
    return (
        f"Ties: {card.num_tied_pairs:,} pairs tied in the labels are left out; {card.num_equal_scores:,} with equal "
        f"scores count one half."
    )


def _length(card: RewardCard) -> list[str]:
    if card.prefers_longer is None or card.length_accuracy is None:
        return []
    found = [
        f"Length: the scores prefer the longer answer in {card.prefers_longer:.1%} of pairs, the people in "
        f"{card.length_accuracy:.1%}."
    ]
    fit = card.length_fit
    if fit and fit.share is not None:
        share = percent(fit.share, fit.share_low, fit.share_high)
        found.append(f"Length alone reaches {share} % of what the scores have above chance.")
    return found


def calibration_text(found: Calibration) -> str:
    """Are the scores as sure as they are right."""
    if found.error <= found.by_chance:
        verdict = f"no more than chance makes on so few pairs ({found.by_chance:.3f})"
    elif found.overconfidence_low > 0:
        verdict = f"overconfident by {found.overconfidence:.3f}, the scores lie too far apart"
    elif found.overconfidence_high < 0:
        verdict = f"underconfident by {-found.overconfidence:.3f}, the scores lie too close together"
    else:
        verdict = f"more than chance makes ({found.by_chance:.3f}), too sure in places and not sure enough in others"
    return f"Calibration error {found.error:.3f} [{found.low:.3f}, {found.high:.3f}]: {verdict}."


def percent(value: float | None, low: float | None, high: float | None) -> str:
    """A share with its interval in percent: "72.4 [67.9, 76.6]"."""
    if value is None or low is None or high is None:
        return "-"
    return f"{100 * value:.1f} [{100 * low:.1f}, {100 * high:.1f}]"
