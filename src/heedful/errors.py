"""Exceptions. Each is also a builtin, so callers who know nothing of heedful can still catch it.

The message of an exception that reaches the user is one clear sentence: what is wrong, where (file, line, field), and
what to do. The command line prints it without a traceback and exits with code 2.
"""

from __future__ import annotations

from collections.abc import Sequence


class HeedfulError(Exception):
    """Base of everything heedful raises on purpose."""


class ConfigError(HeedfulError, ValueError):
    """A recipe, option or argument is wrong."""


class DataError(HeedfulError, ValueError):
    """A data file or record is wrong."""


class ModelError(HeedfulError, ValueError):
    """A model folder, tokenizer or head is wrong or missing."""


class EngineError(HeedfulError, RuntimeError):
    """The rollout engine or a reward source failed."""


class GuardError(HeedfulError, RuntimeError):
    """A run-time proof failed: ratio not 1, KL not 0, a stream not finite. The optimizer has not moved."""


class NonFiniteError(GuardError):
    """NaN or infinity in a stream or a gradient; the fields say where, for programs.

    ``stream`` is the name in the message, ``ids`` are the samples (() when it is not one of them), ``module`` is the
    weight at which a gradient goes bad.
    """

    def __init__(
        self, message: str, *, stream: str = "", step: int = 0, ids: Sequence[str] = (), module: str | None = None
    ) -> None:
        super().__init__(message)
        self.stream, self.step, self.ids, self.module = stream, step, tuple(ids), module


class GateError(HeedfulError, RuntimeError):
    """The reward model is not good enough to be optimised against."""


class CheckpointError(HeedfulError, OSError):
    """A checkpoint or run folder cannot be written, read or trusted."""
