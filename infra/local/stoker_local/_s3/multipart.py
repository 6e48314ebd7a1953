"""S3's multipart uploads, and copies within the endpoint, of whole objects or to a part."""

from __future__ import annotations

import hashlib
import re
from http import HTTPStatus
from itertools import pairwise
from urllib.parse import unquote

from stoker_local._http1 import Body, ServerResponse
from stoker_local._s3.model import (
    OWNER,
    BucketState,
    MultipartUpload,
    S3Call,
    S3Error,
    StoredObject,
    UploadCompletion,
    element,
    iso_time,
    parse_xml,
    xml_response,
)
from stoker_local._s3.operations import (
    COPY_SOURCE_IF,
    NULL_VERSION,
    check_write_conditions,
    evaluate_read_conditions,
    int_parameter,
    key_element_writer,
    md5_etag,
    object_headers,
    parse_tag_header,
    precondition_error,
)
from stoker_local._s3.signature import decode_payload

_MIN_PART_BYTES = 5 << 20
_MAX_PARTS = 10_000
_MAX_COMPLETIONS = 1000  # S3 keeps them for hours
_PART_NUMBER = re.compile(r"[0-9]{1,5}", re.ASCII)
COPY_SOURCE = "x-amz-copy-source"
_DIRECTIVES = ("COPY", "REPLACE")
_RANGE = re.compile(r"bytes=([0-9]{1,18})-([0-9]{1,18})", re.ASCII)
_INITIATOR = OWNER.replace("Owner>", "Initiator>")
_OWNER_ELEMENTS = _INITIATOR + OWNER + element("StorageClass", "STANDARD")


def find_upload(bucket: BucketState, call: S3Call) -> MultipartUpload:
    """Return the upload in progress that a request names.

    Raises:
        S3Error: no upload in progress has this id and key.
    """
    upload = bucket.uploads.get(_upload_id(call))
    if upload is None or upload.key != call.key:
        raise S3Error("NoSuchUpload", "The specified multipart upload does not exist.")
    return upload


def part_number(call: S3Call) -> int:
    """Return the part number of a request.

    Raises:
        S3Error: the number is not from 1 to 10,000.
    """
    number = call.request.parameters.get("partNumber", "")
    if not _PART_NUMBER.fullmatch(number) or not 1 <= int(number) <= _MAX_PARTS:
        raise S3Error("InvalidArgument", f"Part number must be an integer between 1 and {_MAX_PARTS}, inclusive")
    return int(number)


def create_upload(bucket: BucketState, call: S3Call, now: float) -> ServerResponse:
    """CreateMultipartUpload: upload ids are ascending numbers; they can be guessed, unlike those of S3."""
    upload_id = f"upload-{bucket.next_upload_number:08}"
    bucket.next_upload_number += 1
    headers = object_headers(call.request)
    tags = parse_tag_header(call.request.headers.get("x-amz-tagging", ""))
    bucket.uploads[upload_id] = MultipartUpload(key=call.key, initiated_at=now, headers=headers, tags=tags)
    inner = element("Bucket", call.bucket) + element("Key", call.key) + element("UploadId", upload_id)
    return xml_response("InitiateMultipartUploadResult", inner)


def upload_part(bucket: BucketState, call: S3Call, now: float) -> ServerResponse:
    """UploadPart: a repeated part replaces the previous one."""
    upload, number = find_upload(bucket, call), part_number(call)
    data = decode_payload(call.request, call.body)
    part = StoredObject(data=data, tag=md5_etag(data), modified_at=now)
    upload.parts[number] = part
    return ServerResponse(headers={"ETag": part.tag})


def complete_upload(bucket: BucketState, call: S3Call, now: float) -> ServerResponse:
    """CompleteMultipartUpload: creates the object atomically from the listed parts, in order.

    A repeated request, such as one of a client that did not receive the response, succeeds again and changes nothing,
    even if the object has changed or the request's conditions no longer hold.
    """
    upload_id = _upload_id(call)
    completion = bucket.completions.get(upload_id)
    if completion is not None and (completion.key, completion.parts) == (call.key, _parse_part_list(call)):
        return _completion_response(call, completion)
    upload, named = find_upload(bucket, call), _parse_part_list(call)
    chosen = _select_parts(upload, named)
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
    completion = UploadCompletion(key=call.key, parts=named, tag=stored.tag)
    bucket.completions[upload_id] = completion
    if len(bucket.completions) > _MAX_COMPLETIONS:
        del bucket.completions[next(iter(bucket.completions))]
    return _completion_response(call, completion)


def _parse_part_list(call: S3Call) -> tuple[tuple[int, str], ...]:
    """Return the number and the unquoted ETag of each part in a completion request."""
    nodes = parse_xml(decode_payload(call.request, call.body)).findall("Part")
    named = [(node.findtext("PartNumber") or "", (node.findtext("ETag") or "").strip('"')) for node in nodes]
    if not named or not all(_PART_NUMBER.fullmatch(number) for number, _ in named):
        raise S3Error("MalformedXML", "You must specify at least one part, each with its number.")
    return tuple((int(number), tag) for number, tag in named)


def _select_parts(upload: MultipartUpload, named: tuple[tuple[int, str], ...]) -> list[StoredObject]:
    if any(a >= b for (a, _), (b, _) in pairwise(named)):
        raise S3Error("InvalidPartOrder", "The list of parts was not in ascending order.")
    parts = [(upload.parts.get(number), tag) for number, tag in named]
    chosen = [part for part, tag in parts if part is not None and part.tag.strip('"') == tag]
    if len(chosen) < len(named):
        raise S3Error("InvalidPart", "One or more of the specified parts could not be found.")
    if any(len(part.data) < _MIN_PART_BYTES for part in chosen[:-1]):
        raise S3Error("EntityTooSmall", "Your proposed upload is smaller than the minimum allowed size")
    return chosen


def _completion_response(call: S3Call, completion: UploadCompletion) -> ServerResponse:
    location = f"http://{call.request.headers.get('host', '')}{call.request.raw_path}"
    inner = element("Location", location) + element("Bucket", call.bucket) + element("Key", call.key)
    return xml_response("CompleteMultipartUploadResult", inner + element("ETag", completion.tag))


def abort_upload(bucket: BucketState, call: S3Call, now: float) -> ServerResponse:
    """AbortMultipartUpload: discards the upload's parts."""
    find_upload(bucket, call)
    del bucket.uploads[_upload_id(call)]
    return ServerResponse(status=204)


def _upload_id(call: S3Call) -> str:
    return call.request.parameters.get("uploadId", "")


def parse_copy_source(header: str) -> tuple[str, str]:
    """Parse an ``x-amz-copy-source``, percent-encoded ``[/]bucket/key[?versionId=null]``; return bucket and key.

    Raises:
        S3Error: the header is malformed, or names a version.
    """
    path, _, query = header.partition("?")
    try:
        bucket, _, key = unquote(path, errors="strict").removeprefix("/").partition("/")
    except UnicodeDecodeError as error:
        raise S3Error("InvalidArgument", "Invalid copy source encoding") from error
    if not bucket or not key:
        message = "Copy Source must mention the source bucket and key: sourcebucket/sourcekey"
        raise S3Error("InvalidArgument", message, elements={"ArgumentName": COPY_SOURCE, "ArgumentValue": header})
    if query and query != f"versionId={NULL_VERSION}":
        raise S3Error("NoSuchVersion", "The specified version does not exist.", elements={"Key": key})
    return bucket, key


def copy_object(bucket: BucketState, call: S3Call, now: float, source: StoredObject) -> ServerResponse:
    """CopyObject: metadata and tags are the source's, or the request's if their directive is ``REPLACE``."""
    headers = call.request.headers
    replaces_metadata = _directive(call, "metadata") == "REPLACE"
    replaces_tags = _directive(call, "tagging") == "REPLACE"
    if source is bucket.objects.get(call.key) and not replaces_metadata:
        raise S3Error(
            "InvalidRequest",
            "This copy request is illegal because it is trying to copy an object to itself without changing the "
            "object's metadata, storage class, website redirect location or encryption attributes.",
        )
    _check_source_conditions(call, source)
    check_write_conditions(bucket, call)
    copied = StoredObject(
        data=source.data,
        tag=md5_etag(source.data) if source.part_bytes else source.tag,
        modified_at=now,
        headers=object_headers(call.request) if replaces_metadata else source.headers,
        tags=parse_tag_header(headers.get("x-amz-tagging", "")) if replaces_tags else source.tags,
    )
    bucket.objects[call.key] = copied
    return _copy_response("CopyObjectResult", copied.tag, now)


def upload_part_copy(bucket: BucketState, call: S3Call, now: float, source: StoredObject) -> ServerResponse:
    """UploadPartCopy: copies an object, or a range of it, to a part."""
    upload, number = find_upload(bucket, call), part_number(call)
    _check_source_conditions(call, source)
    data = _slice_source(call.request.headers.get(f"{COPY_SOURCE}-range"), source.data)
    part = StoredObject(data=data, tag=md5_etag(data), modified_at=now)
    upload.parts[number] = part
    return _copy_response("CopyPartResult", part.tag, now)


def _directive(call: S3Call, kind: str) -> str:
    directive = call.request.headers.get(f"x-amz-{kind}-directive", "COPY")
    if directive not in _DIRECTIVES:
        raise S3Error("InvalidArgument", f"Unknown {kind} directive.")
    return directive


def _check_source_conditions(call: S3Call, source: StoredObject) -> None:
    headers = call.request.headers
    outcome = evaluate_read_conditions(headers, source, prefix=COPY_SOURCE_IF)
    if outcome is not HTTPStatus.OK:  # a copy has no 304
        raise precondition_error(next(name for name in headers if name.startswith(COPY_SOURCE_IF)))


def _slice_source(header: str | None, data: Body) -> Body:
    """Return the range of ``data`` to copy; unlike a read's range, it is not clipped to the object."""
    if header is None:
        return data
    match = _RANGE.fullmatch(header)
    if match is None:
        message = (
            f"The {COPY_SOURCE}-range value must be of the form bytes=first-last where first and last are the "
            "zero-based offsets of the first and last bytes to copy"
        )
        raise S3Error("InvalidArgument", message, elements={"ArgumentValue": header})
    first, last = int(match[1]), int(match[2])
    if not first <= last < len(data):
        message = f"Range specified is not valid for source object of size: {len(data)}"
        raise S3Error("InvalidArgument", message, elements={"ArgumentValue": header})
    return memoryview(data)[first : last + 1]


def _copy_response(root: str, tag: str, now: float) -> ServerResponse:
    return xml_response(root, element("LastModified", iso_time(now)) + element("ETag", tag))


def list_uploads(bucket: BucketState, call: S3Call, now: float) -> ServerResponse:
    """ListMultipartUploads: sorted by key, then by upload id, which is by age; delimiters are not implemented."""
    query = call.request.parameters
    if query.get("delimiter"):
        raise S3Error("NotImplemented", "ListMultipartUploads with a delimiter is not implemented.")
    prefix = query.get("prefix", "")
    limit = int_parameter(query, "max-uploads")
    coded = key_element_writer(query)
    key_marker = query.get("key-marker", "")
    id_marker = query.get("upload-id-marker", "")
    after = (key_marker, id_marker or "\U0010ffff") if key_marker else ("", "")
    uploads = sorted((upload.key, id_) for id_, upload in bucket.uploads.items() if upload.key.startswith(prefix))
    uploads = [entry for entry in uploads if entry > after]
    page = uploads[:limit]
    parts = [element("Bucket", call.bucket), coded("KeyMarker", key_marker), element("UploadIdMarker", id_marker)]
    parts += [coded("Prefix", prefix), element("MaxUploads", limit)]
    parts += [element("EncodingType", "url")] if "encoding-type" in query else []
    if len(uploads) > len(page) > 0:
        parts += [coded("NextKeyMarker", page[-1][0]), element("NextUploadIdMarker", page[-1][1])]
    parts.append(element("IsTruncated", "true" if len(uploads) > len(page) > 0 else "false"))
    for key, upload_id in page:
        initiated = element("Initiated", iso_time(bucket.uploads[upload_id].initiated_at))
        parts.append(
            f"<Upload>{coded('Key', key)}{element('UploadId', upload_id)}{_OWNER_ELEMENTS}{initiated}</Upload>"
        )
    return xml_response("ListMultipartUploadsResult", "".join(parts))


def list_parts(bucket: BucketState, call: S3Call, now: float) -> ServerResponse:
    """ListParts: returns one page of an upload's parts, sorted by number."""
    query = call.request.parameters
    upload, limit = find_upload(bucket, call), int_parameter(query, "max-parts")
    marker = int_parameter(query, "part-number-marker", default=0, maximum=10_000)
    remaining = [(number, part) for number, part in sorted(upload.parts.items()) if number > marker]
    page = remaining[:limit]
    parts = [
        element("Bucket", call.bucket),
        element("Key", call.key),
        element("UploadId", query["uploadId"]),
        _OWNER_ELEMENTS,
    ]
    parts += [element("PartNumberMarker", marker), element("MaxParts", limit)]
    parts += [element("NextPartNumberMarker", page[-1][0])] if page else []
    parts.append(element("IsTruncated", "true" if len(remaining) > len(page) > 0 else "false"))
    for number, part in page:
        about = element("LastModified", iso_time(part.modified_at)) + element("ETag", part.tag)
        parts.append(f"<Part>{element('PartNumber', number)}{about}{element('Size', len(part.data))}</Part>")
    return xml_response("ListPartsResult", "".join(parts))
