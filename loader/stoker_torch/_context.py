"""Whether a user's function asks for a sample's context, and how it is called with one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from stoker._order.random_words import SampleContext
from stoker.errors import ConfigError

__all__ = ["ContextOf", "WithContext", "asks_for_context", "with_context"]

ContextOf = Callable[[int], SampleContext]
"""Returns the context of the sample at a place of a batch."""
WithContext = Callable[[Any, SampleContext | None], Any]
"""A function of a value and its sample's context."""

_NAME = "context"


def asks_for_context(function: Callable[..., Any], what: str = "the function", *, is_of_batch: bool = False) -> bool:
    """Return whether a function has a parameter ``context``.

    Args:
        function: of one value.
        what: names it, for errors.
        is_of_batch: whether the value is a batch, for which there is no context.

    Raises:
        ConfigError: it cannot be called with a value, and a context if it asks for one.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some of those that are written in C have none
        return False
    asks = _NAME in signature.parameters and not is_of_batch
    try:
        signature.bind(None, **({_NAME: None} if asks else {}))
    except TypeError as error:
        remedy = (
            f"only decode and transform are given a {_NAME!r}, since which samples a batch has depends on its size and "
            "on the ranks: draw there what is needed here"
            if is_of_batch
            else f"it is called with one value, and with the sample's SampleContext if it has a parameter {_NAME!r}"
        )
        raise ConfigError(f"{what} {function!r} cannot be called: {error}; {remedy}") from None
    return asks


def with_context(function: Callable[..., Any]) -> WithContext:
    """Return a function of a value and a context that calls a user's function with what it asks for."""
    if asks_for_context(function):
        return lambda value, context: function(value, context=context)
    return lambda value, _: function(value)
