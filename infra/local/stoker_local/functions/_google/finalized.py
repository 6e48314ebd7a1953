"""Objects that are created in the local GCS, told to functions as CloudEvents until they are acknowledged.

Source: CloudEvents HTTP protocol binding, binary mode; Google's ``google.cloud.storage.object.v1.finalized``.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from stoker_local._gcs import resource_of
from stoker_local._objects import ObjectCreated
from stoker_local.functions._google.service import Call, Service
from stoker_local.functions._triggers.queue import LocalQueue

__all__ = ["finalized_message", "push"]

_TYPE = "google.cloud.storage.object.v1.finalized"


def finalized_message(created: ObjectCreated) -> str:
    """Return the event of an object, headers and body, as a queue holds it."""
    resource = resource_of(created.bucket, created.key, created.stored)
    headers = {
        "ce-specversion": "1.0",
        "ce-id": f"{created.bucket}/{created.stored.tag}",
        "ce-type": _TYPE,
        "ce-source": f"//storage.googleapis.com/projects/_/buckets/{created.bucket}",
        "ce-subject": _header(f"objects/{created.key}"),
        "ce-time": datetime.fromtimestamp(created.stored.modified_at, UTC).isoformat(),
        "content-type": "application/json",
    }
    return json.dumps({"headers": headers, "body": resource})


async def push(queue: LocalQueue, service: Service) -> None:
    """Post events to a function until cancelled, one at a time; what is not acknowledged comes back."""
    while True:
        (delivery,) = await queue.receive(1)
        message: dict[str, Any] = json.loads(delivery.body)
        headers = dict(message["headers"])
        if service.spec.token:
            headers["Authorization"] = f"Bearer {service.spec.token}"
        body = json.dumps(message["body"]).encode()
        response = await service.call(Call(method="POST", target="/", headers=headers, body=body))
        if 200 <= response.status < 300:
            queue.delete(delivery.receipt)


def _header(text: str) -> str:
    """Percent-encode what a header cannot carry, as the binding has it."""
    return "".join(c if " " < c <= "~" and c not in '%"' else _percent(c) for c in text)


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))
