"""The data card: what an export holds and how it came about, as Markdown for people and JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import yaml

from heedful.records import Record


@dataclass(frozen=True, slots=True)
class DataCard(Record):
    """Of one export."""

    project: str
    recipe: dict[str, Any]
    """What the view takes: its options, who is excluded, heedful's version, the form of the master file"""
    recipe_hash: str
    content_hash: str
    """Of the master rows; equal hashes, equal data"""
    num_items: int
    num_judgements: int
    num_pairs: int
    """That the consensus does not tie and that are agreed on as the recipe demands"""
    num_pairs_tied: int
    num_pairs_dropped: int
    """For too little agreement"""
    items_by_category: dict[str, int]
    items_by_round: dict[str, int]
    items_by_language: dict[str, int]
    answers_by_policy: dict[str, int]
    judgements_by_guideline: dict[str, int]
    judgements_by_rater: dict[str, int]
    """Pseudonym → judgements in this export"""
    excluded: tuple[dict[str, Any], ...] = ()
    """annotator, reason, since (seconds since 1970), by, num_judgements (left out here)"""
    skipped_by_reason: dict[str, int] = field(default_factory=dict)
    agreement: dict[str, Any] | None = None
    """As the quality report gave it"""

    def to_markdown(self) -> str:
        """The card as a README, with front matter that dataset hubs read."""
        front = {"pretty_name": self.project, "language": sorted(x for x in self.items_by_language if x) or ["und"],
                 "tags": ["preference", "human-feedback", "ranking", "heedful"]}  # fmt: skip
        counts = {"prompts": self.num_items, "judgements": self.num_judgements, "raters": len(self.judgements_by_rater),
                  "preference pairs": self.num_pairs, "pairs tied by the consensus": self.num_pairs_tied,
                  "pairs left out for too little agreement": self.num_pairs_dropped}  # fmt: skip
        parts = [
            "---\n" + yaml.safe_dump(front, sort_keys=False, allow_unicode=True) + "---",
            f"# {_line(self.project)}",
            "Answers of language models to prompts, ranked by people, every single ranking kept. Written by "
            f"heedful {self.recipe['heedful']}; recipe {self.recipe_hash}, content {self.content_hash}.",
            _table("Counts", counts),
            *(
                _table(title, part)
                for title, part in {
                    "Prompts by category": self.items_by_category,
                    "Prompts by round": self.items_by_round,
                    "Prompts by language": self.items_by_language,
                    "Answers by policy": self.answers_by_policy,
                    "Judgements by version of the guideline": self.judgements_by_guideline,
                    "Judgements by rater (pseudonyms)": self.judgements_by_rater,
                    "Items given back": self.skipped_by_reason,
                }.items()
                if part
            ),
            self._agreement(),
            self._excluded(),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _agreement(self) -> str:
        if not self.agreement:
            return "## Agreement\n\nNot measured for this export."
        return _table("Agreement", self.agreement)

    def _excluded(self) -> str:
        if not self.excluded:
            return "## Exclusions\n\nNobody's work is left out."
        lines = [
            f"- {_line(one['annotator'])}, {one['num_judgements']} judgements, since {_date(one['since'])} by "
            f"{_line(one['by'])}: {_line(one['reason'])}"
            for one in self.excluded
        ]
        kept = self.recipe.get("with_excluded")
        says = "Kept in this export, though excluded:" if kept else "Left out of this export:"
        return f"## Exclusions\n\n{says}\n\n" + "\n".join(lines)


def _table(title: str, values: Mapping[str, Any]) -> str:
    rows = "\n".join(f"| {_line(str(name)) or '(none)'} | {_line(_number(value))} |" for name, value in values.items())
    return f"## {title}\n\n| | |\n|---|---|\n{rows}"


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}" if isinstance(value, float) else str(value)


def _line(text: str) -> str:
    """Text of any origin on one line, without a meaning to Markdown or HTML."""
    escaped = "".join(f"\\{c}" if c in "\\`*_[]|#" else {"<": "&lt;", "&": "&amp;"}.get(c, c) for c in text)
    return " ".join(escaped.split())


def _date(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")
