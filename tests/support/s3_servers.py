"""The S3 servers for tests of the protocol: our local bucket, and moto for comparison."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import pytest
from botocore.exceptions import ClientError

__all__ = ["on_both", "on_each", "refusal", "unlike_moto"]

_T = TypeVar("_T")

on_both = pytest.mark.parametrize("server", ["local-bucket", "moto"])


def unlike_moto(deviation: str) -> pytest.MarkDecorator:
    """Run a test on both, and expect it to fail on moto because of a deviation from S3's documentation."""
    return pytest.mark.parametrize("server", ["local-bucket", pytest.param("moto", marks=_fails(deviation))])


def on_each(cases: Mapping[str, _T], *, moto: Mapping[str, str]) -> list[Any]:
    """Return server, case and its value for both; ``moto`` describes each case in which moto deviates."""
    ours = [pytest.param("local-bucket", case, value) for case, value in cases.items()]
    return ours + [
        pytest.param("moto", case, value, marks=_fails(moto[case]) if case in moto else ())
        for case, value in cases.items()
    ]


def _fails(deviation: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(reason=f"moto {deviation}")


def refusal(function: Any, **arguments: Any) -> tuple[int, str]:
    """Return the status and code of a call's error; (200, "") if it succeeds."""
    try:
        status: int = function(**arguments)["ResponseMetadata"]["HTTPStatusCode"]
    except ClientError as error:
        return error.response["ResponseMetadata"]["HTTPStatusCode"], error.response["Error"]["Code"]
    return status, ""
