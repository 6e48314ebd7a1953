"""What a Lambda function is told to be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stoker_local.functions._variables import check_variables

__all__ = ["FunctionSpec"]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)
_ENVIRONMENT_BYTES = 4096
_MEMORY_MB = range(128, 10_241)
_TMP_MB = range(512, 10_241)
_MAX_TIMEOUT_SECONDS = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec:
    """A Lambda function.

    Attributes:
        handler: ``module.function``, importable from ``task_root`` or from this Python's packages.
        task_root: folder of the code, where the function's processes run.
        timeout_seconds: of one invocation.
        concurrency: most invocations at once, each in an instance of its own; one more is throttled.
        tmp_mb: size of ``/tmp``.
        environment: the function's variables, at most 4 KB in all.
        url_auth: who may call its function URL; empty gives it none.
        retries: of events (``InvocationType="Event"``) whose function failed.
        on_failure: queue that takes events which failed every time; empty drops them.
    """

    name: str
    handler: str
    task_root: str = "."
    memory_mb: int = 128
    timeout_seconds: float = 3.0
    concurrency: int = 10
    tmp_mb: int = 512
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    url_auth: Literal["", "AWS_IAM", "NONE"] = ""
    retries: int = 2
    on_failure: str = ""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not a function name: 1 to 64 of A-Z, a-z, 0-9, '-' and '_'")
        if "." not in self.handler:
            raise ValueError(f"handler={self.handler!r} of {self.name} is not module.function")
        if not Path(self.task_root).is_dir():
            raise ValueError(f"task_root={self.task_root!r} of {self.name} is no folder")
        if self.memory_mb not in _MEMORY_MB or self.tmp_mb not in _TMP_MB:
            raise ValueError(
                f"{self.name}: memory_mb={self.memory_mb} is not within [128, 10240] "
                f"or tmp_mb={self.tmp_mb} not within [512, 10240]"
            )
        if not 0 < self.timeout_seconds <= _MAX_TIMEOUT_SECONDS:
            raise ValueError(f"timeout_seconds={self.timeout_seconds} of {self.name} is not within (0, 900]")
        if self.concurrency < 1 or not 0 <= self.retries <= 2:
            raise ValueError(
                f"{self.name}: concurrency={self.concurrency} is not positive "
                f"or retries={self.retries} not within [0, 2]"
            )
        if self.url_auth not in ("", "AWS_IAM", "NONE"):
            raise ValueError(f"url_auth={self.url_auth!r} of {self.name} is not '', 'AWS_IAM' or 'NONE'")
        size_bytes = check_variables(self.environment, owner=self.name)
        if size_bytes > _ENVIRONMENT_BYTES:
            raise ValueError(f"the environment of {self.name} has {size_bytes} bytes; Lambda takes 4096")

    @property
    def memory_bytes(self) -> int:
        """The configured memory."""
        return self.memory_mb << 20
