"""What runs on a Ray cluster: one function, with a deployment of its own."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping

from stoker_functions._executors.runner import Runner

__all__ = ["perform"]


def perform(function: str, event: str, environment: Mapping[str, str], functions: Mapping[str, str]) -> str:
    """Run a function to its end on the machine that Ray has chosen.

    Args:
        function: its name.
        event: a JSON object.
        environment: settings, over those of the machine.
        functions: name → ``module:function``, beside stoker's own.

    Returns:
        A JSON object for :func:`stoker_functions._executors.runner.answer_of`.
    """
    os.environ.update(environment)
    return asyncio.run(_performed(Runner(os.environ, functions), function, event))


async def _performed(runner: Runner, function: str, event: str) -> str:
    try:
        return await runner.perform(function, json.loads(event))
    finally:
        await runner.close()
