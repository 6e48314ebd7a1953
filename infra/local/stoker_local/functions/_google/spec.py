"""What a Google function is told to be."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stoker_local.functions._variables import check_variables

__all__ = ["GoogleSpec", "ObjectFinalized"]

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_MAX_TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GoogleSpec:
    """A Google Cloud Function, second generation.

    Attributes:
        source: the Python file.
        target: the function in it.
        signature: what it takes.
        cpus: of an instance; billed beside its memory.
        timeout_seconds: of one request.
        instances: most instances at once.
        concurrency: most requests at once in one instance.
        environment: the function's variables.
        token: bearer token that requests must carry, as the platform demands of who may not be anybody; empty lets
            everybody on this machine in.
    """

    name: str
    source: str
    target: str
    signature: Literal["http", "cloudevent"] = "http"
    memory_mb: int = 512
    cpus: float = 1.0
    timeout_seconds: float = 60.0
    instances: int = 4
    concurrency: int = 1
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} is not a service name: 1 to 63 of a-z, 0-9 and '-'")
        if not Path(self.source).is_file():
            raise ValueError(f"source={self.source!r} of {self.name} is no file")
        if not self.target.isidentifier():
            raise ValueError(f"target={self.target!r} of {self.name} is not the name of a function")
        if self.signature not in ("http", "cloudevent"):
            raise ValueError(f"signature={self.signature!r} of {self.name} is not 'http' or 'cloudevent'")
        if not (self.memory_mb >= 128 and self.cpus > 0 and self.instances >= 1 and 1 <= self.concurrency <= 1000):
            raise ValueError(
                f"{self.name}: memory_mb={self.memory_mb} is less than 128, cpus={self.cpus} or "
                f"instances={self.instances} not positive, or concurrency={self.concurrency} not within [1, 1000]"
            )
        if not 0 < self.timeout_seconds <= _MAX_TIMEOUT_SECONDS:
            raise ValueError(f"timeout_seconds={self.timeout_seconds} of {self.name} is not within (0, 3600]")
        check_variables(self.environment, owner=self.name)

    @property
    def folder(self) -> str:
        """Where the code lies."""
        return str(Path(self.source).absolute().parent)

    @property
    def memory_bytes(self) -> int:
        """The configured memory."""
        return self.memory_mb << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectFinalized:
    """Tells a Google function of objects that are created in a bucket of the local GCS, as CloudEvents.

    Attributes:
        queue: holds events until the function has answered them with a 2xx status; its dead letters take the others.
        concurrency: most events under way at once.
    """

    bucket: str
    function: str
    queue: str
    concurrency: int = 2

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency={self.concurrency} is not positive")
