"""Where a fan-out's functions run: on this machine, on AWS Lambda, on Google's functions, or on a Ray cluster.

Each is an entry point of the group ``stoker.executors``; what it needs is imported when it is asked for.
"""

from __future__ import annotations

from importlib import import_module

from stoker.abc import Executor
from stoker.errors import MissingExtraError
from stoker.fanout import ExecutorOptions

__all__ = ["open_gcf", "open_lambda", "open_local", "open_ray"]


def open_local(options: ExecutorOptions) -> Executor:
    """Return an executor with worker processes on this machine."""
    return _made("local", "LocalExecutor", "", options)


def open_lambda(options: ExecutorOptions) -> Executor:
    """Return an executor that invokes deployed Lambda functions."""
    return _made("lambda_", "LambdaExecutor", "aws", options)


def open_gcf(options: ExecutorOptions) -> Executor:
    """Return an executor that calls deployed Google functions over HTTP."""
    return _made("gcf", "GcfExecutor", "gcp", options)


def open_ray(options: ExecutorOptions) -> Executor:
    """Return an executor that runs functions as tasks of a Ray cluster."""
    return _made("ray", "RayExecutor", "ray", options)


def _made(module: str, name: str, extra: str, options: ExecutorOptions) -> Executor:
    try:
        made: Executor = getattr(import_module(f"{__name__}.{module}"), name)(options)
    except ModuleNotFoundError as error:
        if not extra:
            raise
        raise MissingExtraError(f"this executor needs {error.name}; pip install 'stoker[{extra}]'") from error
    return made
