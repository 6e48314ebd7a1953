"""The S3 protocol without I/O: a synchronous function from requests to responses.

This module routes requests to operations, checks permissions and implements the operations on buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime

from stoker_local._http1 import Body, ServerRequest, ServerResponse
from stoker_local._s3 import multipart, operations
from stoker_local._s3.model import (
    OWNER,
    BucketSpec,
    BucketState,
    ObjectCreated,
    S3Call,
    S3Error,
    StoredObject,
    element,
    iso_time,
    parse_xml,
    xml_response,
)
from stoker_local._s3.signature import KeyPair, decode_payload, parse_claim, verify

_ROUTES: dict[tuple[str, str, str], tuple[str, Callable[..., ServerResponse] | None]] = {
    ("GET", "service", ""): ("ListBuckets", None),
    ("PUT", "bucket", ""): ("CreateBucket", None),
    ("HEAD", "bucket", ""): ("HeadBucket", None),
    ("DELETE", "bucket", ""): ("DeleteBucket", None),
    ("GET", "bucket", "location"): ("GetBucketLocation", None),
    ("GET", "bucket", "versioning"): ("GetBucketVersioning", None),
    ("GET", "bucket", ""): ("ListObjects", operations.list_objects),
    ("GET", "bucket", "list-type"): ("ListObjectsV2", operations.list_objects_v2),
    ("GET", "bucket", "versions"): ("ListObjectVersions", operations.list_object_versions),
    ("GET", "bucket", "uploads"): ("ListMultipartUploads", multipart.list_uploads),
    ("POST", "bucket", "delete"): ("DeleteObjects", operations.delete_objects),
    ("GET", "object", ""): ("GetObject", operations.get_object),
    ("GET", "object", "partNumber"): ("GetObject", operations.get_object),
    ("HEAD", "object", ""): ("HeadObject", operations.get_object),
    ("HEAD", "object", "partNumber"): ("HeadObject", operations.get_object),
    ("PUT", "object", ""): ("PutObject", operations.put_object),
    ("PUT copy", "object", ""): ("CopyObject", multipart.copy_object),
    ("DELETE", "object", ""): ("DeleteObject", operations.delete_object),
    ("GET", "object", "tagging"): ("GetObjectTagging", operations.get_tags),
    ("PUT", "object", "tagging"): ("PutObjectTagging", operations.put_tags),
    ("DELETE", "object", "tagging"): ("DeleteObjectTagging", operations.delete_tags),
    ("POST", "object", "uploads"): ("CreateMultipartUpload", multipart.create_upload),
    ("PUT", "object", "uploadId"): ("UploadPart", multipart.upload_part),
    ("PUT copy", "object", "uploadId"): ("UploadPartCopy", multipart.upload_part_copy),
    ("POST", "object", "uploadId"): ("CompleteMultipartUpload", multipart.complete_upload),
    ("DELETE", "object", "uploadId"): ("AbortMultipartUpload", multipart.abort_upload),
    ("GET", "object", "uploadId"): ("ListParts", multipart.list_parts),
}
"""(method, level, sub-resource) → operation and its handler, if the handler works on one bucket.

Copies have the method ``PUT copy`` here, and their handlers also take the source object.
"""
_OPERATIONS = {name: handler for name, handler in _ROUTES.values() if handler is not None}
_COPY_OPERATIONS = ("CopyObject", "UploadPartCopy")
_NOT_IMPLEMENTED = (
    "accelerate acl attributes cors encryption inventory legal-hold lifecycle logging metrics notification object-lock "
    "policy policyStatus publicAccessBlock replication requestPayment restore retention select torrent website"
)
_SUBRESOURCES = {subresource for _, _, subresource in _ROUTES if subresource}.union(_NOT_IMPLEMENTED.split())
_READ_PREFIXES = ("Get", "Head", "List")  # prefixes of the operations that only read
_CREATION_EVENTS = {
    "PutObject": "ObjectCreated:Put",
    "CopyObject": "ObjectCreated:Copy",
    "CompleteMultipartUpload": "ObjectCreated:CompleteMultipartUpload",
}
_MAX_KEY_BYTES = 1024


class S3Service:
    """The buckets and keys of one S3 endpoint.

    Attributes:
        buckets: buckets by name.
        keys: key pairs by access key; may be changed at any time.
        watchers: functions that are called with every object that a request creates, before the response is sent.
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
        self.buckets: dict[str, BucketState] = {}
        self.watchers: list[Callable[[ObjectCreated], None]] = []
        self._clock = clock
        for spec in buckets:
            self.add_bucket(spec)

    def add_bucket(self, spec: BucketSpec) -> BucketState:
        """Create an empty bucket, which replaces one of the same name, and return it."""
        bucket = BucketState(spec=spec, region=spec.region or self.region, created_at=self._clock())
        self.buckets[spec.name] = bucket
        return bucket

    def route(self, request: ServerRequest, body: Body) -> S3Call:
        """Determine the operation, bucket and key of a request, without checking permissions."""
        bucket, _, key = request.path[1:].partition("/")
        level = "object" if key else "bucket" if bucket else "service"
        subresources = [name for name, _ in request.query if name in _SUBRESOURCES]
        subresource = "uploadId" if "uploadId" in subresources else subresources[0] if subresources else ""
        operation, _ = _ROUTES.get((request.method, level, subresource), ("Unknown", None))
        if multipart.COPY_SOURCE in request.headers:
            operation, _ = _ROUTES.get((f"{request.method} copy", level, subresource), (operation, None))
        return S3Call(operation=operation, bucket=bucket, key=key, request=request, body=body)

    def perform(self, call: S3Call) -> ServerResponse:
        """Perform an operation and return its response, which may be an S3 error."""
        try:
            return self._perform(call)
        except S3Error as error:
            response = error.response(call.request.path)
            if call.operation == "HeadBucket" and (bucket := self.buckets.get(call.bucket)):  # sent to everyone
                response = replace(response, headers={**response.headers, "x-amz-bucket-region": bucket.region})
            return response

    def _perform(self, call: S3Call) -> ServerResponse:
        if call.operation == "Unknown":
            raise S3Error("NotImplemented", "A header or query you provided implies what is not implemented.")
        bucket = self.buckets.get(call.bucket)
        key = self._authenticate(call, bucket)
        self._check_rights(call, call.bucket, key, reads=call.operation.startswith(_READ_PREFIXES))
        if call.operation == "ListBuckets":
            return self._list_buckets(call)
        if call.operation == "CreateBucket":
            return self._create_bucket(call)
        bucket = self._find_bucket(call.bucket)
        if len(call.key.encode()) > _MAX_KEY_BYTES:
            raise S3Error("KeyTooLongError", "Your key is too long")
        if call.key and call.request.query and call.request.parameters.get("versionId", "null") != "null":
            raise S3Error("NoSuchVersion", "The specified version does not exist.", elements={"Key": call.key})
        before = bucket.objects.get(call.key)
        response = self._perform_on_bucket(bucket, call, key)
        stored = bucket.objects.get(call.key)
        if (event := _CREATION_EVENTS.get(call.operation)) and stored is not None and stored is not before:
            for watch in self.watchers:
                watch(ObjectCreated(bucket=call.bucket, key=call.key, event=event, stored=stored))
        return response

    def _perform_on_bucket(self, bucket: BucketState, call: S3Call, key: KeyPair | None) -> ServerResponse:
        if call.operation not in _OPERATIONS:
            return self._perform_bucket_operation(bucket, call)
        sources = [self._copy_source(call, key)] if call.operation in _COPY_OPERATIONS else []
        return _OPERATIONS[call.operation](bucket, call, self._clock(), *sources)

    def _find_bucket(self, name: str) -> BucketState:
        bucket = self.buckets.get(name)
        if bucket is None:
            raise S3Error("NoSuchBucket", "The specified bucket does not exist", elements={"BucketName": name})
        return bucket

    def _copy_source(self, call: S3Call, key: KeyPair | None) -> StoredObject:
        """Return the source object of a copy, after checking that ``key`` may read it."""
        name, source_key = multipart.parse_copy_source(call.request.headers[multipart.COPY_SOURCE])
        self._check_rights(call, name, key, reads=True)
        return self._find_bucket(name).stored_object(source_key)

    def _authenticate(self, call: S3Call, bucket: BucketState | None) -> KeyPair | None:
        """Return the key pair that signed a request, or None if the request is unsigned."""
        claim = parse_claim(call.request)
        if claim is None:
            return None
        key = verify(call.request, claim, self.keys, now=datetime.fromtimestamp(self._clock(), UTC))
        self._check_region(claim.region, bucket)
        return key

    def _check_rights(self, call: S3Call, name: str, key: KeyPair | None, *, reads: bool) -> None:
        """Raise AccessDenied if ``key`` may not perform the operation in the bucket ``name``."""
        bucket = self.buckets.get(name)
        if key is None:
            if bucket is None or not bucket.spec.anonymous or not reads:
                raise S3Error("AccessDenied", "Access Denied")
        elif (key.buckets is not None and name not in key.buckets) or (key.read_only and not reads):
            raise S3Error("AccessDenied", "Access Denied")
        pays = call.request.headers.get("x-amz-request-payer") == "requester"
        if bucket is not None and bucket.spec.requester_pays and (key is None or not pays):
            raise S3Error("AccessDenied", "Access Denied: the requester pays for this bucket")

    def _check_region(self, region: str, bucket: BucketState | None) -> None:
        """Refuse a signature for the wrong region: with a redirect if it names the endpoint's, else as malformed."""
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

    def _list_buckets(self, call: S3Call) -> ServerResponse:
        query = call.request.parameters
        prefix, start = query.get("prefix", ""), query.get("continuation-token", "")
        limit = operations.int_parameter(query, "max-buckets", default=10_000, maximum=10_000)
        names = [name for name in sorted(self.buckets) if name.startswith(prefix) and name >= start]
        buckets = "".join(
            f"<Bucket>{element('Name', name)}{element('CreationDate', iso_time(bucket.created_at))}</Bucket>"
            for name, bucket in ((name, self.buckets[name]) for name in names[:limit])
        )
        following = element("ContinuationToken", names[limit]) if len(names) > limit > 0 else ""
        return xml_response("ListAllMyBucketsResult", f"{OWNER}<Buckets>{buckets}</Buckets>{following}")

    def _create_bucket(self, call: S3Call) -> ServerResponse:
        body = decode_payload(call.request, call.body)
        region = parse_xml(body).findtext("LocationConstraint") if len(body) else None
        if call.bucket in self.buckets:
            raise S3Error("BucketAlreadyOwnedByYou", "Your previous request to create the bucket succeeded.")
        try:
            self.add_bucket(BucketSpec(name=call.bucket, region=region))
        except ValueError as error:
            raise S3Error("InvalidBucketName", "The specified bucket is not valid.") from error
        return ServerResponse(headers={"Location": f"/{call.bucket}"})

    def _perform_bucket_operation(self, bucket: BucketState, call: S3Call) -> ServerResponse:
        if call.operation == "DeleteBucket":
            if bucket.objects:
                raise S3Error("BucketNotEmpty", "The bucket you tried to delete is not empty")
            del self.buckets[call.bucket]
            return ServerResponse(status=204)
        if call.operation == "GetBucketLocation":
            # The name of the region, which is empty for us-east-1.
            return xml_response("LocationConstraint", "" if bucket.region == "us-east-1" else bucket.region)
        if call.operation == "GetBucketVersioning":
            return xml_response("VersioningConfiguration", "")  # never enabled
        return ServerResponse(headers={"x-amz-bucket-region": bucket.region})
