"""The setting ``cluster=``: what the cache process of a machine may use, and how long it waits for its next client."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Annotated

from stoker._base.arguments import AtLeastOne, BoundedConfig, NumberBound
from stoker._base.sizes import parse_bytes
from stoker._cache.place import parse_place
from stoker._cluster.frames import HELLO
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
        tls: Whether connections between machines are encrypted.
    """

    path: Path | None
    limit_bytes: AtLeastOne[int]
    linger_seconds: Annotated[float, NumberBound(">=", 0)] = 60.0
    name: str = ""
    tls: bool = True

    @classmethod
    def parse(cls, text: str) -> ClusterSpec:
        """Parse ``memory:?limit=SIZE`` or ``disk:FOLDER?limit=SIZE``, with ``linger``, ``name`` and ``tls``.

        Raises:
            ConfigError: The text has another form.

        Example:
            >>> ClusterSpec.parse("memory:?limit=64GB&linger=10").linger_seconds
            10.0
        """
        try:
            path, options = parse_place(text, ["linger", "name", "tls"])
            return cls(
                path=path,
                limit_bytes=parse_bytes(options["limit"], "limit"),
                linger_seconds=float(options.get("linger", "60").removesuffix("s")),
                name=options.get("name", ""),
                tls={"yes": True, "no": False}[options.get("tls", "yes")],
            )
        except KeyError as error:
            raise ConfigError(f"cluster={text!r:.200}: tls must be yes or no, not {error}; {_EXAMPLE}") from None
        except ValueError as error:
            raise ConfigError(f"cluster={text!r:.200}: {error}; {_EXAMPLE}") from None

    @property
    def key(self) -> str:
        """Name of the process's files, 16 hexadecimal digits; equal for equal settings of releases that go together."""
        return blake2b(repr((HELLO, self.path, self.limit_bytes, self.name)).encode(), digest_size=8).hexdigest()
