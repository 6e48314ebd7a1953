"""Many calls of functions at once: tasks, the driver that sees to their end, and the executors that run them."""

from stoker._fanout.board import FanoutConfig, Task
from stoker._fanout.driver import Driver
from stoker._fanout.executor import ExecutorOptions, error_of_function, executor_names, open_executor
from stoker._fanout.report import Report
from stoker.abc import Answer, Executor

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
