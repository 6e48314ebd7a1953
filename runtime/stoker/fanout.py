"""Many calls of functions at once: tasks, the driver that sees to their end, and the executors that run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stoker import errors
from stoker._base.arguments import Bounded, Positive
from stoker._base.plugins import load_plugin, plugin_names
from stoker._fanout.board import FanoutConfig, Task
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
class ExecutorOptions(Bounded):
    """Where functions run and how they are reached; an executor reads what concerns it and ignores the rest.

    Attributes:
        prefix: deployed functions are called ``{prefix}-{function}``.
        concurrency: calls at once, at most; None leaves it to the executor.
        timeout_seconds: that a call may take, more than the function's own limit; None leaves it to the executor.
        region: of the deployed functions.
        project: of the deployed functions (Google).
        endpoint_url: of an emulator or of functions elsewhere; with Ray, the address of the cluster.
        service_account: in whose name functions are called (Google), where one's own name will not do.
        memory_bytes: that a deployed function has, where its answers do not tell (Google).
        vcpus: that a deployed function has, where its answers do not tell (Google).
        environment: settings for functions that the executor starts itself (local, Ray), over the inherited ones.
        functions: name → ``module:function``, for functions that the executor starts itself, beside stoker's own.
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
        Bounded.__post_init__(self)  # super() does not know a class with slots
        if self.endpoint_url is not None and self.endpoint_url.startswith("http"):
            check_endpoint(self.endpoint_url, "endpoint_url")


Factory = Callable[[ExecutorOptions], Executor]
"""What an entry point in the group ``stoker.executors`` names."""


def executor_names() -> tuple[str, ...]:
    """Return the names of the executors that are installed."""
    return plugin_names(_GROUP)


def open_executor(name: str, options: ExecutorOptions) -> Executor:
    """Return an executor by its name; it starts nothing before it is entered.

    Raises:
        ConfigError: there is none of this name, or the options are not enough for it.
        MissingExtraError: what it needs is not installed.
    """
    factory: Factory = load_plugin(_GROUP, name, "executor")
    return factory(options)


def error_of_function(function: str, error_type: str, error_message: str) -> StokerError:
    """Return the error that a function's own stands for: transient if it is of a transient class of stoker's.

    A class that stoker does not know is a mistake in the function, or in its platform: it would come again.
    """
    said = error_message[:_MAX_MESSAGE]
    kind = getattr(errors, error_type, None) if error_type.isidentifier() else None
    if isinstance(kind, type) and issubclass(kind, TransientError):
        return kind(f"the function {function} gave up: {said}")
    return FunctionError(function, error_type, said)
