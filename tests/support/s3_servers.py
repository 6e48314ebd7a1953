"""The S3 servers that a test of the protocol runs against: our local bucket, and moto for a second opinion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import pytest
from botocore.exceptions import ClientError

__all__ = ["on_both", "on_each", "refusal", "unlike_moto"]

_T = TypeVar("_T")

on_both = pytest.mark.parametrize("server", ["local-bucket", "moto"])


def unlike_moto(deviation: str) -> pytest.MarkDecorator:
    """Run a test on both, and expect it to fail on moto, which deviates from S3's documentation in this."""
    return pytest.mark.parametrize("server", ["local-bucket", pytest.param("moto", marks=_fails(deviation))])


def on_each(cases: Mapping[str, _T], *, moto: Mapping[str, str]) -> list[Any]:
    """Server, case and its value for both; ``moto`` tells of each case in which it deviates what it does."""
    ours = [pytest.param("local-bucket", case, value) for case, value in cases.items()]
    return ours + [
        pytest.param("moto", case, value, marks=_fails(moto[case]) if case in moto else ())
        for case, value in cases.items()
    ]


def _fails(deviation: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(reason=f"moto {deviation}")


def refusal(function: Any, **arguments: Any) -> tuple[int, str]:
    """Call a client's method and return the status and the code that it is refused with; (200, "") if it is not."""
    try:
        status: int = function(**arguments)["ResponseMetadata"]["HTTPStatusCode"]
    except ClientError as error:
        return error.response["ResponseMetadata"]["HTTPStatusCode"], error.response["Error"]["Code"]
    return status, ""
