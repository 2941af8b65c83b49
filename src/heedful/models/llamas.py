"""Which functions of an architecture are Llama's, word by word, as most of transformers' models are generated."""

from __future__ import annotations

import functools
import inspect
from typing import Any


def are_llamas(home: Any, *names: str) -> bool:
    """Whether these functions of a module of transformers are; what we have wrapped counts as what it wraps.

    Kernels from a hub, which transformers puts in a function's place, are objects, and never are.
    """
    from transformers.models.llama import modeling_llama

    for name in names:
        own, llamas = (getattr(module, name, None) for module in (home, modeling_llama))
        if not inspect.isfunction(own) or not inspect.isfunction(llamas) or _source(own) != _source(llamas):
            return False
    return True


@functools.cache
def _source(function: Any) -> str:
    return inspect.getsource(function)
