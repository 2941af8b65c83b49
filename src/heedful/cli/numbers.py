"""Numbers on the command line: types for ``add_argument`` that refuse what is out of range."""

from __future__ import annotations

import argparse
from collections.abc import Callable

LONGEST_SECONDS = 1_000_000.0
"""Much longer ones overflow the clock of a socket."""
SEEDS = (0, 2**31 - 1)
"""As recipes take them."""


def whole(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    """A whole number from ``lowest`` to ``highest``, both included."""
    bounds = f"at least {lowest}" if highest is None else f"from {lowest} to {highest}"

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = lowest - 1
        if number < lowest or (highest is not None and number > highest):
            raise argparse.ArgumentTypeError(f"must be a whole number {bounds}, not {text}")
        return number

    return parse


def seconds(text: str) -> float:
    """A length of time that a request may take."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= LONGEST_SECONDS:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most {LONGEST_SECONDS:,.0f} seconds, not {text}")
    return number


def share(text: str) -> float:
    """A part of a whole, from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1, not {text}")
    return number


def shares(text: str) -> dict[str, float]:
    """"chat=3,safety=1" as names and numbers above 0."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, written = part.partition("=")
        try:
            found[name.strip()] = float(written)
        except ValueError:
            found[name.strip()] = 0.0
        if not 0 < found[name.strip()] < float("inf"):
            raise argparse.ArgumentTypeError(f"write NAME=NUMBER,NAME=NUMBER with numbers above 0, not {text}")
    return found
