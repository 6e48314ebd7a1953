"""Cloud region of this machine, for diagnostics, and the findings about its resources.

A cloud's metadata service is queried for the region only if the firmware names that cloud: elsewhere, its address may
belong to an unrelated server.
"""

from __future__ import annotations

import enum
import os
import platform
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from stoker._base.machine import Machine
from stoker._base.sizes import format_bytes
from stoker._stores.options import machine_vendor

_TIMEOUT_SECONDS = 1.0
_AWS_HINTS = ("AWS_LAMBDA_FUNCTION_NAME", "ECS_CONTAINER_METADATA_URI_V4", "ECS_CONTAINER_METADATA_URI")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRegion:
    """Cloud region of this machine.

    Attributes:
        region: name of the region; empty if unknown.
        source: where the name comes from.
    """

    region: str = ""
    source: str = ""


def detect_region(
    environment: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    aws_url: str = "http://169.254.169.254",
    google_url: str = "http://metadata.google.internal",
) -> MachineRegion:
    """Return the region from the environment, else from the cloud's metadata service, which has 1 s to answer.

    Args:
        environment: environment variables; default those of the process.
        root: folder that contains ``sys``.
        aws_url: URL of Amazon's metadata service.
        google_url: URL of Google's metadata service.
    """
    variables = os.environ if environment is None else environment
    region = variables.get("AWS_REGION", "")
    if region and any(variables.get(hint) for hint in _AWS_HINTS):
        return MachineRegion(region=region, source="AWS_REGION")
    vendor = machine_vendor(root)
    try:
        if vendor == "Amazon EC2" and variables.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true":
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
            token = _query_metadata(f"{aws_url}/latest/api/token", lifetime, "PUT")
            name = _query_metadata(f"{aws_url}/latest/meta-data/placement/region", {"X-aws-ec2-metadata-token": token})
            return MachineRegion(region=name, source="EC2's metadata")
        if vendor == "Google":
            zone = _query_metadata(f"{google_url}/computeMetadata/v1/instance/zone", {"Metadata-Flavor": "Google"})
            return MachineRegion(region=zone.rpartition("/")[2].rpartition("-")[0], source="Google's metadata")
    except (OSError, ValueError, HTTPException):  # no answer, or not one of a metadata service
        pass
    return MachineRegion()


def _query_metadata(url: str, headers: Mapping[str, str], method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=dict(headers), method=method)  # noqa: S310 - constant http addresses
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a link-local address needs no proxy
    with opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
        text: str = answer.read(4096).decode("ascii")
    if not text.isprintable():
        raise ValueError(f"{url} does not answer as a metadata service does")
    return text


_MIN_OPEN_FILES, _RECOMMENDED_OPEN_FILES = 128, 1024
"""A loader has up to 64 connections, and a framework's workers have files of their own."""
_MIN_FREE_BYTES = 1 << 30
_EXTRAS = {
    "s3": ("aiobotocore", "for s3:// URLs"),
    "gcs": ("gcloud.aio.auth", "for gs:// URLs"),
    "torch": ("torch", "for stoker_torch.Loader"),
}
_EXTRA_OF = {"s3": "s3", "gs": "gcs"}


class Level(enum.StrEnum):
    """Severity of a finding, lowest first."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    Attributes:
        check: name of the check.
        level: severity.
        text: what the check found; contains no secret.
        advice: what to do about it; empty if nothing.
        command: command that does it; empty if there is none.
    """

    check: str
    level: Level
    text: str
    advice: str = ""
    command: str = ""


def package_findings(scheme: str) -> Iterator[Finding]:
    """Check the installed packages; a missing extra is a problem only if the URL scheme ``scheme`` needs it."""
    names = ("stoker", "numpy", "aiohttp", *(["torch"] if find_spec("torch") else []))
    versions = ", ".join(f"{name} {_version(name)}" for name in names)
    yield Finding("versions", Level.OK, f"Python {platform.python_version()}, {versions}")
    for extra, (module, use) in _EXTRAS.items():
        if _is_importable(module) or not _is_declared(extra):
            continue
        text = f"stoker[{extra}] is not installed, {use}"
        is_needed = _EXTRA_OF.get(scheme) == extra
        yield (
            Finding("extras", Level.PROBLEM, text, "install it", f"pip install 'stoker[{extra}]'")
            if is_needed
            else Finding("extras", Level.NOTE, text)
        )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(of unknown version)"


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False


def _is_declared(extra: str) -> bool:
    try:
        return any(f"extra == '{extra}'" in each.replace('"', "'") for each in requires("stoker") or ())
    except PackageNotFoundError:
        return True


def machine_findings(machine: Machine) -> Iterator[Finding]:
    """Check memory, cores and open files of this machine."""
    limited = f", limited by {machine.limited_by}" if machine.limited_by else ""
    memory = f"{format_bytes(machine.memory_bytes)}{limited}, {format_bytes(machine.free_bytes)} of it free"
    if machine.free_bytes < _MIN_FREE_BYTES:
        advice = "a loader takes 512 MB by default: give it less, or this process more"
        yield Finding("memory", Level.WARNING, memory, advice, 'Loader(memory="128MB")')
    else:
        yield Finding("memory", Level.OK, f"{memory}; /dev/shm is not needed")
    yield Finding("cores", Level.OK, f"{machine.cores:g}")
    files = f"{machine.open_files:,} at once" if machine.open_files < 1 << 30 else "no limit"
    if machine.open_files >= _RECOMMENDED_OPEN_FILES:
        yield Finding("open files", Level.OK, files)
        return
    advice, command = "a loader opens up to 64 connections, in addition to all other files", ""
    if machine.max_open_files > machine.open_files:
        command = f"ulimit -n {min(4096, machine.max_open_files)}"
    if machine.max_open_files < _RECOMMENDED_OPEN_FILES:
        advice += (
            f"; the hard limit is {machine.max_open_files:,}: have it raised where this process is started "
            "(limits.conf, LimitNOFILE= of systemd, --ulimit nofile= of Docker)"
        )
    level = Level.PROBLEM if machine.open_files < _MIN_OPEN_FILES else Level.WARNING
    yield Finding("open files", level, files, advice, command)
