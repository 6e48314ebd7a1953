"""Imports point down: between the packages, between the floors of the runtime, and never in a circle."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    "stoker": "runtime",
    "stoker_torch": "loader",
    "stoker_functions": "functions",
    "stoker_local": "infra/local",
}
MAY_IMPORT = {
    "stoker": set(),
    "stoker_torch": {"stoker"},
    "stoker_functions": {"stoker"},
    "stoker_local": {"stoker", "stoker_torch", "stoker_functions"},
}
HEAVY = ("torch", "boto3", "botocore", "aioboto3", "aiobotocore", "gcloud", "PIL", "simplejpeg", "sklearn", "moto")
# Those whose business is one of them; the rest of the runtime imports these only where they are used.
_OF_S3 = ("aws_credentials", "http_store_aws", "s3", "s3_access")
_OF_GCS = ("gcs", "gcs_access", "gcs_signing", "google_identity", "google_tokens", "http_store_google")
ADAPTERS = {"stoker.images", *(f"stoker.store.{name}" for name in (*_OF_S3, *_OF_GCS))}

# The floors of the runtime, lowest first; a module imports its own floor and those below.
FLOORS = {
    "values": "errors version dtypes schema",
    "pure": """access_token arguments budget checksum costs display feistel fields gather images lane_share manifest
        meter order partition philox prices ring sample_context schedule sizes spending steps supersample tensorfile
        text_file tier image_crop orientation
        cache.fifo cache.future cache.keeper cache.lru cache.naming cache.next_use cache.policies cache.policy
        cache.replica_aware cache.spec cache.uniform
        fetch.aimd fetch.backoff fetch.breaker fetch.config fetch.hedge fetch.statistics
        pack.cutter pack.difference pack.digest pack.known pack.record
        reading.forecast reading.group_plan reading.group_steps reading.sample_memory
        shuffling.layout shuffling.memory shuffling.plan shuffling.task
        trace.html_page trace.phases
        warm.bill warm.code warm.directory warm.handshake warm.life warm.limits warm.outbox warm.parity warm.shard
        warm.shelf warm.upkeep warm.settings warm.statistics warm.wake warm.wire""",
    "waiting": """bounded clock first_touch loop_thread progress task_group threads
        cache.disk_folder cache.disk_tier cache.keeping cache.memory_tier cache.tiers
        fetch.deadline fetch.gate fetch.rate_limit reading.byte_budget
        trace.attribution trace.chrome trace.event_file trace.exporting trace.fetches trace.json_values
        trace.open_telemetry trace.picture trace.prometheus trace.quantiles trace.recorder trace.recording trace.summary
        warm.asking warm.client warm.connection warm.door warm.lazy warm.line warm.listing warm.memory_pool warm.node
        warm.serving warm.sockets warm.standing warm.tier""",
    "stores": "store retry pack.part shuffling.folder",
    "composers": """dataset fanout feed maintenance plan sources versions walk
        fetch.fetcher fetch.prefetcher fetch.race fetch.range_reader fetch.step_queue
        pack.catalog pack.log pack.merge pack.packer pack.plan pack.rewriting pack.run pack.uploads
        reading.groups reading.head_cache reading.head_memory reading.heads reading.protocol reading.samples
        reading.super_samples reading.values
        shuffling.epochs shuffling.feed shuffling.inprocess shuffling.reading shuffling.record shuffling.work
        shuffling.writing
        warm.backup warm.calling warm.doomed warm.errands warm.fleet warm.keepers warm.location warm.opening warm.origin
        warm.own_proxy warm.proxy warm.put_back warm.reading warm.reception warm.server warm.waking warm.write_behind
        warm.writing""",
    "commands": "cli",
}
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS.values()) for room in rooms.split()}
SHARED = {room.partition(".")[0] for room in FLOOR_OF if "." in room}
"""Folders whose modules are on different floors; the folder itself imports nothing."""


def modules(package: str) -> dict[str, Path]:
    """Return every module of a package, dotted name → file."""
    source = ROOT / SOURCES[package]
    named = {}
    for file in (source / package).rglob("*.py"):
        parts = file.relative_to(source).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return named


EVERY_MODULE = {name: file for package in SOURCES for name, file in modules(package).items()}


def imported(name: str) -> Iterator[str]:
    """Yield the modules of ours that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(EVERY_MODULE[name].read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} has a relative import"
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [each if each in EVERY_MODULE else str(node.module) for each in below]
        else:
            continue
        yield from (each for each in found if each.partition(".")[0] in SOURCES)


def room_of(name: str) -> str:
    """Return what stands in FLOORS for a module of the runtime."""
    parts = name.split(".")[1:]
    return ".".join(parts[:2]) if parts[0] in SHARED else parts[0]


def floor_of(name: str) -> int:
    room = room_of(name)
    if room in SHARED:
        assert not list(imported(name)), f"{name} is a folder of several floors: it cannot import"
        return 0
    assert room in FLOOR_OF, f"{name} is on no floor: add {room!r} to FLOORS in {Path(__file__).name}"
    return FLOOR_OF[room]


def test_packages_import_only_packages_below_them() -> None:
    wrong = [
        f"{name} imports {other}"
        for name in EVERY_MODULE
        for other in imported(name)
        if other.partition(".")[0] not in {package := name.partition(".")[0], *MAY_IMPORT[package]}
    ]
    assert not wrong


@pytest.mark.parametrize("name", sorted(set(modules("stoker")) - {"stoker"}))
def test_a_module_of_the_runtime_imports_only_its_floor_and_those_below(name: str) -> None:
    for other in imported(name):
        assert other != "stoker", f"{name} imports the package itself, which is the roof"
        assert floor_of(other) <= floor_of(name), f"{name} imports {other}, which is on a higher floor"


def test_every_room_on_a_floor_is_there() -> None:
    assert {room_of(name) for name in modules("stoker") if "." in name} - SHARED == set(FLOOR_OF)


def test_no_imports_go_round_in_a_circle() -> None:
    graph = {name: {other for other in imported(name) if other != name} for name in EVERY_MODULE}
    assert len(list(TopologicalSorter(graph).static_order())) == len(EVERY_MODULE)


PURE = {*FLOORS["values"].split(), *FLOORS["pure"].split()}


@pytest.mark.parametrize("name", sorted(name for name in modules("stoker") if name.partition(".")[2] in PURE))
def test_a_pure_module_waits_for_nothing(name: str) -> None:
    tree = ast.parse(EVERY_MODULE[name].read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Await | ast.AsyncFor | ast.AsyncWith)]


@pytest.mark.parametrize("name", sorted(set(EVERY_MODULE) - {"stoker.task_group"}))
def test_no_module_makes_a_task_group_that_hides_the_type_of_its_failure(name: str) -> None:
    calls = (node for node in ast.walk(ast.parse(EVERY_MODULE[name].read_text())) if isinstance(node, ast.Call))
    plain = [call.lineno for call in calls if ast.unparse(call.func).rpartition(".")[2] == "TaskGroup"]
    assert not plain, f"{name}: use stoker.task_group; asyncio's own raises an ExceptionGroup"


def test_importing_the_runtime_loads_no_torch_no_cloud_sdk_and_no_image_codec() -> None:
    program = (
        f"import importlib, sys\nfor name in {sorted(set(modules('stoker')) - ADAPTERS)!r}:\n"
        "    if not name.endswith('__main__'): importlib.import_module(name)\n"
        f"print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    )
    path = ":".join(str(ROOT / source) for source in SOURCES.values())
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
