"""Concurrent calls of serverless functions: tasks, the driver that runs them to completion, and executors.

Example:
    Call the function ``thumbnail``, which is deployed as ``stoker-thumbnail``, once per task:

    >>> async def main():
    ...     tasks = [Task(name=f"{i:04}", function="thumbnail", event={"part": i}) for i in range(1000)]
    ...     async with open_executor("lambda", ExecutorOptions(region="us-east-1")) as executor:
    ...         return await Driver(executor).run(tasks)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stoker import errors
from stoker._base.arguments import BoundedConfig, Positive
from stoker._base.plugins import load_plugin, plugin_names
from stoker._fanout.concurrency import FanoutConfig, Task
from stoker._fanout.driver import Driver
from stoker._fanout.report import Report
from stoker._stores.options import check_endpoint
from stoker.abc import Answer, Executor
from stoker.errors import FunctionError, StokerError, TransientError

__all__ = [
    "Answer",
    "Driver",
    "Executor",
    "ExecutorOptions",
    "FanoutConfig",
    "Report",
    "Task",
    "error_of_function",
    "executor_names",
    "open_executor",
]

_GROUP = "stoker.executors"
_MAX_MESSAGE = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorOptions(BoundedConfig):
    """Location and credentials of functions. An executor uses the options that apply to it and ignores the others.

    Attributes:
        prefix: prefix of deployed functions, whose names are ``{prefix}-{function}``; default ``stoker``.
        concurrency: maximum number of concurrent calls; None for the executor's default.
        timeout_seconds: timeout of a call, longer than the function's own limit; None for the executor's default.
        region: region of the deployed functions.
        project: project of the deployed functions (Google).
        endpoint_url: URL of an emulator or of functions elsewhere; with Ray, the address of the cluster.
        service_account: service account to impersonate (Google), if the caller's own identity may not call functions.
        memory_bytes: memory of a deployed function, if its responses do not report it (Google).
        vcpus: number of vCPUs of a deployed function, if its responses do not report it (Google).
        environment: environment variables that the executor adds for functions it starts itself (local, Ray).
        functions: ``module:function`` by name, for functions besides stoker's that the executor starts itself.

    Example:
        >>> ExecutorOptions(region="us-east-1", concurrency=500).prefix
        'stoker'
    """

    prefix: str = "stoker"
    concurrency: Positive[int] | None = None
    timeout_seconds: Positive[float] | None = None
    region: str | None = None
    project: str | None = None
    endpoint_url: str | None = None
    service_account: str | None = None
    memory_bytes: Positive[int] | None = None
    vcpus: Positive[float] | None = None
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    functions: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        BoundedConfig.__post_init__(self)  # super() does not know a class with slots
        if self.endpoint_url is not None and self.endpoint_url.startswith("http"):
            check_endpoint(self.endpoint_url, "endpoint_url")


Factory = Callable[[ExecutorOptions], Executor]
"""Type of the entry points in the group ``stoker.executors``."""


def executor_names() -> tuple[str, ...]:
    """Return the names of the installed executors, such as ``local`` and ``lambda``.

    Example:
        >>> "lambda" in executor_names()
        True
    """
    return plugin_names(_GROUP)


def open_executor(name: str, options: ExecutorOptions) -> Executor:
    """Return an executor by name. It starts nothing before ``async with`` enters it.

    Example:
        >>> async with open_executor("local", ExecutorOptions(concurrency=2)) as executor:
        ...     executor.concurrency
        2

    Args:
        name: name of the executor, one of :func:`executor_names`.
        options: location and credentials of its functions.

    Raises:
        ConfigError: no executor has this name, or an option that it requires is missing.
        MissingExtraError: a dependency of the executor is not installed.
    """
    factory: Factory = load_plugin(_GROUP, name, "executor")
    return factory(options)


def error_of_function(function: str, error_type: str, error_message: str) -> StokerError:
    """Convert an exception that a function reported: to its own class if that is a TransientError of stoker.

    Other classes indicate a permanent failure of the function or its platform, and become a FunctionError.

    Args:
        function: name of the function.
        error_type: class name of the exception.
        error_message: message of the exception; at most 2,000 characters are kept.

    Example:
        >>> error_of_function("pack", "ThrottledError", "slow down")
        ThrottledError('the function pack gave up: slow down')
    """
    said = error_message[:_MAX_MESSAGE]
    kind = vars(errors).get(error_type)
    if isinstance(kind, type) and issubclass(kind, TransientError):
        return kind(f"the function {function} gave up: {said}")
    return FunctionError(function, error_type, said)
