"""Files that ship with heedful, written ``package:NAME`` in recipes."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from heedful.errors import DataError


def data_path(name: str) -> str:
    """The path of ``package:NAME`` (without .jsonl); any other name is given back unchanged.

    Raises:
        DataError: nothing of that name ships with heedful.
    """
    if not name.startswith("package:"):
        return name
    folder = Path(str(resources.files("heedful") / "data" / "quickstart"))
    path = folder / f"{name.removeprefix('package:')}.jsonl"
    if not path.exists():
        names = ", ".join(sorted(p.stem for p in folder.glob("*.jsonl")))
        raise DataError(f"{name}: no such file ships with heedful; there are: {names}")
    return str(path)
