"""The setting ``cluster=``: what the cache process of a machine may use, and how long it waits for its next client."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qsl

from stoker._base.arguments import AtLeastOne, BoundedConfig, NumberBound
from stoker._base.sizes import parse_bytes
from stoker.errors import ConfigError

_EXAMPLE = "write for example memory:?limit=64GB or disk:/mnt/nvme?limit=1TB"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec(BoundedConfig):
    """Parsed setting of a cluster cache. Loaders of a machine with equal ones share a process.

    Attributes:
        path: Folder for a file with the objects; None for memory.
        limit_bytes: Maximum size of the objects on a machine, in bytes.
        linger_seconds: Time that the process stays without a client, in seconds.
        name: Name that keeps jobs with otherwise equal settings apart.
    """

    path: Path | None
    limit_bytes: AtLeastOne[int]
    linger_seconds: Annotated[float, NumberBound(">=", 0)] = 60.0
    name: str = ""

    @classmethod
    def parse(cls, text: str) -> ClusterSpec:
        """Parse ``memory:?limit=SIZE`` or ``disk:FOLDER?limit=SIZE``, with ``&linger=SECONDS`` and ``&name=NAME``.

        Raises:
            ConfigError: The text has another form.

        Example:
            >>> ClusterSpec.parse("memory:?limit=64GB&linger=10").linger_seconds
            10.0
        """
        if not isinstance(text, str):
            raise ConfigError(f"cluster must be a string, not {text!r:.80}; {_EXAMPLE}")
        kind, _, rest = text.partition(":")
        path, _, query = rest.partition("?")
        if kind not in ("disk", "memory") or bool(path) != (kind == "disk") or "\0" in path:
            raise ConfigError(f"cluster={text!r:.200} is neither memory nor a disk; {_EXAMPLE}")
        try:
            given = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
            settings = dict(given)
            if "limit" not in settings or len(settings) < len(given) or settings.keys() - {"limit", "linger", "name"}:
                raise ConfigError("it must have limit=, and may have linger= and name=, each once")
            return cls(
                path=Path(path).expanduser().absolute() if path else None,
                limit_bytes=parse_bytes(settings["limit"], "limit"),
                linger_seconds=float(settings.get("linger", "60").removesuffix("s")),
                name=settings.get("name", ""),
            )
        except (ValueError, RuntimeError) as error:  # RuntimeError: there is no such home directory
            raise ConfigError(f"cluster={text!r:.200}: {error}; {_EXAMPLE}") from None

    @property
    def key(self) -> str:
        """Name of the process's files, 16 hexadecimal digits; equal for equal settings, however long they linger."""
        return blake2b(repr((self.path, self.limit_bytes, self.name)).encode(), digest_size=8).hexdigest()
