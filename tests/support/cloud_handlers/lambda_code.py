"""Lambda handlers that answer, fail, hang and exhaust their memory; they import the standard library only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

_kept: list[bytes] = []
_state: dict[str, Any] = {"calls": 0, "ticks": 0}


def echo(event: Any, context: Any) -> Any:
    return event


def about(event: Any, context: Any) -> dict[str, Any]:
    """Return the environment of an instance: variables, folders and limits."""
    _state["calls"] += 1
    return {
        "environment": dict(os.environ),
        "folder": str(Path.cwd()),
        "pid": os.getpid(),
        "calls": _state["calls"],
        "remaining_milliseconds": context.get_remaining_time_in_millis(),
        "request_id": context.aws_request_id,
        "arn": context.invoked_function_arn,
        "memory": context.memory_limit_in_mb,
        "client": getattr(context.client_context, "custom", None),
    }


def sleep(event: dict[str, Any], context: Any) -> dict[str, int]:
    time.sleep(event["seconds"])
    return {"pid": os.getpid()}


def error(event: dict[str, Any], context: Any) -> None:
    raise ValueError(event["message"])


def deep_error(event: dict[str, Any], context: Any) -> None:
    """Fail in a deep recursion, with a traceback that is longer than most servers accept in a header."""
    if event["depth"]:
        deep_error({**event, "depth": event["depth"] - 1}, context)
    raise LookupError(event["message"])


def leave(event: dict[str, Any], context: Any) -> None:
    print("about to leave")
    os._exit(event["code"])


def allocate(event: dict[str, Any], context: Any) -> int:
    """Allocate memory and touch all of it, one mebibyte at a time."""
    for _ in range(event["mebibytes"]):
        _kept.append(os.urandom(1 << 10) * (1 << 10))  # noqa: PERF401  (kept even if the next does not fit)
    return len(_kept)


def open_files(event: dict[str, Any], context: Any) -> dict[str, Any]:
    opened: list[int] = []
    try:
        while len(opened) < event["files"]:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    except OSError as problem:
        return {"opened": len(opened), "error": problem.strerror}
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return {"opened": len(opened), "error": None}


def fill_tmp(event: dict[str, Any], context: Any) -> dict[str, Any]:
    folder = Path(tempfile.gettempdir())
    before = sorted(
        path.name for path in folder.iterdir() if path.is_file()
    )  # code below /tmp stays visible as a folder
    written = 0
    try:
        with (folder / "filler").open("wb") as file:
            for _ in range(event["mebibytes"]):
                written += file.write(bytes(1 << 20))
                file.flush()
    except OSError as problem:
        (folder / "filler").unlink()
        return {"folder": str(folder), "before": before, "written": written, "error": problem.strerror}
    return {"folder": str(folder), "before": before, "written": written, "error": None}


def result_of(event: dict[str, Any], context: Any) -> str:
    return "x" * int(event["bytes"])


def say(event: dict[str, Any], context: Any) -> None:
    print(event["text"])
    print(event["text"], file=sys.stderr)


def tick(event: dict[str, Any], context: Any) -> dict[str, int]:
    """Count time on a thread that runs between invocations, too, unless the instance is frozen."""
    if not _state["ticks"]:
        threading.Thread(target=_tick, daemon=True).start()
    return {"pid": os.getpid(), "ticks": _state["ticks"]}


def _tick() -> None:
    while True:
        _state["ticks"] += 1
        time.sleep(0.001)


def spawn(event: dict[str, Any], context: Any) -> int:
    """Start a process that outlives the invocation."""
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid


def count(event: dict[str, Any], context: Any) -> dict[str, Any]:
    """Write one line per call to a file, then fail, sleep or report failed messages, as the event demands."""
    with Path(event["file"] if "file" in event else os.environ["COUNT_FILE"]).open("a") as file:
        file.write(json.dumps(event) + "\n")
    time.sleep(float(os.environ.get("COUNT_SECONDS", "0")))
    if event.get("fails"):
        raise RuntimeError("asked to fail")
    bad = [record for record in event.get("Records", []) if "bad" in record["body"]]
    return {"batchItemFailures": [{"itemIdentifier": record["messageId"]} for record in bad]}


def page(event: dict[str, Any], context: Any) -> Any:
    """Answer a request to a function URL with the response in its JSON body; without a body, with the event."""
    body = json.loads(event.get("body") or "null")
    return {"statusCode": 200, "body": json.dumps(event)} if body is None else body


def speak(event: dict[str, Any], context: Any) -> list[int]:
    """Send the Runtime API a request of the event's choice, beside those of the real client."""
    statuses = []
    for method, path, body in event["requests"]:
        connection = HTTPConnection(os.environ["AWS_LAMBDA_RUNTIME_API"], timeout=30)
        connection.request(method, f"/2018-06-01/runtime/{path}".replace("ID", context.aws_request_id), body.encode())
        statuses.append(connection.getresponse().status)
        connection.close()
    return statuses


def babble(event: dict[str, Any], context: Any) -> int:
    """Start a process in a session of its own that writes without end."""
    code = "import os\nwhile True: os.write(1, b'x' * 65536)"
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True).pid
