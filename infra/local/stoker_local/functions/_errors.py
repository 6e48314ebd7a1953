"""What the Lambda service refuses, as its clients see it."""

from __future__ import annotations

from aiohttp import web

__all__ = ["ServiceError"]

_STATUS = {
    "AccessDeniedException": 403,
    "ExpiredTokenException": 403,
    "IncompleteSignatureException": 400,
    "InvalidParameterValueException": 400,
    "InvalidRequestContentException": 400,
    "InvalidSignatureException": 403,
    "MissingAuthenticationTokenException": 403,
    "RequestTooLargeException": 413,
    "ResourceNotFoundException": 404,
    "TooManyRequestsException": 429,
    "UnrecognizedClientException": 403,
}


class ServiceError(Exception):
    """A call that the service refuses; no function has run.

    Attributes:
        code: Lambda's name of the error, a key of ``_STATUS``.
        reason: why a call was throttled, empty for other errors.
    """

    def __init__(self, code: str, message: str, *, reason: str = "") -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.reason = reason

    @property
    def status(self) -> int:
        """The HTTP status that goes with the code."""
        return _STATUS[self.code]

    def response(self) -> web.Response:
        """Return the answer that botocore turns into its exception of the same name."""
        body = {"Type": "User", "message": self.message}
        if self.reason:
            body["Reason"] = self.reason
        return web.json_response(body, status=self.status, headers={"x-amzn-ErrorType": self.code})
