"""AWS Lambda: ``stoker_functions.aws.NAME`` as the handler of each function."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from stoker_functions.commit import commit as commit_runs
from stoker_functions.compact import compact as compact_dataset
from stoker_functions.ingest import ingest_queue
from stoker_functions.instance import Handler, Instance
from stoker_functions.pack import pack as pack_part
from stoker_functions.settings import Settings

__all__ = ["commit", "compact", "ingest", "pack"]


@cache
def _instance() -> Instance:
    return Instance(Settings.from_environment())


def _adapted(handler: Handler) -> Callable[[Any, Any], dict[str, Any]]:
    def invoke(event: Any, context: Any) -> dict[str, Any]:
        return _instance().run(handler, event, context.get_remaining_time_in_millis() / 1000)

    return invoke


pack = _adapted(pack_part)
ingest = _adapted(ingest_queue)
commit = _adapted(commit_runs)
compact = _adapted(compact_dataset)
