"""The page of reviewers: how far raters agree, and what to look at."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Lock
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import HTMLResponse
from sqlalchemy import func, select

from heedful.annotate.quality.bias import win_rate
from heedful.annotate.tables import Submission, Trail
from heedful.annotate.web import pages
from heedful.annotate.web.door import Visitor, needs

router = APIRouter()
Reviewer = Annotated[Visitor, Depends(needs("reviewer"))]
KEPT_SECONDS = 60.0
"""New rankings wait so long at most; a change that the audit log knows (somebody is left out) shows at once."""


@dataclass(frozen=True)
class Made:
    """A report and what it was made from."""

    at: float
    last_submission: int
    last_entry: int
    report: dict[str, Any]


_making = Lock()
"""A report takes a second or more of the processor: one at a time."""


@router.get("/dashboard")
def dashboard(request: Request, visitor: Reviewer) -> HTMLResponse:
    """The quality report as a page."""
    with _making:
        made = _made(request)
    flagged = {(f["rater"], f["kind"]) for f in made.report["findings"]}
    return pages.render(request, "dashboard.html.j2", made=made, report=made.report, flagged=flagged, between=between)


def between(finding: dict[str, Any]) -> str:
    """The interval of a finding in the unit of its sentence."""
    low, high, kind = finding["low"], finding["high"], finding["kind"]
    if kind in ("length", "position"):  # log odds, told as a win rate
        low, high = map(win_rate, (low, high))
    if kind in ("length", "position", "gold", "ties", "slot"):
        return f"{100 * low:.0f} – {100 * high:.0f} %"
    return f"{low:.2f} – {high:.2f}"


def _made(request: Request) -> Made:
    """The report of now, or the last one while it will do."""
    from heedful.annotate.quality.report import report
    from heedful.annotate.results import submitted

    state = request.app.state
    now: float = state.clock()
    with state.project.database.reading() as session:
        last_submission = session.scalar(select(func.max(Submission.id))) or 0
        last_entry = session.scalar(select(func.max(Trail.id))) or 0
    last: Made | None = getattr(state, "quality", None)
    if last is not None and last.last_entry == last_entry:
        waits = now - last.at < KEPT_SECONDS
        if waits or last.last_submission == last_submission:
            return last
    state.quality = Made(now, last_submission, last_entry, report(submitted(state.project)))
    made: Made = state.quality
    return made
