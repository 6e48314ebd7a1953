"""S3's errors: one exception, whose code decides the status, and its XML."""

from __future__ import annotations

from collections.abc import Mapping
from xml.sax.saxutils import escape

from stoker_local._http1 import Response

__all__ = ["S3Error"]

STATUS = {
    "AccessDenied": 403,
    "AuthorizationHeaderMalformed": 400,
    "BadDigest": 400,
    "BadRequest": 400,
    "BucketAlreadyExists": 409,
    "BucketAlreadyOwnedByYou": 409,
    "BucketNotEmpty": 409,
    "EntityTooLarge": 400,
    "EntityTooSmall": 400,
    "ExpiredToken": 400,
    "InternalError": 500,
    "InvalidAccessKeyId": 403,
    "InvalidArgument": 400,
    "InvalidBucketName": 400,
    "InvalidDigest": 400,
    "InvalidPart": 400,
    "InvalidPartOrder": 400,
    "InvalidPartNumber": 416,
    "InvalidRange": 416,
    "InvalidRequest": 400,
    "InvalidTag": 400,
    "InvalidToken": 400,
    "InvalidURI": 400,
    "KeyTooLongError": 400,
    "MalformedXML": 400,
    "MethodNotAllowed": 405,
    "NoSuchBucket": 404,
    "NoSuchKey": 404,
    "NoSuchUpload": 404,
    "NoSuchVersion": 404,
    "NotImplemented": 501,
    "PermanentRedirect": 301,
    "PreconditionFailed": 412,
    "RequestTimeTooSkewed": 403,
    "SignatureDoesNotMatch": 403,
    "SlowDown": 503,
    "XAmzContentSHA256Mismatch": 400,
}


class S3Error(Exception):
    """A request that S3 refuses.

    Attributes:
        code: S3's name of the error, a key of ``STATUS``.
        elements: further XML elements, such as ``Region``.
        headers: further response headers.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        elements: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.elements = elements or {}
        self.headers = headers or {}

    def response(self, resource: str) -> Response:
        """Return the answer that S3 gives; ``resource`` is the path that was asked for."""
        fields = {"Code": self.code, "Message": self.message, **self.elements, "Resource": resource}
        inner = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in fields.items())
        body = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{inner}</Error>'
        headers = {"Content-Type": "application/xml", **self.headers}
        return Response(status=STATUS[self.code], headers=headers, body=body.encode())
