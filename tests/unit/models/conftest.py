"""Random model folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models_tiny import make_model, make_tokenizer


@pytest.fixture
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """folder(kind, …) → the folder of a saved random language model with its tokenizer."""

    def make(kind: str = "Llama", *, tokenizer: Any = None, name: str = "", **options: Any) -> Path:
        tokenizer = tokenizer or make_tokenizer()
        path = tmp_path / (name or f"{kind}-base")
        make_model(kind, tokenizer, **options).save_pretrained(path)
        tokenizer.save_pretrained(path)
        return path

    return make
