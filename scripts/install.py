"""Install heedful with its test tools into the environment that runs this script (used by the Makefile and .ci/run).

On a machine without an NVIDIA GPU a plain ``pip install torch`` would fetch gigabytes of CUDA libraries, so the CPU
build is tried first there: PyTorch's own CPU index, then a CPU wheel that pip can see. A machine with a GPU takes
the default build. Everything else comes from pyproject.toml.
"""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_VERSION = "torch==2.13.0"  # where the index cannot be reached this exact version may lie on disk as a CPU wheel


def pip(*arguments: str, quiet_failure: bool = False) -> bool:
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "-q", *arguments]
    print("  pip install", " ".join(arguments), flush=True)
    errors = subprocess.DEVNULL if quiet_failure else None
    return subprocess.run(command, stderr=errors).returncode == 0


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or os.path.exists("/proc/driver/nvidia/version")


def install_torch() -> None:
    if importlib.util.find_spec("torch") or has_gpu() or platform.system() != "Linux":
        return  # macOS and Windows wheels are CPU/MPS builds anyway
    on_disk = pip("--no-index", "--no-deps", CPU_VERSION, quiet_failure=True)
    if on_disk or pip("--index-url", CPU_INDEX, "--timeout", "15", "--retries", "0", "torch", quiet_failure=True):
        return
    print("  no CPU build of PyTorch found; taking the default one (several GB)", flush=True)


def main() -> int:
    print("Installing heedful (once):", flush=True)
    install_torch()
    return 0 if pip("-e", f"{ROOT}[dev]") else 1


if __name__ == "__main__":
    sys.exit(main())
