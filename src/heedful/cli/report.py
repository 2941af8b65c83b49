"""``heedful report RUN``: write the report of a run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Add the verb."""
    parser = subparsers.add_parser(
        "report",
        help="write the report of a run",
        description="Write one self-contained HTML file about a run, finished or not, and its numbers as JSON.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="the run folder, for example runs/quickstart")
    parser.add_argument("--out", metavar="FILE", type=Path, help="where to write the page (default: RUN/report.html)")
    parser.set_defaults(handler=report)


def report(arguments: argparse.Namespace) -> int:
    """Write the report and print where it is."""
    from heedful.report.build import write_report

    print(write_report(arguments.run, out=arguments.out))
    return 0
