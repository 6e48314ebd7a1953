"""S3's listings of the multipart uploads in progress and of their parts."""

from __future__ import annotations

from stoker_local._http1 import Response
from stoker_local._s3.errors import S3Error
from stoker_local._s3.listings import number_parameter, url_coder
from stoker_local._s3.model import OWNER, Bucket, Call, element, iso_time, xml_response
from stoker_local._s3.multipart import open_upload

__all__ = ["list_parts", "list_uploads"]

_INITIATOR = OWNER.replace("Owner>", "Initiator>")
_ABOUT = _INITIATOR + OWNER + element("StorageClass", "STANDARD")


def list_uploads(bucket: Bucket, call: Call, now: float) -> Response:
    """ListMultipartUploads: by key, then by age, which their ids have for an order. Folding is not implemented."""
    query = call.request.parameters
    if query.get("delimiter"):
        raise S3Error("NotImplemented", "ListMultipartUploads with a delimiter is not implemented.")
    prefix, limit, coded = query.get("prefix", ""), number_parameter(query, "max-uploads"), url_coder(query)
    key_marker, id_marker = query.get("key-marker", ""), query.get("upload-id-marker", "")
    after = (key_marker, id_marker or "\U0010ffff") if key_marker else ("", "")
    found = sorted((upload.key, id_) for id_, upload in bucket.uploads.items() if upload.key.startswith(prefix))
    found = [entry for entry in found if entry > after]
    shown = found[:limit]
    parts = [element("Bucket", call.bucket), coded("KeyMarker", key_marker), element("UploadIdMarker", id_marker)]
    parts += [coded("Prefix", prefix), element("MaxUploads", limit)]
    parts += [element("EncodingType", "url")] if "encoding-type" in query else []
    if len(found) > len(shown) > 0:
        parts += [coded("NextKeyMarker", shown[-1][0]), element("NextUploadIdMarker", shown[-1][1])]
    parts.append(element("IsTruncated", "true" if len(found) > len(shown) > 0 else "false"))
    for key, upload_id in shown:
        initiated = element("Initiated", iso_time(bucket.uploads[upload_id].initiated_at))
        parts.append(f"<Upload>{coded('Key', key)}{element('UploadId', upload_id)}{_ABOUT}{initiated}</Upload>")
    return xml_response("ListMultipartUploadsResult", "".join(parts))


def list_parts(bucket: Bucket, call: Call, now: float) -> Response:
    """ListParts: of one upload, by number."""
    query = call.request.parameters
    upload, limit = open_upload(bucket, call), number_parameter(query, "max-parts")
    marker = number_parameter(query, "part-number-marker", default=0, maximum=10_000)
    found = [(number, part) for number, part in sorted(upload.parts.items()) if number > marker]
    shown = found[:limit]
    parts = [element("Bucket", call.bucket), element("Key", call.key), element("UploadId", query["uploadId"]), _ABOUT]
    parts += [element("PartNumberMarker", marker), element("MaxParts", limit)]
    parts += [element("NextPartNumberMarker", shown[-1][0])] if shown else []
    parts.append(element("IsTruncated", "true" if len(found) > len(shown) > 0 else "false"))
    for number, part in shown:
        about = element("LastModified", iso_time(part.modified_at)) + element("ETag", part.tag)
        parts.append(f"<Part>{element('PartNumber', number)}{about}{element('Size', len(part.data))}</Part>")
    return xml_response("ListPartsResult", "".join(parts))
