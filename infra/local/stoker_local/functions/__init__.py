"""A function cloud on this machine: real Lambda and Google runtimes, invoked, frozen, killed and billed."""

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
from stoker_local.functions._statistics import FunctionStatistics, Happening, Outcome, ServiceError, total
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
    "Happening",
    "LocalQueue",
    "Notification",
    "ObjectFinalized",
    "Outcome",
    "QueueSpec",
    "Schedule",
    "ServiceError",
    "function_cloud",
    "total",
]
