"""Python functions that a recipe names as ``module:function``."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from heedful.errors import ConfigError


def load_function(
    name: str, what: str, *, takes: str, arguments: Sequence[Any], keywords: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The function that ``module:function`` names.

    Args:
        what: what the recipe wants it for, as messages begin: "gold scorer".
        takes: how it is called, as messages say it: "(prompt, answer, finished=...)".
        arguments, keywords: such a call; only its form counts.

    Raises:
        ConfigError: the name has another form, the module cannot be imported, or the function is missing or cannot be
            called that way.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"{what} {name!r}: write it as module:function, for example my_package.scores:helpful")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything while it is imported
        raise ConfigError(
            f"{what} {name!r}: cannot import {module_name}: {error}; a module of your own must be on PYTHONPATH"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{what} {name!r}: {module_name} has no function {attribute!r}")
    try:
        inspect.signature(function).bind(*arguments, **(keywords or {}))
    except TypeError as error:
        raise ConfigError(f"{what} {name!r}: must accept {takes}: {error}") from error
    except ValueError:  # some functions written in C do not tell their parameters
        pass
    return function  # type: ignore[no-any-return]
