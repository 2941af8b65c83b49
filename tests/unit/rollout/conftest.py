from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from toy_parts import model_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """folder(kind, …) → a random model's folder, made once per combination."""
    made: dict[tuple[Any, ...], Path] = {}
    root = tmp_path_factory.mktemp("models")

    def make(kind: str = "Llama", **options: Any) -> Path:
        key = (kind, *sorted(options.items()))
        if key not in made:
            made[key] = model_folder(root / str(len(made)), kind=kind, **options)
        return made[key]

    return make
