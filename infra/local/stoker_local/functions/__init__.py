"""A function cloud on this machine: real Lambda and Google runtimes, invoked, frozen, killed and billed."""

from stoker_local.functions._cloud import FunctionCloud, function_cloud
from stoker_local.functions._config import FunctionCloudConfig
from stoker_local.functions._errors import ServiceError
from stoker_local.functions._faults import FunctionFault, FunctionFaultKind, FunctionFaultPlan
from stoker_local.functions._google.spec import GoogleSpec, ObjectFinalized
from stoker_local.functions._outcome import Outcome
from stoker_local.functions._spec import FunctionSpec
from stoker_local.functions._statistics import FunctionStatistics, Happening, total
from stoker_local.functions._triggers.queue import LocalQueue
from stoker_local.functions._triggers.spec import EventSource, Notification, QueueSpec, Schedule

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
