"""The page on GPUs: its blocks run, on a device of the host, or on CUDA where there is one."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

import stoker
import stoker_torch
from stoker.images import RandomResizedCrop
from stoker_torch import _device_images
from support.fake_device import ImmediateDevice, use_device

PAGE = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
GRAPH = next(block for block in BLOCKS if "CUDAGraph" in block)


class Seen:
    """What a reader's training has: a model, a step, and data."""

    def __init__(self) -> None:
        self.batches = 0

    def names(self) -> dict[str, Any]:
        def count(*_: Any) -> Any:
            self.batches += 1
            return SimpleNamespace(loss=lambda _: None)

        data = TensorDataset(torch.zeros(256, 3), torch.arange(256))
        public = {name: getattr(stoker_torch, name) for name in stoker_torch.__all__}
        of_torch = {"torch": torch, "DataLoader": DataLoader, "RandomResizedCrop": RandomResizedCrop}
        return {**public, **of_torch, "model": count, "train_step": count, "warm_up": count, "images": data}


@pytest.fixture
def has_device(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether there is a CUDA device; if not, "cuda" is one of the host."""
    if torch.cuda.is_available():
        return True
    use_device(ImmediateDevice(), monkeypatch)
    monkeypatch.setattr(_device_images, "find_decode_jpeg", lambda: None)
    return False


@pytest.fixture
def train(tmp_path: Path) -> Callable[[bool], str]:
    """Pack images, encoded or not, and return the URL."""

    def pack(is_encoded: bool) -> str:
        url = str(tmp_path / ("encoded" if is_encoded else "raw"))
        file = io.BytesIO()
        Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(file, "JPEG")
        column = stoker.Bytes() if is_encoded else stoker.Array("uint8", (8, 8, 3))
        image = file.getvalue() if is_encoded else np.zeros((8, 8, 3), np.uint8)
        with stoker.Packer(url, schema={"image": column, "label": stoker.Array("int64")}) as packer:
            packer.extend({"image": image, "label": label} for label in range(128))
        return url

    return pack


@pytest.mark.parametrize("block", [block for block in BLOCKS if block is not GRAPH], ids=lambda block: block[:30])
def test_a_block_runs(block: str, train: Callable[[bool], str], has_device: bool) -> None:
    seen = Seen()
    code = block.replace("s3://bucket/train", train("DeviceImageDecoder" in block))
    if made := re.search(r"^Loader\(.*\)\Z", code.rstrip(), re.DOTALL | re.MULTILINE):  # the page shows how to make it
        code = code.replace(made[0], f"with {made[0]} as loader:\n    train_step(next(iter(loader)))")
    exec(compile(code, "gpu.md", "exec"), seen.names())  # noqa: S102 - our own page
    assert seen.batches


def test_the_block_of_graphs_runs_on_cuda(train: Callable[[bool], str]) -> None:
    compile(GRAPH, "gpu.md", "exec")
    if not torch.cuda.is_available():
        pytest.skip("graphs need a CUDA device")
    seen = Seen()
    exec(GRAPH.replace("s3://bucket/train", train(False)), seen.names())  # noqa: S102 - our own page
    assert seen.batches
