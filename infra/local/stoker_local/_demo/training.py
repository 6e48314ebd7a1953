"""The demo's model and its training loop, the same for whatever feeds it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from stoker_local._demo.digits import IMAGE_SIDE, Digits

__all__ = ["Batches", "Step", "Timing", "accuracy", "new_model", "train"]

_LARGEST_LEARNING_RATE = 4e-3


class Batches(Protocol):
    """What feeds the loop: an iteration is an epoch, a batch has ``image`` and ``label``."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Mapping[str, Any]]: ...


class DigitNet(nn.Sequential):
    """A small convolutional network: ``uint8 [n, 8, 8, 1]`` to ``float32 [n, 10]``."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 64, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 128, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(128 * (IMAGE_SIDE // 2) ** 2, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the digits' scores."""
        scores: torch.Tensor = super().forward(images.permute(0, 3, 1, 2).float() / 255)  # type: ignore[no-untyped-call]
        return scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Where a training is.

    Attributes:
        epoch: from 1.
        epochs: in all.
        done: share of the training, 0 to 1.
        loss: of the latest batch.
        samples: so far.
        wait_seconds: for data, so far.
        loop_seconds: since the first batch was asked for.
        is_last_of_epoch: whether the epoch ends here.
    """

    epoch: int
    epochs: int
    done: float
    loss: float
    samples: int
    wait_seconds: float
    loop_seconds: float
    is_last_of_epoch: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long a training took.

    Attributes:
        total_seconds: from before its batches were opened to the end of the last step.
        loop_seconds: from asking for the first batch to the end of the last step.
        wait_seconds: of them, spent asking for batches.
        first_batch_seconds: from before its batches were opened to the first of them.
    """

    total_seconds: float
    loop_seconds: float
    wait_seconds: float
    first_batch_seconds: float

    @property
    def stall(self) -> float:
        """The share of the loop's time that it waited, 0 to 1."""
        return self.wait_seconds / self.loop_seconds


def new_model(seed: int) -> DigitNet:
    """Return a model whose initial weights only depend on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DigitNet()


def train(
    opening: AbstractContextManager[Batches], model: DigitNet, epochs: int, on_step: Callable[[Step], None]
) -> Timing:
    """Train a model and return how long it took.

    Args:
        opening: opens the batches on entry, which is timed, and closes them on exit, which is not.
        model: is trained in place.
        epochs: how often to go through the batches.
        on_step: called after every step.
    """
    made = time.perf_counter()
    with opening as batches:
        steps, optimizer = epochs * len(batches), torch.optim.Adam(model.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _LARGEST_LEARNING_RATE, total_steps=steps)
        begun, waited, first, samples, number = time.perf_counter(), 0.0, 0.0, 0, 0
        for epoch in range(1, epochs + 1):
            asked = time.perf_counter()
            for batch in batches:
                now = time.perf_counter()
                waited, first = waited + now - asked, first or now - made
                loss = nn.functional.cross_entropy(model(batch["image"]), batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                number, samples = number + 1, samples + len(batch["label"])
                on_step(
                    Step(
                        epoch=epoch,
                        epochs=epochs,
                        done=number / steps,
                        loss=loss.item(),
                        samples=samples,
                        wait_seconds=waited,
                        loop_seconds=time.perf_counter() - begun,
                        is_last_of_epoch=number % len(batches) == 0,
                    )
                )
                asked = time.perf_counter()
        ended = time.perf_counter()
    return Timing(
        total_seconds=ended - made, loop_seconds=ended - begun, wait_seconds=waited, first_batch_seconds=first
    )


def accuracy(model: DigitNet, digits: Digits) -> float:
    """Return the share of images that the model recognises, 0 to 1."""
    with torch.inference_mode():
        answers = model(torch.from_numpy(digits.images)).argmax(dim=1)
    return float((answers == torch.from_numpy(digits.labels)).double().mean())
