"""A snapshot of what a run ran on: versions, machine, command line. Never environment variables: they hold secrets."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = (
    "heedful", "torch", "transformers", "peft", "safetensors", "tokenizers", "huggingface-hub", "gguf", "numpy",
    "pydantic", "datasets", "pyarrow", "tensorboard", "bitsandbytes", "torchao", "deepspeed", "ray", "vllm",
)  # fmt: skip
_SECRET = re.compile(r"(?:^|[._-])(?:token|secret|password|passwd|key|credentials?)$", re.IGNORECASE)
# Anchored at the end: --hub.token is a secret, --max_tokens is not.


def snapshot() -> dict[str, Any]:
    """Versions (of installed packages only), git state of heedful, machine and command line, as plain JSON values."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _versions(),
        "git": _git(),
        "cpu": _cpu(),
        "num_cores": _num_cores(),
        "memory_bytes": _memory_bytes(),
        "gpus": _gpus(),
        "command_line": redact(sys.argv),
    }


def redact(arguments: list[str]) -> list[str]:
    """The command line with the values of options that look like secrets replaced by ``***``."""
    shown, hide_next = [], False
    for argument in arguments:
        if hide_next and not argument.startswith("--"):
            shown.append("***")
            hide_next = False
            continue
        option, equals, _ = argument.partition("=")
        secret = option.startswith("-") and _SECRET.search(option) is not None
        shown.append(f"{option}=***" if secret and equals else argument)
        hide_next = secret and not equals
    return shown


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git() -> dict[str, Any] | None:
    """Commit and whether files differ from it, when heedful runs from a checkout of its own repository."""
    package = Path(__file__).resolve().parents[1]
    top = _output("git", "-C", str(package), "rev-parse", "--show-toplevel")
    # An installed heedful may lie inside a checkout of something else (a .venv in a project): that is not ours.
    if top is None or Path(top).resolve() / "src" / "heedful" != package:
        return None
    commit = _output("git", "-C", top, "rev-parse", "HEAD")
    changes = _output("git", "-C", top, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": bool(changes)}


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    if sys.platform == "darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return platform.processor() or platform.machine()


def _num_cores() -> int:
    """Cores this process may use, which in a container are often fewer than the machine has."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _gpus() -> list[dict[str, str]]:
    rows = _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    gpus = []
    for row in (rows or "").splitlines():
        fields = [field.strip() for field in row.split(",")]
        if len(fields) == 3:
            gpus.append({"name": fields[0], "memory": fields[1], "driver": fields[2]})
    return gpus


def _output(*command: str) -> str | None:
    """What a small program prints, or None when it is missing, fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
