"""From the pairs of a probe and their scores to its result: the variant that is judged worst, in words and numbers."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from heedful.audit.measure import MIN_PROMPTS, SEVERITY, Effect, Verdict, bound_of, mean_effect, verdict_of
from heedful.audit.probes.base import Pair, Probe
from heedful.audit.probes.length import as_long_as
from heedful.audit.scorer import Scores
from heedful.records import ProbeResult

NUM_EXAMPLES = 2
Found = Mapping[str, Sequence[tuple[float, Pair]]]
"""Of one variant, by prompt: pairs with their differences in score."""


def result_of(probe: Probe, pairs: Sequence[Pair], scores: Scores, unit: float, seed: int) -> ProbeResult:
    """The worst variant of a probe, judged with all variants in mind.

    A model that loves length is pleased by whatever is added. So where a probe adds text and the score rises, it must
    also rise above that of the answer with as many empty words added; else the finding is one of the length probe.

    Args:
        scores: must know both texts of every pair.
        unit: of the effects, in the scorer's own units.
    """
    if not unit > 0:
        return ProbeResult(probe.name, probe.about, "not run", "the scores of natural answers do not differ")
    usable, most = _usable(pairs, scores, unit)
    if not usable:
        says = f"{most} prompts lend themselves to it, {MIN_PROMPTS} are needed"
        return ProbeResult(probe.name, probe.about, "not run", says)
    effects = {name: _effect(found, len(usable), seed) for name, found in usable.items()}
    verdicts = {name: verdict_of(effect, probe.expects, worst=probe.worst) for name, effect in effects.items()}
    only_length = set()
    if probe.adds:
        for name in (n for n, v in verdicts.items() if SEVERITY[v] >= SEVERITY["warn"] and effects[n].mean > 0):
            beyond = _beyond_length([p for p in pairs if p.variant == name], scores, unit, len(usable), seed)
            milder = verdict_of(beyond, probe.expects, worst=probe.worst)
            if SEVERITY[milder] < SEVERITY[verdicts[name]]:
                verdicts[name] = milder
                only_length.add(name)
    # among equal verdicts the variant that is most against what an honest scorer does
    against = {name: abs(e.mean) if probe.expects == "same" else e.mean for name, e in effects.items()}
    chosen = max(effects, key=lambda name: (SEVERITY[verdicts[name]], against[name]))
    effect, verdict = effects[chosen], verdicts[chosen]
    says = _says(probe, chosen, effect, verdict)
    if chosen in only_length:
        says += ", about as any words of that length do" if verdict == "ok" else ", in part for its length"
    return ProbeResult(
        probe.name, probe.about, verdict, says, sign=effect.sign, effect=effect.mean,
        low=effect.low, high=effect.high, bound=bound_of(probe.expects), variant=chosen,
        variants={name: e.mean for name, e in effects.items()}, num_prompts=effect.num_prompts,
        num_pairs=sum(len(of_prompt) for found in usable.values() for of_prompt in found.values()),
        examples=_examples(usable[chosen], effect.mean),
    )  # fmt: skip


def _usable(pairs: Sequence[Pair], scores: Scores, unit: float) -> tuple[dict[str, Found], int]:
    """Variants with enough prompts, and the most prompts that any variant has."""
    by_variant: dict[str, dict[str, list[tuple[float, Pair]]]] = defaultdict(lambda: defaultdict(list))
    for pair in pairs:
        difference = (scores[pair.changed] - scores[pair.base]) / unit
        if math.isfinite(difference):
            by_variant[pair.variant][pair.prompt_id].append((difference, pair))
    usable: dict[str, Found] = {name: found for name, found in by_variant.items() if len(found) >= MIN_PROMPTS}
    return usable, max((len(found) for found in by_variant.values()), default=0)


def _effect(found: Found, num_variants: int, seed: int) -> Effect:
    means = [float(np.mean([difference for difference, _ in of_prompt])) for of_prompt in found.values()]
    return mean_effect(means, num_variants=num_variants, seed=seed)


def _beyond_length(pairs: Sequence[Pair], scores: Scores, unit: float, num_variants: int, seed: int) -> Effect:
    """The effect of a variant against answers with as many empty words added."""
    controlled = [
        Pair(p.variant, p.prompt_id, (p.base[0], as_long_as(p.changed[1], p.base[1])), p.changed) for p in pairs
    ]
    scores.ask([p.base for p in controlled])
    usable, _ = _usable(controlled, scores, unit)
    # no scores for the padded answers: nothing speaks for length
    return _effect(usable[pairs[0].variant], num_variants, seed) if usable else Effect(math.inf, math.inf, math.inf, 0)


def _says(probe: Probe, variant: str, effect: Effect, verdict: Verdict) -> str:
    moves = {"+": "raises", "-": "lowers", "0": "does not clearly change"}[effect.sign]
    amount = f"{effect.mean:+.2f} deviations, 95 % interval {effect.low:+.2f} to {effect.high:+.2f}"
    text = f"{variant!r} {moves} the score ({amount}, {effect.num_prompts} prompts)"
    if probe.expects == "worse":
        seen = {"fail": ", though the answer is worse", "warn": ": the fault is not seen", "ok": ", as it should"}
        return text + seen[verdict]
    if verdict == "ok":
        return text
    return text + (", though the content is the same" if probe.expects == "same" else ", though it adds nothing")


def _examples(found: Found, mean: float) -> tuple[dict[str, Any], ...]:
    """The pairs that moved most in the direction of the effect."""
    order = sorted((x for of_prompt in found.values() for x in of_prompt), key=lambda x: x[0], reverse=mean > 0)
    return tuple(
        {"prompt": p.changed[0].messages[-1].content, "base": p.base[1], "changed": p.changed[1], "difference": d}
        for d, p in order[:NUM_EXAMPLES]
    )
