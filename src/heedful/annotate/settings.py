"""What a project asks of its raters, as project.yaml says it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from heedful.config.section import Fraction, NonNegative, Positive, Section

FLAGS = ("wrong", "unsafe", "off_task", "broken")
"""What may be said of a single answer beside its rank."""
SKIP_REASONS = ("not_understood", "not_my_field", "upsetting", "broken_item", "other")
STRENGTHS = ("slightly", "better", "much")
"""How clearly the first of two answers is better; 1, 2 and 3 in the master file's margin."""


class Settings(Section):
    """How items are handed out and what is asked of them."""

    name: str = "project"
    """Shown to raters."""
    languages: tuple[Literal["en", "zh_CN"], ...] = ("en", "zh_CN")
    """Of the app; a rater's browser chooses, and the rater may change it."""

    overlap: Positive = 1
    """People who rank an item, where it is not among the share below."""
    overlap_on_share: Positive = 3
    """People who rank an item of the share on which agreement is measured."""
    overlap_share: Fraction = 0.2
    """Share of the items, in every category alike, that several people rank."""
    gold_rate: Fraction = 0.09
    """Share of what a person is given that has a known answer; the same one never twice."""
    repeat_rate: Fraction = 0.025
    """Share of what a person is given that the same person ranked before, shuffled anew."""
    repeat_after_hours: NonNegative = 24.0
    """How long ago that must be."""
    quotas: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Category → its share of what is handed out; {} = as the items come. They need not sum to 1."""
    lease_minutes: Annotated[float, Field(gt=0)] = 30.0
    """An item that is neither submitted nor saved as a draft for so long goes to somebody else."""

    attributes: tuple[str, ...] = ()
    """Asked of every answer besides the rank, 1 (poor) to 5 (excellent)."""
    strength: bool = True
    """With two answers, ask how much better the better one is."""
    allow_unranked: bool = False
    """Answers may stay without a rank: worse than every ranked one."""
    reason: Literal["off", "optional", "required"] = "optional"
    """A free text on why."""
    session_hours: Annotated[float, Field(gt=0)] = 12.0
    """A login ends after so long without a request; in any case after ten times that."""
