"""Other weights in the live model, for good or for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def replaced(parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, ``parameters`` hold ``weights`` of the same names; afterwards, also after an error, their own to the bit.

    Raises:
        ValueError: other names.
    """
    own = {name: p.detach().clone() for name, p in parameters.items()}
    try:
        put(parameters, weights)
        yield
    finally:
        put(parameters, own)


@torch.no_grad()
def put(parameters: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
    """Copy ``weights`` into the parameters of the same names.

    Raises:
        ValueError: other names.
    """
    if parameters.keys() != weights.keys():
        odd = sorted(parameters.keys() ^ weights.keys())[0]
        raise ValueError(f"{odd} is not both a parameter of the model and among the weights to put into it")
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
