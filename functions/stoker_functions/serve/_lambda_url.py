"""Requests and responses as a Lambda function URL and API Gateway word them: payload format 2.0."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from stoker.errors import EventError
from stoker_functions.serve._messages import Request, Response

__all__ = ["from_lambda_url", "to_lambda_url"]


def from_lambda_url(event: Mapping[str, Any]) -> Request:
    """Return the request in an event.

    Raises:
        EventError: it is no event of payload format 2.0.
    """
    try:
        method, path = event["requestContext"]["http"]["method"], event["rawPath"]
        query, headers = event.get("rawQueryString", ""), dict(event.get("headers") or {})
        is_known = event["version"] == "2.0"
    except (LookupError, TypeError, ValueError, AttributeError):
        is_known = False
    if not is_known or not all(isinstance(text, str) for text in (method, path, query, *headers, *headers.values())):
        raise EventError("the event is no request of payload format 2.0, as function URLs and HTTP APIs send them")
    named = {name.lower(): value for name, value in headers.items()}
    return Request(method=method, path=path, query=query, headers=named)


def to_lambda_url(response: Response) -> dict[str, Any]:
    """Return a response as what the function has to return; the body in base64, since it is bytes."""
    return {
        "statusCode": response.status,
        "headers": {name.lower(): value for name, value in response.headers.items()},
        "body": b64encode(response.body).decode(),
        "isBase64Encoded": True,
    }
