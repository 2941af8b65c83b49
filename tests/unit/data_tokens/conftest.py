from __future__ import annotations

from collections.abc import Callable

import pytest
from toy_tokenizers import byte_bpe_maker, llama_maker
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="session")
def byte_bpe() -> Callable[..., PreTrainedTokenizerFast]:
    return byte_bpe_maker()


@pytest.fixture(scope="session")
def llama() -> Callable[..., PreTrainedTokenizerFast]:
    return llama_maker()
