"""An instance that answers several requests at a time in one event loop, as Google's do."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

from stoker.errors import (
    ConfigError,
    EventError,
    FormatError,
    PackError,
    SchemaError,
    StokerError,
    ThrottledError,
    TransientError,
)
from stoker_functions._batcher import Batcher
from stoker_functions._deadline import Deadline
from stoker_functions._deployment import Deployment
from stoker_functions._ingest import ingest_objects
from stoker_functions._instance import Handler
from stoker_functions._notifications import Notified, cloud_storage_object
from stoker_functions._settings import Settings

__all__ = ["Hosted"]

_log = logging.getLogger("stoker_functions.hosted")
_MOST_INGESTED = 1000
_INGEST_WAIT_SECONDS = 1.0
_STATUSES: tuple[tuple[type[StokerError], int], ...] = (
    (ThrottledError, 429),
    (TransientError, 503),
    (EventError, 400),
    (ConfigError, 400),
    (SchemaError, 400),
    (FormatError, 400),
    (PackError, 400),
)


class Hosted:
    """Answers requests; raw objects that are announced within a second of each other are packed together.

    Args:
        settings: of the deployment.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.deployment = Deployment(settings)
        self._batcher: Batcher[tuple[Notified, Deadline]] = Batcher(
            self._ingest_all, most_items=_MOST_INGESTED, wait_seconds=_INGEST_WAIT_SECONDS
        )

    async def answer(self, handler: Handler, body: bytes) -> tuple[dict[str, Any], int]:
        """Return what a handler makes of a request's body, or what is wrong, and the HTTP status.

        The status is 400 for what can never succeed, 429 or 503 for what may if it is tried again, 500 for the rest.
        """
        try:
            try:
                event = json.loads(body)
            except (ValueError, RecursionError):
                raise EventError("the request's body is not JSON") from None
            return await handler(event, self.deployment, Deadline.after(self._settings.timeout_seconds)), 200
        except StokerError as error:
            _log.warning("%s: %s", type(error).__name__, error)
            status = next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)
            return {"errorType": type(error).__name__, "errorMessage": str(error)}, status

    async def ingest(self, event: object, deployment: Deployment, deadline: Deadline) -> dict[str, Any]:
        """Pack the raw object that an event announces, once it is durable; a handler, for :meth:`answer`.

        Raises:
            StokerError: it cannot be packed, or not in time; the platform announces it again.
        """
        await self._batcher.add((cloud_storage_object(event), deadline))
        return {}

    async def _ingest_all(self, announced: Sequence[tuple[Notified, Deadline]]) -> Sequence[StokerError | None]:
        first = min((deadline for _, deadline in announced), key=lambda deadline: deadline.at_seconds)
        return await ingest_objects([found for found, _ in announced], self.deployment, first)
