"""The executors of a fan-out: worker processes, AWS Lambda, Google Cloud functions, and Ray.

Each is an entry point of the group ``stoker.executors``, and imports its dependencies when it is opened.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module

from stoker._base.plugins import require_extra
from stoker.abc import Executor
from stoker.fanout import ExecutorOptions


def _open(module: str, name: str, extra: str, options: ExecutorOptions) -> Executor:
    with require_extra("this executor", extra):
        executor: Executor = getattr(import_module(f"{__name__}.{module}"), name)(options)
    return executor


open_local = partial(_open, "worker", "LocalExecutor", "")
"""Return an executor with worker processes on this machine."""
open_lambda = partial(_open, "lambda_", "LambdaExecutor", "aws")
"""Return an executor that invokes deployed Lambda functions."""
open_gcf = partial(_open, "gcf", "GcfExecutor", "gcp")
"""Return an executor that calls deployed Google functions over HTTP."""
open_ray = partial(_open, "ray", "RayExecutor", "ray")
"""Return an executor that runs functions as tasks of a Ray cluster."""
