"""An export whose data card carries the figures of the quality report on the same work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heedful.annotate.master import Exported, View, export
from heedful.annotate.project import Project
from heedful.annotate.quality.agreement import agreement
from heedful.annotate.quality.pairs import first_rankings
from heedful.annotate.results import submitted

FIGURES = {"pair_rate": "pair agreement (a tie is half)", "alpha": "Krippendorff's alpha", "tau_b": "Kendall's tau-b"}


EVERYTHING = View()


def publish(
    project: Project, out: str | Path, *, to: Sequence[str] = ("trl_messages",), view: View = EVERYTHING
) -> Exported:
    """:func:`~heedful.annotate.master.export` with the agreement of the rounds that the view takes."""
    work = [one for one in submitted(project) if view.rounds is None or one.round in view.rounds]
    return export(project, out, to=to, view=view, agreement=_figures(agreement(first_rankings(work)).to_json()))


def _figures(found: dict[str, Any]) -> dict[str, Any]:
    """One line each: the number with its interval, or why there is none."""
    said = {}
    for name, title in FIGURES.items():
        figure = found[name]
        if figure["value"] is None:
            said[title] = figure["undefined"]
        else:
            said[title] = f"{figure['value']:.3f} ({figure['low']:.3f} to {figure['high']:.3f})"
    return said
