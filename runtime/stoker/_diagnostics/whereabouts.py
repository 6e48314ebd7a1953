"""In which cloud's region this machine is: from its environment, else from its cloud's own service, if it is in one.

Nobody is asked on a machine whose firmware does not name a cloud: elsewhere the address would lead to strangers.
"""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

__all__ = ["Whereabouts", "whereabouts"]

_VENDOR = Path("sys/class/dmi/id/sys_vendor")
_TIMEOUT_SECONDS = 1.0
_AWS_HINTS = ("AWS_LAMBDA_FUNCTION_NAME", "ECS_CONTAINER_METADATA_URI_V4", "ECS_CONTAINER_METADATA_URI")


@dataclass(frozen=True, slots=True, kw_only=True)
class Whereabouts:
    """Where this machine is.

    Attributes:
        region: its name; empty if it is not known.
        source: who says so.
    """

    region: str = ""
    source: str = ""


def whereabouts(
    environment: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    aws_url: str = "http://169.254.169.254",
    google_url: str = "http://metadata.google.internal",
) -> Whereabouts:
    """Return where this machine is; asks its cloud, for a second at most, if the environment does not say.

    Args:
        environment: default the process's.
        root: below which ``sys`` is.
        aws_url: of Amazon's metadata service.
        google_url: of Google's.
    """
    variables = os.environ if environment is None else environment
    region = variables.get("AWS_REGION", "")
    if region and any(variables.get(hint) for hint in _AWS_HINTS):
        return Whereabouts(region=region, source="AWS_REGION")
    try:
        vendor = (root / _VENDOR).read_text("utf-8", "replace").strip()
    except OSError:
        return Whereabouts()
    try:
        if vendor == "Amazon EC2" and variables.get("AWS_EC2_METADATA_DISABLED", "").lower() != "true":
            lifetime = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
            token = _asked(f"{aws_url}/latest/api/token", lifetime, "PUT")
            found = _asked(f"{aws_url}/latest/meta-data/placement/region", {"X-aws-ec2-metadata-token": token})
            return Whereabouts(region=found, source="EC2's metadata")
        if vendor == "Google":
            zone = _asked(f"{google_url}/computeMetadata/v1/instance/zone", {"Metadata-Flavor": "Google"})
            return Whereabouts(region=zone.rpartition("/")[2].rpartition("-")[0], source="Google's metadata")
    except (OSError, ValueError, HTTPException):  # it does not answer, or not as a metadata service does
        pass
    return Whereabouts()


def _asked(url: str, headers: Mapping[str, str], method: str = "GET") -> str:
    request = urllib.request.Request(url, headers=dict(headers), method=method)  # noqa: S310 - constant http addresses
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # what is on the machine has no proxy
    with opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
        text: str = answer.read(4096).decode("ascii")
    if not text.isprintable():
        raise ValueError(f"{url} does not answer as a metadata service does")
    return text
