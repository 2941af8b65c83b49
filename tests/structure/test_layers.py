"""The house rules: rooms import only from rooms above, light rooms need no torch, files and functions stay small."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import heedful

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "heedful"
SOURCES = sorted(PACKAGE.rglob("*.py"))

ORDER = [
    "errors", "records", "batches", "config", "runs", "objectives", "data", "models", "rollout", "control", "plan",
    "evaluate", "annotate", "train", "audit", "report", "pipeline", "cli",
]  # fmt: skip
"""The rooms in import order, as in the package docstring and the README map."""

LONG_FILES: dict[str, str] = {}
"""File → why it may exceed 400 lines."""
LONG_FUNCTIONS: dict[str, str] = {}
"""file:function → why it may exceed 80 lines."""

HEAVY = {
    "torch.distributed": {"distributed"}, "deepspeed": {"distributed"}, "ray": {"distributed"}, "vllm": set(),
    "fastapi": {"annotate"}, "sqlalchemy": {"annotate"}, "matplotlib": {"report"},
}  # fmt: skip
"""Library → the only rooms that may import it."""


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_only_from_rooms_above(path):
    here = room(path)
    if here == "__init__":
        return
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "heedful" and len(parts) > 1 and parts[1] in ORDER:
            assert ORDER.index(parts[1]) <= ORDER.index(here), f"{path.relative_to(ROOT)} imports {name} from below"
        for library, rooms in HEAVY.items():
            if name == library or name.startswith(library + "."):
                assert here in rooms, f"{path.relative_to(ROOT)} imports {library}; only {rooms or 'no room'} may"


def test_objectives_import_torch_and_batches_only():
    for path in (PACKAGE / "objectives").glob("*.py"):
        for name in imports(path):
            if name.startswith("heedful."):
                assert name.startswith(("heedful.batches", "heedful.objectives", "heedful.errors")), (path, name)
            assert not name.startswith(("transformers", "peft", "numpy")), (path, name)


LIGHT = ["errors", "records", "config.read", "runs.folder", "runs.reader", "runs.metrics", "runs.progress",
         "control.kl", "control.schedule", "plan.fit", "plan.time", "audit.audit", "report.build",
         "pipeline.plan", "pipeline.scorer", "cli.main"]  # fmt: skip


@pytest.mark.parametrize("name", LIGHT)
def test_light_rooms_import_without_torch(name):
    code = f"import sys, heedful.{name}; sys.exit(' '.join({{'torch', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert not done.stderr.strip(), f"heedful.{name} pulls in {done.stderr}"


def test_help_is_light():
    code = (
        "import sys; from heedful.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    name = str(path.relative_to(PACKAGE))
    num_lines = len(text.splitlines())
    assert num_lines <= 400 or name in LONG_FILES, f"{name} has {num_lines} lines"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.end_lineno:
            length = node.end_lineno - node.lineno + 1
            assert length <= 80 or f"{name}:{node.name}" in LONG_FUNCTIONS, f"{name}:{node.name} has {length} lines"


def test_no_name_tells_nothing():
    for path in SOURCES:
        for part in path.relative_to(PACKAGE).parts:
            assert not re.fullmatch(r"(utils?|helpers?|common|misc)(\.py)?", part), path


def test_exceptions_listed_are_still_needed():
    for name in LONG_FILES:
        assert len((PACKAGE / name).read_text().splitlines()) > 400, f"{name} is short now: take it off the list"


def map_of(text: str) -> list[str]:
    """The rooms that a text lists, one per line, in its own order."""
    return [m.group(1) for m in re.finditer(r"^[ │├└─]*(\w+)(?:/|\.py)?\s{2,}\S", text, re.M) if m.group(1) in ORDER]


def test_the_package_docstring_lists_the_rooms_in_order():
    assert map_of(heedful.__doc__ or "") == ORDER


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_the_readme_map_lists_the_rooms_in_order(name):
    assert map_of((ROOT / name).read_text(encoding="utf-8")) == ORDER


def test_every_room_exists():
    found = {p.name.removesuffix(".py") for p in PACKAGE.iterdir() if not p.name.startswith("__")} - {"recipes"}
    assert found == set(ORDER)
