"""The test bench of a cell: a local bucket with the packed data sets of one workload, and the programs that read it."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.cells import LIMITS, OURS, PROFILES, STARTS, STEP_SECONDS, Cell
from benchmarks.child import Outcome, run_child
from benchmarks.environments import program, python_of
from benchmarks.results import Mixing, Record
from benchmarks.workloads import RESULTS, WORKLOADS
from stoker_local import BucketProcess

BUCKET = "bench"
CONNECTIONS = 8
SEED = 7
PACK_TIMEOUT_SECONDS = 300.0
IMPORT_TIMEOUT_SECONDS = 120.0
MAX_TIMEOUTS = 2  # per workload: a loader that hangs would take hours otherwise
_TORCH = "import torch, time; time.sleep(0.5)"  # long enough to sample its memory
_LOGS = RESULTS / "logs"

Word = str | Path | int | float
"""A part of a command line."""


def data_set(loader: str) -> str:
    """Return the loader that packs a loader's data set: our loaders and the limits share one."""
    return "ours" if loader in (*OURS, *LIMITS) else loader


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The program of a loader or a limit.

    Attributes:
        command: interpreter and its arguments.
        torch_bytes: memory of a process of this interpreter that has imported torch.
    """

    command: tuple[str | Path, ...]
    torch_bytes: int

    @classmethod
    def of(cls, loader: str) -> Program:
        """Find a program, and create its environment if it is missing.

        Raises:
            RuntimeError: it cannot import torch.
            subprocess.CalledProcessError: its environment could not be created.
        """
        command: tuple[str | Path, ...]
        if loader in (*OURS, *LIMITS):
            command = (sys.executable, "-m", f"benchmarks.{loader if loader in OURS else 'limits'}")
        else:
            command = (python_of(loader), program(loader))
        return cls(command=command, torch_bytes=_torch_bytes(command[0]))


@cache
def _torch_bytes(python: str | Path) -> int:
    """Return the memory of a process that has imported torch."""
    outcome = run_child(
        (python, "-c", _TORCH), environment={}, timeout_seconds=IMPORT_TIMEOUT_SECONDS, log=_LOGS / "torch.log"
    )
    if outcome.error:
        raise RuntimeError(f"{python} cannot import torch: {outcome.error}")
    return outcome.peak_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A bucket for one workload.

    Attributes:
        workload: name of the workload.
        samples: number of generated samples.
        bucket: bucket of the data sets.
        programs: loader → program.
        timeout_seconds: time limit of a cell.
        connections: profile → number of connections that our loader had open at once.
        broken: loader that could not start or pack, or hung too often → reason.
        timeouts: loader → number of cells that hung.
        stored_bytes: loader → size of its data set.
    """

    workload: str
    samples: int
    bucket: BucketProcess
    programs: dict[str, Program]
    timeout_seconds: float
    connections: dict[str, int] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    timeouts: Counter[str] = field(default_factory=Counter)
    stored_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def source(self) -> Path:
        return WORKLOADS[self.workload].folder(self.samples)

    def url(self, loader: str) -> str:
        """Return the URL of a loader's data set."""
        return f"s3://{BUCKET}/{data_set(loader)}/{self.workload}"

    def pack(self, loader: str, samples: int) -> None:
        """Write a loader's data set of the first ``samples`` samples to an unshaped bucket."""
        self.bucket.reshape(PROFILES["none"])
        arguments: list[Word] = ["pack", "--source", self.source, "--limit", samples]
        with TemporaryDirectory(prefix="cell-", dir=RESULTS) as folder:
            outcome = self._run(loader, arguments, Path(folder), PACK_TIMEOUT_SECONDS)
        if outcome.error:
            self.broken[loader] = f"packing failed: {outcome.error}"
        else:
            self.stored_bytes[loader] = outcome.result["bytes"]

    def measure(self, cell: Cell) -> Record:
        """Measure a cell; its record contains an error, if there is one."""
        if cell.loader in self.broken:
            return Record(cell=cell, error=self.broken[cell.loader])
        self.bucket.reshape(PROFILES[cell.profile])
        self.bucket.reset()
        with TemporaryDirectory(prefix="cell-", dir=RESULTS) as folder:
            order = Path(folder, "order.npy")
            outcome = self._run(cell.loader, self._arguments(cell, Path(folder)), Path(folder), self.timeout_seconds)
            mixing = None
            if order.exists():
                mixing = Mixing.of(np.load(order), cell.samples, WORKLOADS[cell.workload].batch)
                order.unlink()
            disk_bytes = sum(path.stat().st_blocks * 512 for path in Path(folder).rglob("*") if path.is_file())
        return self._record(cell, outcome, mixing, disk_bytes)

    def _record(self, cell: Cell, outcome: Outcome, mixing: Mixing | None, disk_bytes: int) -> Record:
        self.timeouts[cell.loader] += outcome.timed_out
        if outcome.timed_out and self.timeouts[cell.loader] == MAX_TIMEOUTS:
            self.broken[cell.loader] = f"{outcome.error}, {MAX_TIMEOUTS} times; not tried again"
        if outcome.error:
            return Record(cell=cell, error=outcome.error, wall_seconds=outcome.wall_seconds)
        counts = self.bucket.counts()
        if cell.loader == "ours":
            self.connections[cell.profile] = counts["peak_connections"]
        return Record(
            cell=cell,
            result=outcome.result,
            counts=counts,
            stored_bytes=self.stored_bytes.get(data_set(cell.loader), 0),
            payload_bytes=WORKLOADS[self.workload].payload_bytes(self.samples, cell.samples),
            wall_seconds=outcome.wall_seconds,
            cpu_seconds=outcome.cpu_seconds - outcome.result["imports_cpu_seconds"],
            extra_bytes=outcome.peak_bytes - self.programs[cell.loader].torch_bytes,
            disk_bytes=max(disk_bytes, outcome.result.get("disk_bytes_peak", 0)),
            mixing=mixing,
        )

    def _arguments(self, cell: Cell, folder: Path) -> list[Word]:
        if cell.kind == "starts":
            return ["start", "--batch", WORKLOADS[cell.workload].batch, "--starts", STARTS]
        return self._limit(cell) if cell.loader in LIMITS else self._loader(cell, folder)

    def _loader(self, cell: Cell, folder: Path) -> list[Word]:
        arguments: list[Word] = ["run", "--mode", cell.mode, "--seed", SEED]
        arguments += ["--batch", WORKLOADS[cell.workload].batch, "--workers", cell.workers, "--epochs", cell.epochs]
        arguments += ["--cache", folder / "cache", "--order", folder / "order.npy"]
        if cell.kind == "stall":
            arguments += ["--step-seconds", STEP_SECONDS]
        if cell.kind == "steady":
            arguments += ["--count-bytes"]
        return arguments

    def _limit(self, cell: Cell) -> list[Word]:
        limit, _, connections = cell.loader.partition("-")
        return [
            limit, "--source", self.source, "--batch", WORKLOADS[cell.workload].batch, "--epochs", cell.epochs,
            "--connections", connections or (CONNECTIONS if limit == "aiohttp" else self._connections(cell)),
        ]  # fmt: skip

    def _connections(self, cell: Cell) -> int:
        return self.connections.get(cell.profile, CONNECTIONS)

    def _run(self, loader: str, arguments: list[Word], folder: Path, timeout_seconds: float) -> Outcome:
        """Run a program with its temporary files and its cache in the folder."""
        for name in ("cache", "tmp"):
            (folder / name).mkdir()
        command = [*self.programs[loader].command, *arguments, "--workload", self.workload, "--url", self.url(loader)]
        return run_child(
            [str(word) for word in command],
            environment={**self.bucket.environment(), "TMPDIR": str(folder / "tmp")},
            timeout_seconds=timeout_seconds,
            log=_LOGS / f"{self.workload}-{loader}-{arguments[0]}.log",
        )
