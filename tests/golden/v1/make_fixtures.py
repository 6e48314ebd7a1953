"""Write the files beside this script: what stoker 1 leaves in buckets, caches, catalogs and checkpoints.

``python tests/golden/v1/make_fixtures.py`` (with ``PYTHONPATH=tests``) made them once, with the release that they are
of, and leaves alone what is there. They are not made again: later versions have to read these very bytes, so if a test
no longer agrees with a file, the code has to change, and not the file. The bucket is the local one, whose ETags are
those of Amazon S3: the MD5 of an object. Made in an empty folder, all files but ``trace.json`` (times) and
``streams.json`` (a random seed of torch's, which is not used) are the same each time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

import stoker
from stoker._format.manifest import Manifest
from stoker._format.schema import Column
from stoker._format.tensorfile import DTYPES
from stoker_local import running_bucket
from stoker_torch import Loader, StreamDataset, merge_states
from support.materialized import perform_tasks, plan_tasks
from support.stores import run_check

FOLDER = Path(__file__).parent
URL = "s3://stoker/golden/v1"
CREATED, SAMPLES, SEED = 18, 30, 7
SUPER_SAMPLE_BYTES = 1600
SCHEMA: dict[str, Column] = {
    "number": stoker.Array("int64"),
    "label": stoker.Array("uint8", classes=("cat", "dog", "é")),
    "image": stoker.Array("uint8", (2, 3)),
    **{f"as_{name}": stoker.Array(name, (2,)) for name in DTYPES},
    "data": stoker.Bytes(),
    "text": stoker.Text(),
    "tokens": stoker.Ragged("uint16"),
    "boxes": stoker.Ragged("float32", (2,)),
}


def sample_of(index: int) -> dict[str, Any]:
    """Return sample ``index``: no two are alike, and some of its values are empty."""
    sample: dict[str, Any] = {
        "number": index * 1_000_003,
        "label": np.uint8(index % 3),
        "image": np.arange(index, index + 6, dtype=np.uint8).reshape(2, 3),
        "data": bytes(range(index, index + index % 7)),
        "text": f"sample {index} " + "é🎲" * (index % 3) if index % 5 else "",
        "tokens": np.arange(index % 4, dtype=np.uint16) * np.uint16(9973),
        "boxes": np.linspace(-index, index, 2 * (index % 3), dtype=np.float32).reshape(-1, 2),
    }
    for name, dtype in DTYPES.items():
        pair = [index % 2, index % 3 == 0] if name == "bool" else [index + 1, 127 - index]
        sample[f"as_{name}"] = (
            np.array([index / 4, -1.5 * index], dtype.holder)
            if dtype.holder.kind == "f"
            else np.array(pair, dtype.holder)
        )
    return sample


def plain(value: Any) -> Any:
    """Return a value as JSON says it: text, the digits of bytes, or type, shape and digits of an array."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    array = np.asarray(value)
    return [array.dtype.str, list(array.shape), array.tobytes().hex()]


def write_file(path: Path, data: bytes) -> None:
    """Write a file unless it is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError), path.open("xb") as file:
        file.write(data)


def write_json(name: str, value: dict[str, Any] | list[Any]) -> None:
    """Write a list or object as JSON, one element a line."""
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()]
        text = "{\n" + ",\n".join(lines) + "\n}\n"
    else:
        text = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]\n"
    write_file(FOLDER / name, text.encode())


@contextmanager
def bucket() -> Iterator[stoker.S3Options]:
    """Options of an empty bucket ``stoker``."""
    with running_bucket() as found:
        yield stoker.S3Options(
            endpoint_url=found.url, region="us-east-1", access_key_id="stoker", secret_access_key="stoker-secret"
        )


def pack_dataset(url: str, options: stoker.S3Options) -> None:
    """Pack the data set: one run creates it, a second one appends to it."""
    for mode, start, end in (("create", 0, CREATED), ("append", CREATED, SAMPLES)):
        with stoker.Packer(
            url,
            schema=SCHEMA,
            super_sample_bytes=SUPER_SAMPLE_BYTES,
            mode=mode,  # type: ignore[arg-type]  # mypy takes it for any text
            source=f"samples {start} to {end}",
            options=options,
        ) as packer:
            packer.extend(map(sample_of, range(start, end)))


def dump(url: str, options: stoker.S3Options, folder: Path, prefix: str = "") -> None:
    """Write the objects whose keys begin with a prefix into a folder, by their keys."""

    async def write(store: Any) -> None:
        async for info in store.list(prefix):
            data, _ = await store.get(info.key)
            write_file(folder / info.key, data)

    run_check(stoker.open_store(url, options=options), write)


def make_dataset() -> None:
    """Write ``dataset/``, and ``samples.json``: what each of its samples is."""
    with bucket() as options:
        pack_dataset(URL, options)
        dump(URL, options, FOLDER / "dataset")
    samples = map(sample_of, range(SAMPLES))
    write_json("samples.json", [{name: plain(value) for name, value in sample.items()} for sample in samples])


def shuffle_epoch(url: str, options: stoker.S3Options, steps: Sequence[str] = ("scatter", "slice", "commit")) -> None:
    """Carry out steps of materializing an epoch of the data set."""
    tasks = plan_tasks("scattered", slices=2, scatters=2, object_bytes=1600, lanes=2, seed=SEED, version=2, url=url)
    wanted = [phase for phase in tasks if phase[0].step in steps]
    run_check(stoker.open_store(url, options=options), lambda store: perform_tasks(store, wanted))


def make_epoch() -> None:
    """Write ``scattered/`` and ``epoch/``: what a materialized epoch adds to the data set on its way and at its end."""
    with bucket() as options:
        pack_dataset(URL, options)
        shuffle_epoch(URL, options, ["scatter"])
        dump(URL, options, FOLDER / "scattered", "epochs/")
        shuffle_epoch(URL, options, ["slice", "commit"])
        dump(URL, options, FOLDER / "epoch", "epochs/")


INTERRUPTED = 14
"""Number of samples, one per super-sample, after which the source of a pack failed."""


def pack_interrupted(url: str, options: stoker.S3Options, *, samples: int = 20, fails_at: int | None = None) -> int:
    """Pack numbers, and return how many of them an earlier pack had left."""
    with stoker.Packer(
        url, schema={"number": stoker.Array("int64", (8,))}, super_sample_bytes=72, source="numbers", options=options
    ) as packer:
        durable = packer.durable_samples
        for number in range(samples):
            if number == fails_at:
                raise InterruptedError
            packer.write({"number": np.full(8, number)})
    return durable


def make_interrupted() -> None:
    """Write ``interrupted/``: a pack that did not come to its end."""
    with bucket() as options:
        with suppress(InterruptedError):
            pack_interrupted(URL, options, fails_at=INTERRUPTED)
        dump(URL, options, FOLDER / "interrupted")


def make_cache() -> None:
    """Write ``cache/``: a disk cache that holds the data set."""
    with bucket() as options, TemporaryDirectory() as folder:
        pack_dataset(URL, options)
        cache = f"disk:{folder}?limit=1MB"
        with Loader(URL, batch_size=5, seed=SEED, memory="1MB", options=options, cache=cache, epochs=1) as loader:
            numbers_of(loader)
        for path in Path(folder).rglob("*"):
            if path.is_file():
                write_file(FOLDER / "cache" / path.relative_to(folder), path.read_bytes())


# What is loaded, how far it has come (batches, or samples of a stream), and in which epoch.
LOADED: dict[str, tuple[dict[str, Any], int, int]] = {
    "none": ({"shuffle": "none"}, 3, 1),
    "block": ({"shuffle": "block"}, 3, 1),
    "window": ({"shuffle": "window"}, 3, 1),
    "full": ({"shuffle": "full"}, 3, 1),
    "materialized": ({"shuffle": "materialized"}, 3, 0),
    "a whole epoch": ({"shuffle": "block"}, 8, 4),
    "version 1": ({"shuffle": "window", "version": 1}, 2, 0),
    "limit": ({"shuffle": "window", "limit": 22}, 2, 3),
}
COMMON: dict[str, Any] = {"batch_size": 4, "seed": SEED, "window": 2, "lanes": 2, "memory": "1MB"}


def numbers_of(batches: Iterable[Any]) -> list[int]:
    """Return which samples batches have."""
    return [number // 1_000_003 for batch in batches for number in batch["number"].tolist()]


def make_states() -> None:
    """Write ``states.json``: loaders' states, and the samples that come behind each in its epoch."""
    made: dict[str, Any] = {}
    with bucket() as options:
        pack_dataset(URL, options)
        shuffle_epoch(URL, options)
        for name, (settings, batches, epoch) in LOADED.items():
            with Loader(URL, options=options, **COMMON, **settings) as loader:
                loader.set_epoch(epoch)
                iteration = iter(loader)
                delivered = numbers_of(islice(iteration, batches))
                state = loader.state_dict()
                rest = numbers_of(iteration) or numbers_of(loader)
            made[name] = {"delivered": delivered, "state": state, "rest": rest}
    write_json("states.json", made)


def stream_loader(url: str, options: stoker.S3Options) -> Any:
    """Return a loader whose two workers keep a state each."""
    dataset = StreamDataset(url, seed=SEED, window=2, lanes=4, memory="4MB", columns=["number"], options=options)
    return StatefulDataLoader(dataset, batch_size=3, num_workers=2)


def make_streams() -> None:
    """Write ``streams.json``: the state of workers, what it is merged to, and the samples behind each of the two."""
    with bucket() as options:
        pack_dataset(URL, options)
        loader = stream_loader(URL, options)
        iteration = iter(loader)
        delivered = numbers_of(islice(iteration, 5))
        state = loader.state_dict()
        rest = numbers_of(iteration)
        merged = merge_states([state])
        dataset = StreamDataset(URL, batch_size=3, seed=SEED, window=2, memory="1MB", options=options)
        dataset.load_state_dict(merged)
        rest_of_merged = numbers_of(dataset)
        dataset.close()
    made = {"delivered": delivered, "state": state, "rest": rest, "merged": merged, "rest of merged": rest_of_merged}
    write_json("streams.json", made)


def make_trace() -> None:
    """Write ``trace.json``: what a loader traced."""
    with bucket() as options, TemporaryDirectory() as folder:
        pack_dataset(URL, options)
        path = Path(folder) / "trace.json"
        with Loader(URL, options=options, trace=path, **COMMON) as loader:
            numbers_of(loader)
        write_file(FOLDER / "trace.json", path.read_bytes())


TAGS: dict[str, NDArray[Any] | tuple[str, ...]] = {
    "etags": np.arange(5 * 16, dtype=np.uint8).reshape(5, 16),
    "generations": np.array([1, 1_700_000_000_000_000, 7, 8, (1 << 63) - 1], "<i8"),
    "texts": ("1477-18a-f", "", "W/x", "d41d8cd98f00b204e9800998ecf8427e-2", "~"),
}
"""Of five objects, as the stores give them: S3's ETags, Google's generations, and what others say."""


def make_manifests() -> None:
    """Write ``manifests/``: one of each kind of tags."""
    manifest = Manifest.from_bytes((FOLDER / "dataset" / "manifest.safetensors").read_bytes())
    for name, tags in TAGS.items():
        tagged = replace(manifest, rows=replace(manifest.rows, tags=tags))
        write_file(FOLDER / "manifests" / f"{name}.safetensors", tagged.to_bytes())


if __name__ == "__main__":
    make_dataset()
    make_trace()
    make_manifests()
    make_epoch()
    make_interrupted()
    make_cache()
    make_states()
    make_streams()
