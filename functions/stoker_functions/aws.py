"""AWS Lambda: ``stoker_functions.aws.NAME`` is the handler of a function, which imports nothing for the others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from stoker_functions._deployment import Settings
from stoker_functions._instance import LAMBDA_HANDLERS, Instance, handler_of

__all__ = [*LAMBDA_HANDLERS]


@cache
def _instance() -> Instance:
    return Instance(Settings.from_environment())


def __getattr__(name: str) -> Callable[[Any, Any], dict[str, Any]]:
    if name not in LAMBDA_HANDLERS:
        raise AttributeError(f"there is no function {name!r}")
    handler = handler_of(LAMBDA_HANDLERS[name])

    def invoke(event: Any, context: Any) -> dict[str, Any]:
        return _instance().run(handler, event, context.get_remaining_time_in_millis() / 1000)

    return invoke
