"""S3's multipart uploads."""

from __future__ import annotations

import hashlib
import re
from itertools import pairwise

from stoker_local.http1 import Response
from stoker_local.objects import StoredObject
from stoker_local.s3.errors import S3Error
from stoker_local.s3.model import Bucket, Call, Upload, element, parse_xml, xml_response
from stoker_local.s3.operations import check_write_conditions, etag_of, object_headers
from stoker_local.s3.payload import decode_payload

__all__ = ["abort_upload", "complete_upload", "create_upload", "upload_part"]

_MIN_PART_BYTES = 5 << 20
_MAX_PARTS = 10_000


def create_upload(bucket: Bucket, call: Call, now: float) -> Response:
    """CreateMultipartUpload: its id is a number, told by nobody and guessed by anybody, as befits a local bucket."""
    upload_id = f"upload-{bucket.next_upload}"
    bucket.next_upload += 1
    bucket.uploads[upload_id] = Upload(key=call.key, headers=object_headers(call.request))
    inner = element("Bucket", call.bucket) + element("Key", call.key) + element("UploadId", upload_id)
    return xml_response("InitiateMultipartUploadResult", inner)


def upload_part(bucket: Bucket, call: Call, now: float) -> Response:
    """UploadPart: a part may be sent again, the last one counts."""
    upload = _upload(bucket, call)
    number = call.request.parameters.get("partNumber", "")
    if not re.fullmatch(r"[0-9]{1,5}", number, re.ASCII) or not 1 <= int(number) <= _MAX_PARTS:
        raise S3Error("InvalidArgument", f"Part number must be an integer between 1 and {_MAX_PARTS}, inclusive")
    data = decode_payload(call.request, call.body)
    tag = etag_of(data)
    upload.parts[int(number)] = (tag, data)
    return Response(headers={"ETag": tag})


def complete_upload(bucket: Bucket, call: Call, now: float) -> Response:
    """CompleteMultipartUpload: the object appears whole, from the named parts in their order."""
    upload = _upload(bucket, call)
    wanted = [
        (node.findtext("PartNumber") or "", node.findtext("ETag") or "")
        for node in parse_xml(decode_payload(call.request, call.body)).findall("Part")
    ]
    if not wanted or not all(re.fullmatch(r"[0-9]{1,5}", number, re.ASCII) for number, _ in wanted):
        raise S3Error("MalformedXML", "You must specify at least one part, each with its number.")
    numbers = [int(number) for number, _ in wanted]
    if any(a >= b for a, b in pairwise(numbers)):
        raise S3Error("InvalidPartOrder", "The list of parts was not in ascending order.")
    parts = [upload.parts.get(number) for number in numbers]
    chosen = [p for p, (_, tag) in zip(parts, wanted, strict=True) if p and p[0].strip('"') == tag.strip('"')]
    if len(chosen) < len(wanted):
        raise S3Error("InvalidPart", "One or more of the specified parts could not be found.")
    if any(len(data) < _MIN_PART_BYTES for _, data in chosen[:-1]):
        raise S3Error("EntityTooSmall", "Your proposed upload is smaller than the minimum allowed size")
    check_write_conditions(bucket, call)
    digest = hashlib.md5(b"".join(bytes.fromhex(tag.strip('"')) for tag, _ in chosen), usedforsecurity=False)
    stored = StoredObject(
        data=b"".join(data for _, data in chosen),
        tag=f'"{digest.hexdigest()}-{len(chosen)}"',
        modified_at=now,
        headers=upload.headers,
    )
    bucket.objects[call.key] = stored
    del bucket.uploads[call.request.parameters["uploadId"]]
    inner = element("Bucket", call.bucket) + element("Key", call.key) + element("ETag", stored.tag)
    return xml_response("CompleteMultipartUploadResult", inner)


def abort_upload(bucket: Bucket, call: Call, now: float) -> Response:
    """AbortMultipartUpload: its parts are gone."""
    _upload(bucket, call)
    del bucket.uploads[call.request.parameters["uploadId"]]
    return Response(status=204)


def _upload(bucket: Bucket, call: Call) -> Upload:
    upload = bucket.uploads.get(call.request.parameters.get("uploadId", ""))
    if upload is None or upload.key != call.key:
        raise S3Error("NoSuchUpload", "The specified multipart upload does not exist.")
    return upload
