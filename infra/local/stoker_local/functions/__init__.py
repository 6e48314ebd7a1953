"""A function cloud on this machine: runs Lambda and Google functions in their real runtimes, with faults and billing.

Example:
    >>> from pathlib import Path
    >>> code = "def echo(event, context): return event"
    >>> size = Path("my_module.py").write_text(code)
    >>> config = FunctionCloudConfig(functions=(FunctionSpec(name="echo", handler="my_module.echo"),))
    >>> async with function_cloud(config) as cloud:
    ...     outcome = await cloud.invoke("echo", {"n": 1})
    ...     outcome.payload, cloud.statistics()["echo"].invocations
    (b'{"n": 1}', 1)
"""

from typing import TYPE_CHECKING, Any

from stoker._deprecation import declare_renamed, load_renamed
from stoker_local.functions._cloud import FunctionCloud, function_cloud
from stoker_local.functions._config import (
    EventSource,
    FunctionCloudConfig,
    FunctionFault,
    FunctionFaultKind,
    FunctionFaultPlan,
    FunctionSpec,
    GoogleSpec,
    Notification,
    ObjectFinalized,
    QueueSpec,
    Schedule,
)
from stoker_local.functions._statistics import FunctionEvent, FunctionStatistics, Outcome, ServiceError, sum_statistics
from stoker_local.functions._triggers import LocalQueue

__all__ = [
    "EventSource",
    "FunctionCloud",
    "FunctionCloudConfig",
    "FunctionFault",
    "FunctionFaultKind",
    "FunctionFaultPlan",
    "FunctionSpec",
    "FunctionStatistics",
    "GoogleSpec",
    "FunctionEvent",
    "LocalQueue",
    "Notification",
    "ObjectFinalized",
    "Outcome",
    "QueueSpec",
    "Schedule",
    "ServiceError",
    "function_cloud",
    "sum_statistics",
]

declare_renamed(__name__, {"Happening": "FunctionEvent", "total": "sum_statistics"})

if not TYPE_CHECKING:  # else type checkers would accept any name

    def __getattr__(name: str) -> Any:
        return load_renamed(__name__, name)
