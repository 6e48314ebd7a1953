"""The tiny functions as handlers of Lambda: ``support.tiny_lambda.NAME``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from support import tiny_functions

__all__ = ["__getattr__"]


def __getattr__(name: str) -> Callable[[Any, Any], Any]:
    if name not in tiny_functions.FUNCTIONS:
        raise AttributeError(name)
    function = getattr(tiny_functions, name)
    return lambda event, _: asyncio.run(function(event))
