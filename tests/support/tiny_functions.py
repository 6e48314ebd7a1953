"""Functions for executors to run: they echo, fail, wait for each other, hang, and kill their process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker import errors
from support.processes import die

__all__ = ["FUNCTIONS", "Event"]

Event = Mapping[str, Any]


async def echo(event: Event, *_: object) -> dict[str, Any]:
    return dict(event)


async def fail(event: Event, *_: object) -> dict[str, Any]:
    """Raise an error of the named class, of stoker or builtin."""
    kind = getattr(errors, event["type"], None) or {"KeyError": KeyError, "RuntimeError": RuntimeError}[event["type"]]
    raise kind(event["message"])


async def meet(event: Event, *_: object) -> dict[str, Any]:
    """Return once another call has created its file in the same folder."""
    folder = Path(event["folder"])
    (folder / event["me"]).touch()
    while not (folder / event["other"]).exists():  # noqa: ASYNC110 - a file has no event
        await asyncio.sleep(0.01)
    return {"met": event["other"]}


async def hang(event: Event, *_: object) -> dict[str, Any]:
    """Write the process id to a file, if the event names one, and never return."""
    if "file" in event:
        Path(event["file"]).write_text(str(os.getpid()))  # noqa: ASYNC240 - a few bytes
    await asyncio.Event().wait()
    raise AssertionError("nobody wakes it")


async def perish(event: Event, *_: object) -> dict[str, Any]:
    die()


async def chatter(event: Event, *_: object) -> dict[str, Any]:
    """Print to standard output, as libraries do."""
    print("this is not an answer")
    return {"printed": True}


async def listed(event: Event, *_: object) -> Any:
    return [1, 2, 3]


async def unspeakable(event: Event, *_: object) -> dict[str, Any]:
    return {"result": object()}


async def variable(event: Event, *_: object) -> dict[str, Any]:
    return {"value": os.environ.get(event["name"])}


FUNCTIONS = {
    function.__name__: f"{__name__}:{function.__name__}"
    for function in (echo, fail, meet, hang, perish, chatter, listed, unspeakable, variable)
}
