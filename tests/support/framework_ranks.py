"""Training programs with Lightning, Accelerate and Trainer: each rank writes its batches as JSON into a folder.

One program runs all cases of a framework, because imports take most of its time.
"""

from __future__ import annotations

import copy
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, IterableDataset

from stoker.errors import StokerError
from stoker_torch import DeviceStage, Loader, StreamDataset
from support.fake_device import ImmediateDevice, use_device

__all__ = ["BATCH_SIZE", "CHECKPOINT_STEP", "Report", "run_framework"]

BATCH_SIZE = 8
CHECKPOINT_STEP = 9
_EPOCHS = 2
_TIMEOUT_SECONDS = 300

Report = dict[str, Any]
"""Name of a case → batches of each epoch or of the whole run, as lists of numbers; or the text of an error."""


def run_framework(name: str, url: str, folder: Path) -> list[Report]:
    """Run a framework's program on two ranks and return the report of each, in order of the ranks.

    Raises:
        AssertionError: a rank failed; none outlives the call.
        subprocess.TimeoutExpired: a rank hangs.
    """
    base = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    base["PYTHONSAFEPATH"] = "1"  # otherwise the module datasets beside this file hides Hugging Face's
    base["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [base.get("PYTHONPATH")])])
    command = [sys.executable, __file__, name, url, str(folder)]
    log = folder / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=base, cwd=folder, stdout=output, stderr=output, start_new_session=True)
    try:
        process.wait(_TIMEOUT_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not process.returncode, log.read_text()[-8000:]
    return [json.loads((folder / f"{name}{rank}.json").read_text()) for rank in range(2)]


def _environment(rank: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank. The port is not used: the ranks rendezvous in a file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "1",
    }  # fmt: skip


def _numbers(batches: Iterable[Any]) -> list[list[int]]:
    return [batch["x"].tolist() for batch in batches]


def _epochs(loader: Iterable[Any]) -> list[list[list[int]]]:
    return [_numbers(loader) for _ in range(_EPOCHS)]


def _or_error(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except StokerError as error:
        return str(error)


class _Around(IterableDataset[Any]):
    """A user's data set that wraps another, for instance to tokenize."""

    def __init__(self, inner: StreamDataset) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)

    def set_epoch(self, epoch: int) -> None:
        self.inner.set_epoch(epoch)


class _Program:
    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.report: Report = {}
        self.device = ImmediateDevice()
        use_device(self.device, pytest.MonkeyPatch())

    def loader(self, **settings: Any) -> Loader:
        return Loader(self.url, **{"batch_size": BATCH_SIZE, "seed": 1, "memory": "8MB", **settings})

    def staged(self, **settings: Any) -> Loader:
        """Return a loader whose batches are copied to a device, which is one of the host."""
        return self.loader(device="cuda:0", **settings)

    def stream(self, *, whole: bool, **settings: Any) -> StreamDataset:
        """Return a data set with this rank's share of the samples, or with all of them."""
        alone = {"rank": 0, "world_size": 1} if whole else {}
        return StreamDataset(self.url, **{"seed": 1, "memory": "8MB", **alone, **settings})

    def save(self, name: str) -> None:
        (self.folder / f"{name}{distributed.get_rank()}.json").write_text(json.dumps(self.report))
        distributed.destroy_process_group()

    def meet(self) -> None:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{self.folder}/rendezvous",
            rank=int(os.environ["RANK"]),
            world_size=2,
            timeout=timedelta(seconds=_TIMEOUT_SECONDS / 2),
        )

    # Accelerate.

    def accelerate(self) -> None:
        """Iterate over prepared DataLoaders with both ways of sharding, and over a Loader."""
        accelerate: Any = importlib.import_module("accelerate")
        self.meet()
        for name, dispatch in (("dispatched", True), ("sharded", False)):
            config = accelerate.DataLoaderConfiguration(dispatch_batches=dispatch, use_stateful_dataloader=True)
            self.report[f"{name}, stateful"] = _or_error(
                partial(self._stateful, accelerate.Accelerator(cpu=True, dataloader_config=config))
            )
            config = accelerate.DataLoaderConfiguration(dispatch_batches=dispatch)
            accelerator = accelerate.Accelerator(cpu=True, dataloader_config=config)
            for workers in (0, 2):
                self._prepared(accelerator, f"{name}, {workers} workers", workers)
            if name == "sharded":
                plain = DataLoader(self.stream(whole=True), batch_size=BATCH_SIZE)
                prepared = accelerator.prepare_data_loader(plain, device_placement=False)
                with DeviceStage(prepared, "cuda:0") as stage:
                    assert accelerator.prepare(stage) is stage
                    self.report["sharded, staged"] = _epochs(stage)
        accelerator = accelerate.Accelerator(cpu=True)
        with self.loader() as loader:
            assert accelerator.prepare(loader) is loader
            self.report["loader"] = _epochs(loader)
        with self.staged() as loader:
            assert accelerator.prepare(loader) is loader
            self.report["staged"] = _epochs(loader)
        for name, wrap in (("DDP", nn.parallel.DistributedDataParallel), ("FSDP", _shard)):
            self.report[name] = self._wrapped(wrap)
        self.save("accelerate")

    def _wrapped(self, wrap: Callable[[nn.Module], nn.Module]) -> list[list[list[int]]]:
        """Train a wrapped model on batches of a device, and return them by epoch."""
        model = _Model()
        wrapped, epochs = wrap(model), []
        optimizer = torch.optim.SGD(wrapped.parameters(), 0.01)
        with self.staged() as loader:
            for _ in range(_EPOCHS):
                for batch in loader:
                    wrapped(batch["x"])["loss"].backward()
                    optimizer.step()
                epochs.append(model.seen[:])
                model.seen.clear()
        return epochs

    def _prepared(self, accelerator: Any, case: str, workers: int) -> None:
        skip: Any = importlib.import_module("accelerate").skip_first_batches
        for name, data in (
            ("share", self.stream(whole=False)),
            ("share in another", _Around(self.stream(whole=False))),
            ("whole", self.stream(whole=True)),
        ):
            plain = DataLoader(data, batch_size=BATCH_SIZE, num_workers=workers)
            loader = accelerator.prepare(plain)
            self.report[f"{case}, {name}"] = _or_error(partial(_epochs, loader))
        rest = skip(loader, 2)
        rest.set_epoch(1)
        self.report[f"{case}, resumed"] = _numbers(rest)
        unprepared = DataLoader(self.stream(whole=False), batch_size=BATCH_SIZE, num_workers=workers)
        self.report[f"{case}, not prepared"] = _epochs(unprepared)

    def _stateful(self, accelerator: Any) -> list[list[list[int]]]:
        """Return the batches of an epoch, and those after it is resumed behind its third step."""
        loaders = [
            accelerator.prepare(DataLoader(self.stream(whole=True), batch_size=BATCH_SIZE, num_workers=2))
            for _ in range(2)
        ]
        seen = []
        for step, batch in enumerate(loaders[0], start=1):
            seen.append(batch["x"].tolist())
            if step == 3:
                loaders[1].load_state_dict(copy.deepcopy(loaders[0].state_dict()))
        return [seen, _numbers(loaders[1])]

    # Trainer.

    def trainer(self) -> None:
        """Train with Trainer's own DataLoader and with replacements, and resume from a checkpoint."""
        self.meet()
        self.report["share"] = _or_error(lambda: self._trained("share", self.stream(whole=False)))
        for name, dispatch, workers in (("dispatched", True, 2), ("sharded", False, 1)):
            own: dict[str, Any] = {
                "accelerator_config": {"dispatch_batches": dispatch},
                "dataloader_num_workers": workers,
            }
            self.report[name] = self._trained(name, self.stream(whole=True), **own)
            checkpoint = self.folder / name / f"checkpoint-{CHECKPOINT_STEP}"
            resumed = self._trained(name, self.stream(whole=True), checkpoint=checkpoint, **own)
            self.report[f"{name}, resumed"] = resumed
        data = self.stream(whole=False, batch_size=BATCH_SIZE)
        self.report["not prepared"] = self._trained("plain", DataLoader(data, batch_size=None), max_steps=14)
        with self.loader() as loader:
            self.report["loader"] = self._trained("loader", loader)
        with self.staged() as loader:
            self.report["staged"] = self._trained("staged", loader)
        checkpoint = self.folder / "loader" / f"checkpoint-{CHECKPOINT_STEP}"
        with self.loader() as loader:
            loader.load_state_dict(torch.load(checkpoint / "loader.pt"))
            resumed = self._trained("loader", loader, checkpoint=checkpoint, ignore_data_skip=True)
            self.report["loader, resumed"] = resumed
        even = {"limit": 12 * BATCH_SIZE}
        for name, settings, steps in (("rest", {}, (1, 2)), ("even", even, (1,)), ("endless", {}, (2,))):
            self.report[name] = self._updates(name, None, settings)
            for step in steps:
                checkpoint = self.folder / name / f"checkpoint-{step}"
                self.report[f"{name}, resumed at {step}"] = self._updates(f"{name}-{step}", checkpoint, settings)
        again = self.folder / "rest-1" / "checkpoint-5"
        self.report["rest, resumed again"] = self._updates("again", again, {})
        self.save("trainer")

    def _updates(self, name: str, checkpoint: Path | None, settings: dict[str, Any]) -> list[list[list[int]]]:
        """Train with gradients accumulated over three batches, and return the batches of each update."""
        ends = [0]
        with self.loader(**settings) as loader:
            if checkpoint is not None:
                loader.load_state_dict(torch.load(checkpoint / "loader.pt"))
            data, most = (_Endless(loader), 5) if name.startswith("endless") else (loader, -1)
            seen = self._trained(
                name, data, checkpoint, ends, max_steps=most, ignore_data_skip=True,
                gradient_accumulation_steps=3, save_steps=1,
            )  # fmt: skip
        return [seen[start:end] for start, end in pairwise(ends)]

    def _trained(
        self, name: str, data: Any, checkpoint: Path | None = None, ends: list[int] | None = None, **settings: Any
    ) -> list[list[int]]:
        """Train two epochs, and return the model's batches; records their number at each update."""
        transformers: Any = importlib.import_module("transformers")
        model = _Model()
        arguments = transformers.TrainingArguments(
            output_dir=str(self.folder / name), use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True,
            per_device_train_batch_size=BATCH_SIZE, num_train_epochs=_EPOCHS, logging_strategy="no",
            **{"save_steps": CHECKPOINT_STEP, **settings},
        )  # fmt: skip
        is_data_set = isinstance(data, IterableDataset)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data if is_data_set else None)
        if not is_data_set:
            trainer.get_train_dataloader = lambda: data

        class Save(transformers.TrainerCallback):  # type: ignore[misc] # imported where it is needed
            def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                torch.save(data.state_dict(), Path(args.output_dir) / f"checkpoint-{state.global_step}" / "loader.pt")

            def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if ends is not None:
                    ends.append(len(model.seen))

        if isinstance(data, Loader | _Endless):
            trainer.add_callback(Save)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        return model.seen

    # Lightning.

    def lightning(self) -> None:
        """Train two epochs, and again from a checkpoint in the second; record the threads that remain at the end."""
        lightning: Any = importlib.import_module("lightning")
        callbacks: Any = importlib.import_module("lightning.pytorch.callbacks")
        program = self

        class Module(lightning.LightningModule):  # type: ignore[misc] # imported where it is needed
            def __init__(self) -> None:
                super().__init__()
                self.model = _Model()
                self.epochs: list[list[list[int]]] = [[] for _ in range(_EPOCHS)]
                self.sane: list[list[int]] = []
                self.tested: list[list[list[int]]] = [[] for _ in range(_EPOCHS)]

            def train_dataloader(self) -> Loader:
                return program.staged() if name == "staged" else program.loader()

            def val_dataloader(self) -> Loader:
                return program.loader(shuffle="none", evaluation=True)

            def training_step(self, batch: Any, _: int) -> Any:
                self.epochs[self.current_epoch].append(batch["x"].tolist())
                return self.model(batch["x"])["loss"]

            def validation_step(self, batch: Any, _: int) -> None:
                into = self.sane if self.trainer.sanity_checking else self.tested[self.current_epoch]
                into.append(batch["x"].tolist())

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), 0.01)

        for name in ("whole", "staged", "resumed"):
            keep = callbacks.ModelCheckpoint(
                self.folder / name, "{step}", every_n_train_steps=CHECKPOINT_STEP, save_top_k=-1
            )
            trainer = lightning.Trainer(
                accelerator="cpu", devices=2, strategy="ddp", max_epochs=_EPOCHS, default_root_dir=self.folder,
                logger=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[keep],
            )  # fmt: skip
            checkpoint = self.folder / "whole" / f"step={CHECKPOINT_STEP}.ckpt"
            module = Module()
            trainer.fit(module, ckpt_path=str(checkpoint) if name == "resumed" else None)
            self.report[name] = module.epochs
            self.report[f"{name}, sane"] = module.sane
            self.report[f"{name}, tested"] = module.tested
        del module, trainer, keep
        gc.collect()
        self.report["threads"] = [thread.name for thread in threading.enumerate()]
        self.save("lightning")


def _shard(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


class _Endless:
    """Yields one epoch of a loader after the other, without an end or a length."""

    def __init__(self, loader: Loader) -> None:
        self.state_dict = loader.state_dict
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self._loader


class _Model(nn.Module):
    """Records its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append(x.tolist())
        return {"loss": self.layer(x[:, None].float() / 100).mean()}


_IMPORTS = {
    "accelerate": ("accelerate", "torch._dynamo", "torch.distributed.fsdp"),
    "trainer": ("accelerate", "torch._dynamo", "transformers.trainer"),
}


def _fork_ranks(name: str) -> None:
    """Return in two ranks, which share what is imported; end this process with them."""
    for module in _IMPORTS[name]:
        importlib.import_module(module)
    gc.freeze()
    children = []
    for environment in map(_environment, range(2)):
        if not (child := os.fork()):
            os.environ.update(environment)
            return
        children.append(child)
    if any(codes := [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]):
        sys.exit(f"the ranks ended with {codes}")
    sys.exit()


if __name__ == "__main__":
    if sys.argv[1] != "lightning":  # which starts its second rank itself
        _fork_ranks(sys.argv[1])
    getattr(_Program(sys.argv[2], Path(sys.argv[3])), sys.argv[1])()
