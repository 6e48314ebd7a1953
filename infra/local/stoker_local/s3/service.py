"""S3 as one synchronous function: which operation a request is, whether it may, what it answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from types import MappingProxyType

from stoker_local.http1 import Body, Request, Response
from stoker_local.objects import ObjectCreated
from stoker_local.s3 import multipart, operations
from stoker_local.s3.errors import S3Error
from stoker_local.s3.model import Bucket, BucketSpec, Call, element, iso_time, parse_xml, xml_response
from stoker_local.s3.payload import decode_payload
from stoker_local.s3.signature import KeyPair, read_claim, verify

__all__ = ["S3Service"]

_ROUTES = MappingProxyType(
    {
        ("GET", "service", ""): "ListBuckets",
        ("PUT", "bucket", ""): "CreateBucket",
        ("HEAD", "bucket", ""): "HeadBucket",
        ("DELETE", "bucket", ""): "DeleteBucket",
        ("GET", "bucket", "location"): "GetBucketLocation",
        ("GET", "bucket", "list-type"): "ListObjectsV2",
        ("POST", "bucket", "delete"): "DeleteObjects",
        ("GET", "object", ""): "GetObject",
        ("HEAD", "object", ""): "HeadObject",
        ("PUT", "object", ""): "PutObject",
        ("DELETE", "object", ""): "DeleteObject",
        ("POST", "object", "uploads"): "CreateMultipartUpload",
        ("PUT", "object", "uploadId"): "UploadPart",
        ("POST", "object", "uploadId"): "CompleteMultipartUpload",
        ("DELETE", "object", "uploadId"): "AbortMultipartUpload",
    }
)
_SUBRESOURCES = frozenset(
    {
        "accelerate",
        "acl",
        "attributes",
        "cors",
        "delete",
        "encryption",
        "inventory",
        "legal-hold",
        "lifecycle",
        "list-type",
        "location",
        "logging",
        "metrics",
        "notification",
        "object-lock",
        "partNumber",
        "policy",
        "policyStatus",
        "publicAccessBlock",
        "replication",
        "requestPayment",
        "restore",
        "retention",
        "select",
        "tagging",
        "torrent",
        "uploadId",
        "uploads",
        "versionId",
        "versioning",
        "versions",
        "website",
    }
)
_READS = frozenset({"ListBuckets", "HeadBucket", "GetBucketLocation", "ListObjectsV2", "GetObject", "HeadObject"})
_OPERATIONS: MappingProxyType[str, Callable[[Bucket, Call, float], Response]] = MappingProxyType(
    {
        "ListObjectsV2": operations.list_objects,
        "DeleteObjects": operations.delete_objects,
        "GetObject": operations.get_object,
        "HeadObject": operations.get_object,
        "PutObject": operations.put_object,
        "DeleteObject": operations.delete_object,
        "CreateMultipartUpload": multipart.create_upload,
        "UploadPart": multipart.upload_part,
        "CompleteMultipartUpload": multipart.complete_upload,
        "AbortMultipartUpload": multipart.abort_upload,
    }
)
_CREATIONS = MappingProxyType(
    {"PutObject": "ObjectCreated:Put", "CompleteMultipartUpload": "ObjectCreated:CompleteMultipartUpload"}
)
_MAX_KEY_BYTES = 1024


class S3Service:
    """The buckets of one endpoint.

    Attributes:
        buckets: by name.
        keys: key pairs by access key; may be changed at any time.
        watchers: called with every object that a request creates, before it is answered.
    """

    def __init__(
        self,
        *,
        region: str,
        keys: Iterable[KeyPair],
        buckets: Iterable[BucketSpec],
        clock: Callable[[], float],
    ) -> None:
        self.region = region
        self.keys = {key.access_key: key for key in keys}
        self.buckets: dict[str, Bucket] = {}
        self.watchers: list[Callable[[ObjectCreated], None]] = []
        self._clock = clock
        for spec in buckets:
            self.add_bucket(spec)

    def add_bucket(self, spec: BucketSpec) -> Bucket:
        """Make an empty bucket and return it; one of that name is replaced."""
        bucket = Bucket(spec=spec, region=spec.region or self.region, created_at=self._clock())
        self.buckets[spec.name] = bucket
        return bucket

    def call(self, request: Request, body: Body) -> Call:
        """Return which operation, on what, a request is; it may still be refused."""
        bucket, _, key = request.path[1:].partition("/")
        level = "object" if key else "bucket" if bucket else "service"
        asked = [name for name, _ in request.query if name in _SUBRESOURCES]
        subresource = "uploadId" if "uploadId" in asked else asked[0] if asked else ""
        operation = _ROUTES.get((request.method, level, subresource), "Unknown")
        return Call(operation=operation, bucket=bucket, key=key, request=request, body=body)

    def perform(self, call: Call) -> Response:
        """Answer an operation; what S3 refuses is answered with its error."""
        try:
            return self._perform(call)
        except S3Error as error:
            response = error.response(call.request.path)
            if call.operation == "HeadBucket" and (bucket := self.buckets.get(call.bucket)):  # whoever asks is told
                response = replace(response, headers={**response.headers, "x-amz-bucket-region": bucket.region})
            return response

    def _perform(self, call: Call) -> Response:
        if call.operation == "Unknown":
            raise S3Error("NotImplemented", "A header or query you provided implies what is not implemented.")
        bucket = self.buckets.get(call.bucket)
        self._authorize(call, bucket)
        if call.operation == "ListBuckets":
            return self._list_buckets()
        if call.operation == "CreateBucket":
            return self._create_bucket(call)
        if bucket is None:
            raise S3Error("NoSuchBucket", "The specified bucket does not exist", elements={"BucketName": call.bucket})
        if len(call.key.encode()) > _MAX_KEY_BYTES:
            raise S3Error("KeyTooLongError", "Your key is too long")
        if call.operation in _OPERATIONS:
            response = _OPERATIONS[call.operation](bucket, call, self._clock())
            if event := _CREATIONS.get(call.operation):
                self._tell(
                    ObjectCreated(bucket=call.bucket, key=call.key, event=event, stored=bucket.objects[call.key])
                )
            return response
        return self._on_bucket(bucket, call)

    def _tell(self, created: ObjectCreated) -> None:
        for watch in self.watchers:
            watch(created)

    def _authorize(self, call: Call, bucket: Bucket | None) -> None:
        claim = read_claim(call.request)
        reads = call.operation in _READS
        if claim is None:
            if bucket is None or not bucket.spec.anonymous or not reads:
                raise S3Error("AccessDenied", "Access Denied")
        else:
            now = datetime.fromtimestamp(self._clock(), UTC)
            key = verify(call.request, claim, self.keys, now=now)
            self._check_region(claim.region, bucket)
            if (key.buckets is not None and call.bucket not in key.buckets) or (key.read_only and not reads):
                raise S3Error("AccessDenied", "Access Denied")
        pays = call.request.headers.get("x-amz-request-payer") == "requester"
        if bucket is not None and bucket.spec.requester_pays and (claim is None or not pays):
            raise S3Error("AccessDenied", "Access Denied: the requester pays for this bucket")

    def _check_region(self, region: str, bucket: Bucket | None) -> None:
        """Refuse a scope of another region as S3 does: a redirect from this endpoint, else a malformed header."""
        home = self.region if bucket is None else bucket.region
        if region == home:
            return
        headers = {"x-amz-bucket-region": home}
        if region == self.region and bucket is not None:
            raise S3Error(
                "PermanentRedirect",
                "The bucket you are attempting to access must be addressed using the specified endpoint.",
                elements={"Bucket": bucket.spec.name, "Endpoint": f"s3.{home}.amazonaws.com"},
                headers=headers,
            )
        message = f"The authorization header is malformed; the region '{region}' is wrong; expecting '{home}'"
        raise S3Error("AuthorizationHeaderMalformed", message, elements={"Region": home}, headers=headers)

    def _list_buckets(self) -> Response:
        buckets = "".join(
            f"<Bucket>{element('Name', name)}{element('CreationDate', iso_time(bucket.created_at))}</Bucket>"
            for name, bucket in sorted(self.buckets.items())
        )
        return xml_response("ListAllMyBucketsResult", f"<Buckets>{buckets}</Buckets>")

    def _create_bucket(self, call: Call) -> Response:
        body = decode_payload(call.request, call.body)
        region = parse_xml(body).findtext("LocationConstraint") if len(body) else None
        if call.bucket in self.buckets:
            raise S3Error("BucketAlreadyOwnedByYou", "Your previous request to create the bucket succeeded.")
        try:
            self.add_bucket(BucketSpec(name=call.bucket, region=region))
        except ValueError as error:
            raise S3Error("InvalidBucketName", "The specified bucket is not valid.") from error
        return Response(headers={"Location": f"/{call.bucket}"})

    def _on_bucket(self, bucket: Bucket, call: Call) -> Response:
        if call.operation == "DeleteBucket":
            if bucket.objects:
                raise S3Error("BucketNotEmpty", "The bucket you tried to delete is not empty")
            del self.buckets[call.bucket]
            return Response(status=204)
        if call.operation == "GetBucketLocation":
            # The region's name, empty for the first region that S3 had.
            return xml_response("LocationConstraint", "" if bucket.region == "us-east-1" else bucket.region)
        return Response(headers={"x-amz-bucket-region": bucket.region})
