"""Externally visible names: functions that collect them from the code, and the checked-in list of each kind.

``PYTHONPATH=tests python -m support.outside_names`` rewrites the lists in tests/golden/names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from support.outside_names.command_line import command_line
from support.outside_names.deployment import entry_points, environment, handlers, loggers
from support.outside_names.events import events
from support.outside_names.files import files, loader_documents
from support.outside_names.json_output import json_output
from support.outside_names.python_api import documented_imports, python_api
from support.outside_names.telemetry import telemetry
from support.outside_names.urls import urls
from support.outside_names.warm_status import warm_output

__all__ = ["COLLECTORS", "GOLDEN", "REWRITE", "collected", "difference"]

GOLDEN = Path(__file__).parents[2] / "golden" / "names"
REWRITE = "PYTHONPATH=tests python -m support.outside_names"

COLLECTORS: dict[str, Callable[[Path], Iterable[str]]] = {
    "command-line": command_line,
    "documented-imports": documented_imports,
    "entry-points": entry_points,
    "environment": environment,
    "events": events,
    "files": files,
    "handlers": handlers,
    "json-output": json_output,
    "loader-documents": loader_documents,
    "loggers": loggers,
    "python-api": python_api,
    "telemetry": telemetry,
    "urls": urls,
    "warm-output": warm_output,
}
"""Kind → function that returns its names, one per line; it may write into the empty folder that is its argument."""


def collected(kind: str, scratch: Path) -> list[str]:
    """Return the current names of a kind, sorted, without duplicates."""
    return sorted(set(COLLECTORS[kind](scratch)))


def difference(kind: str, lines: list[str]) -> str:
    """Return the differences from the checked-in names, as a message; empty if there are none."""
    file = GOLDEN / f"{kind}.txt"
    golden = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    gone, new = sorted(set(golden) - set(lines)), sorted(set(lines) - set(golden))
    if not gone and not new:
        return ""
    return "\n".join(
        [
            f"names that the outside sees, {file.name}: {len(gone)} gone, {len(new)} new",
            *(f"- {line}" for line in gone),
            *(f"+ {line}" for line in new),
            "A name that is gone needs an alias; one that is new needs its line in the list.",
            f"If both are meant, write the list anew with `{REWRITE}`, and review its diff.",
        ]
    )
