"""Google functions that answer, fail, hang and exhaust their memory."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import functions_framework.aio

_kept: list[bytes] = []


@functions_framework.aio.http
async def mirror(request: Any) -> dict[str, Any]:
    """Answer with the request."""
    return {
        "method": request.method,
        "path": request.scope["raw_path"].decode(),
        "query": request.url.query,
        "headers": dict(request.headers),
        "body": (await request.body()).decode(),
        "environment": dict(os.environ),
        "pid": os.getpid(),
    }


@functions_framework.aio.http
async def sleep(request: Any) -> dict[str, int]:
    await asyncio.sleep(float(request.query_params["seconds"]))
    return {"pid": os.getpid()}


@functions_framework.aio.http
async def finish(request: Any) -> dict[str, int]:
    """Write a line at the beginning, and another after a delay, at the end."""
    _append({"begun": True})
    await asyncio.sleep(1.0)
    _append({"ended": True})
    return {}


@functions_framework.aio.http
async def error(request: Any) -> tuple[dict[str, str], int]:
    return {"errorType": "EventError"}, 400


@functions_framework.aio.http
async def large(request: Any) -> str:
    return "x" * int(request.query_params["bytes"])


@functions_framework.aio.http
async def allocate(request: Any) -> str:
    """Allocate memory and touch all of it."""
    _kept.append(os.urandom(1 << 10) * (int(request.query_params["mebibytes"]) << 10))
    return str(os.getpid())


@functions_framework.aio.cloud_event
async def note(event: Any) -> None:
    """Write one line for each event; fail at the first event of an object named ``bad``."""
    name = event.get_data()["name"]
    known = _append({**event.get_attributes(), "name": name})
    if name == "bad" and '"bad"' not in known:
        raise ValueError("asked to fail")


def _append(line: dict[str, Any]) -> str:
    file = Path(os.environ["NOTE_FILE"])
    known = file.read_text() if file.exists() else ""
    file.write_text(known + json.dumps(line) + "\n")
    return known
