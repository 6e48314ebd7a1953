"""Runs functions in this process, as a deployed instance would: for executors that start their own."""

from __future__ import annotations

import asyncio
import json
import math
import resource
import sys
from collections.abc import Mapping
from typing import Any

from stoker.abc import Answer
from stoker.errors import ConfigError
from stoker.fanout import error_of_function
from stoker_functions._deadline import Deadline
from stoker_functions._deployment import Deployment
from stoker_functions._handlers import HANDLERS, handler_of
from stoker_functions._settings import Settings

__all__ = ["Runner", "answer_of"]

_NO_DEADLINE = Deadline(math.inf, math.inf)
_KIB = 1 if sys.platform == "darwin" else 1 << 10  # what ru_maxrss counts in


class Runner:
    """Calls handlers with one deployment, which is made at the first call.

    Args:
        environ: where the deployment's settings are read.
        functions: name → ``module:function``, beside stoker's own.
    """

    def __init__(self, environ: Mapping[str, str], functions: Mapping[str, str]) -> None:
        self._environ = environ
        self._functions = {**HANDLERS, **functions}
        self._deployment: Deployment | None = None

    async def perform(self, function: str, event: Mapping[str, Any]) -> str:
        """Run a function to its end; return a JSON object for :func:`answer_of`, also if it fails."""
        begun_seconds = asyncio.get_running_loop().time()
        is_cold = self._deployment is None
        try:
            outcome: dict[str, Any] = {"result": await self._result(function, event)}
            json.dumps(outcome, allow_nan=False)
        except Exception as error:  # noqa: BLE001 - a function's boundary: whatever it raises is its answer
            outcome = {"errorType": type(error).__name__, "errorMessage": str(error)}
        seconds = asyncio.get_running_loop().time() - begun_seconds
        used_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
        return json.dumps({**outcome, "seconds": seconds, "memory_bytes": used_bytes, "is_cold": is_cold})

    async def close(self) -> None:
        """Release what the deployment holds."""
        if self._deployment is not None:
            await self._deployment.close()

    async def _result(self, function: str, event: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._deployment is None:
            self._deployment = Deployment(Settings.from_environment(self._environ))
        if function not in self._functions:
            raise ConfigError(f"there is no function {function!r}, only {', '.join(self._functions)}")
        result: object = await handler_of(self._functions[function])(event, self._deployment, _NO_DEADLINE)
        if not isinstance(result, dict):
            raise TypeError(f"the result is no JSON object but a {type(result).__name__}")
        return result


def answer_of(function: str, outcome: str | bytes) -> Answer:
    """Return the answer that :meth:`Runner.perform` wrote down, or raise the error.

    Raises:
        FunctionError: the function failed.
        TransientError: it failed in a way that may pass.
    """
    fields = json.loads(outcome)
    if "result" not in fields:
        raise error_of_function(function, fields["errorType"], fields["errorMessage"])
    return Answer(
        result=fields["result"],
        billed_seconds=fields["seconds"],
        memory_bytes=fields["memory_bytes"],
        is_cold=fields["is_cold"],
    )
