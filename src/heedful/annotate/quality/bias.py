"""What else than the answers' worth moves one rater: a logistic regression of verdicts, clustered by prompt."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from heedful.annotate.quality.pairs import Verdicts

COLUMNS = ("earlier", "consensus", "doubling")
SLIP = 0.02
"""How often a person's hand slips."""
MAX_DOUBLINGS = 4.0
"""Sixteen times as long and longer is the same."""


@dataclass(frozen=True)
class Pull:
    """One coefficient, in log odds: how much it speaks for an answer, all else equal."""

    value: float
    error: float
    """Standard error, prompts as clusters."""

    def win_rate(self) -> float:
        """How often the favoured one of two equal answers wins."""
        return win_rate(self.value)


def win_rate(log_odds: float) -> float:
    """How often what these log odds speak for wins."""
    return float(1 / (1 + np.exp(-log_odds)))


def pulls(verdicts: Verdicts, rows: np.ndarray) -> dict[str, Pull]:
    """What draws a rater: ``earlier`` (standing before), ``consensus`` (of the others), ``doubling`` (of length).

    logit P(first better) = a·earlier + b·consensus gap + c·log2 length ratio, without an intercept since the order of
    the two is arbitrary. A tie is half a win. Where nobody else ranked the item its gap counts as 0. Standard errors
    are the sandwich's with prompts as clusters, since the pairs of a prompt depend on each other.

    A rater who looks at length alone would have an infinite pull: a verdict counts as 1 - SLIP of a win, and one tied
    pseudo-pair per coefficient (a log-F(1, 1) prior, Greenland and Mansournia 2015) holds those without any data.
    """
    from statsmodels.genmod.families import Binomial
    from statsmodels.genmod.generalized_linear_model import GLM

    design = np.column_stack(
        [
            verdicts.earlier_V[rows],
            np.nan_to_num(verdicts.gap_V[rows]),
            verdicts.doublings_V[rows].clip(-MAX_DOUBLINGS, MAX_DOUBLINGS),
        ]
    )
    num = design.shape[1]
    wins = np.concatenate([0.5 + (0.5 - SLIP) * verdicts.verdict_V[rows], np.full(num, 0.5)])
    prompts = verdicts.group_V[rows]
    clusters = np.concatenate([prompts, len(verdicts.groups) + np.arange(num)])
    model = GLM(wins, np.concatenate([design, np.eye(num)]), family=Binomial())
    fitted = model.fit(cov_type="cluster", cov_kwds={"groups": clusters})
    return {name: Pull(float(b), float(error)) for name, b, error in zip(COLUMNS, fitted.params, fitted.bse)}
