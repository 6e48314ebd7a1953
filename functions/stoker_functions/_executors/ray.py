"""The Ray executor, which runs functions as tasks of a Ray cluster, or of a new local one if there is none."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from stoker.abc import Answer, Executor
from stoker.errors import ConfigError, ConnectionLostError
from stoker.fanout import ExecutorOptions
from stoker_functions._executors.worker import Runner, parse_answer


class RayExecutor(Executor):
    """Runs each function as a task with one processor; Ray places tasks, and queues them if no processor is free.

    Every machine of the cluster needs stoker and its own credentials for the buckets; each task carries the settings of
    the options. If this process is connected to a cluster already, that one is used and stays connected.
    """

    name = "ray"
    sees_files = True
    heeds = frozenset({"endpoint_url"})

    def __init__(self, options: ExecutorOptions) -> None:
        self.concurrency = options.concurrency or 1
        self._options = options
        self._is_ours = False
        self._task: Any = None

    async def __aenter__(self) -> RayExecutor:
        try:
            if not ray.is_initialized():
                ray.init(address=self._options.endpoint_url, include_dashboard=False, log_to_driver=False)
                self._is_ours = True
            processors = int(ray.cluster_resources().get("CPU", 1))  # type: ignore[no-untyped-call]
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"there is no Ray cluster at {self._options.endpoint_url}: {error}") from error
        self.concurrency = self._options.concurrency or max(1, processors)
        # No retries here: the fan-out driver retries, and counts them.
        self._task = ray.remote(num_cpus=1, max_retries=0)(perform)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task = None
        if self._is_ours:
            ray.shutdown()
            self._is_ours = False

    async def call(self, function: str, event: Mapping[str, Any]) -> Answer:
        """Run a function on the cluster.

        Raises:
            ConnectionLostError: the machine or process that ran the function was lost.
            FunctionError: the function failed.
        """
        if self._task is None:
            raise ConfigError("an executor is used inside its 'async with' block")
        options = self._options
        running = self._task.remote(function, json.dumps(dict(event)), options.environment, options.functions)
        done = False
        try:
            outcome: str = await running
            done = True
        except RayError as error:
            done = True
            raise ConnectionLostError(f"the Ray task that ran {function} was lost: {error}") from error
        finally:
            if not done:  # this call was cancelled
                ray.cancel(running, force=True)
        return parse_answer(function, outcome)


def perform(function: str, event: str, environment: Mapping[str, str], functions: Mapping[str, str]) -> str:
    """Run a function to its end on the machine that Ray has chosen.

    Args:
        function: name of the function.
        event: event of the function, a JSON object.
        environment: environment variables that override those of the machine.
        functions: name → ``module:function`` of functions in addition to stoker's own.

    Returns:
        A JSON object for :func:`stoker_functions._executors.worker.parse_answer`.
    """
    os.environ.update(environment)
    return asyncio.run(_perform(Runner(os.environ, functions), function, event))


async def _perform(runner: Runner, function: str, event: str) -> str:
    try:
        return await runner.perform(function, json.loads(event))
    finally:
        await runner.close()
