"""S3's multipart uploads."""

from __future__ import annotations

import hashlib
import re
from itertools import pairwise

from stoker_local._http1 import Response
from stoker_local._objects import StoredObject
from stoker_local._s3.conditions import check_write_conditions
from stoker_local._s3.errors import S3Error
from stoker_local._s3.model import Bucket, Call, Completion, Upload, UploadedPart, element, parse_xml, xml_response
from stoker_local._s3.operations import etag_of, object_headers
from stoker_local._s3.payload import decode_payload
from stoker_local._s3.tagging import tags_of_header

__all__ = ["abort_upload", "complete_upload", "create_upload", "open_upload", "part_number", "upload_part"]

_MIN_PART_BYTES = 5 << 20
_MAX_PARTS = 10_000
_MAX_COMPLETIONS = 1000  # S3 forgets them after hours
_PART_NUMBER = re.compile(r"[0-9]{1,5}", re.ASCII)


def open_upload(bucket: Bucket, call: Call) -> Upload:
    """Return the upload in progress that a request names.

    Raises:
        S3Error: there is none of that id for that key.
    """
    upload = bucket.uploads.get(_upload_id(call))
    if upload is None or upload.key != call.key:
        raise S3Error("NoSuchUpload", "The specified multipart upload does not exist.")
    return upload


def part_number(call: Call) -> int:
    """Return the number of the part that a request sends.

    Raises:
        S3Error: it is not from 1 to 10,000.
    """
    number = call.request.parameters.get("partNumber", "")
    if not _PART_NUMBER.fullmatch(number) or not 1 <= int(number) <= _MAX_PARTS:
        raise S3Error("InvalidArgument", f"Part number must be an integer between 1 and {_MAX_PARTS}, inclusive")
    return int(number)


def create_upload(bucket: Bucket, call: Call, now: float) -> Response:
    """CreateMultipartUpload: its id is a number, told by nobody and guessed by anybody, as befits a local bucket."""
    upload_id = f"upload-{bucket.next_upload:08}"
    bucket.next_upload += 1
    headers, tags = object_headers(call.request), tags_of_header(call.request.headers.get("x-amz-tagging", ""))
    bucket.uploads[upload_id] = Upload(key=call.key, initiated_at=now, headers=headers, tags=tags)
    inner = element("Bucket", call.bucket) + element("Key", call.key) + element("UploadId", upload_id)
    return xml_response("InitiateMultipartUploadResult", inner)


def upload_part(bucket: Bucket, call: Call, now: float) -> Response:
    """UploadPart: a part may be sent again, the last one counts."""
    upload, number = open_upload(bucket, call), part_number(call)
    data = decode_payload(call.request, call.body)
    part = UploadedPart(data=data, tag=etag_of(data), modified_at=now)
    upload.parts[number] = part
    return Response(headers={"ETag": part.tag})


def complete_upload(bucket: Bucket, call: Call, now: float) -> Response:
    """CompleteMultipartUpload: the object appears whole, from the named parts in their order.

    The same request after a success, as of a client that never saw the answer, succeeds again and changes nothing,
    whatever has become of the object and whether or not its conditions would hold now.
    """
    upload_id = _upload_id(call)
    completion = bucket.completions.get(upload_id)
    if completion is not None and (completion.key, completion.parts) == (call.key, _named_parts(call)):
        return _completed(call, completion)
    upload, named = open_upload(bucket, call), _named_parts(call)
    chosen = _chosen_parts(upload, named)
    check_write_conditions(bucket, call)
    digest = hashlib.md5(b"".join(bytes.fromhex(part.tag.strip('"')) for part in chosen), usedforsecurity=False)
    stored = StoredObject(
        data=b"".join(part.data for part in chosen),
        tag=f'"{digest.hexdigest()}-{len(chosen)}"',
        modified_at=now,
        headers=upload.headers,
        tags=upload.tags,
        part_bytes=tuple(len(part.data) for part in chosen),
    )
    bucket.objects[call.key] = stored
    del bucket.uploads[upload_id]
    completion = Completion(key=call.key, parts=named, tag=stored.tag)
    bucket.completions[upload_id] = completion
    if len(bucket.completions) > _MAX_COMPLETIONS:
        del bucket.completions[next(iter(bucket.completions))]
    return _completed(call, completion)


def _named_parts(call: Call) -> tuple[tuple[int, str], ...]:
    """Return the number and the ETag, without quotes, of each part that a completion names."""
    nodes = parse_xml(decode_payload(call.request, call.body)).findall("Part")
    named = [(node.findtext("PartNumber") or "", (node.findtext("ETag") or "").strip('"')) for node in nodes]
    if not named or not all(_PART_NUMBER.fullmatch(number) for number, _ in named):
        raise S3Error("MalformedXML", "You must specify at least one part, each with its number.")
    return tuple((int(number), tag) for number, tag in named)


def _chosen_parts(upload: Upload, named: tuple[tuple[int, str], ...]) -> list[UploadedPart]:
    if any(a >= b for (a, _), (b, _) in pairwise(named)):
        raise S3Error("InvalidPartOrder", "The list of parts was not in ascending order.")
    parts = [(upload.parts.get(number), tag) for number, tag in named]
    chosen = [part for part, tag in parts if part is not None and part.tag.strip('"') == tag]
    if len(chosen) < len(named):
        raise S3Error("InvalidPart", "One or more of the specified parts could not be found.")
    if any(len(part.data) < _MIN_PART_BYTES for part in chosen[:-1]):
        raise S3Error("EntityTooSmall", "Your proposed upload is smaller than the minimum allowed size")
    return chosen


def _completed(call: Call, completion: Completion) -> Response:
    location = f"http://{call.request.headers.get('host', '')}{call.request.raw_path}"
    inner = element("Location", location) + element("Bucket", call.bucket) + element("Key", call.key)
    return xml_response("CompleteMultipartUploadResult", inner + element("ETag", completion.tag))


def abort_upload(bucket: Bucket, call: Call, now: float) -> Response:
    """AbortMultipartUpload: its parts are gone."""
    open_upload(bucket, call)
    del bucket.uploads[_upload_id(call)]
    return Response(status=204)


def _upload_id(call: Call) -> str:
    return call.request.parameters.get("uploadId", "")
