"""Pack handwritten digits into a folder, train a classifier on them, and test it on other images."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from sklearn.datasets import load_digits
from torch import nn

import stoker
from stoker_torch import Loader


def pack(folder: Path) -> None:
    digits = load_digits()
    schema = {"image": stoker.Array("uint8", (8, 8)), "label": stoker.Array("int64")}
    samples = [
        {"image": image.astype("uint8"), "label": label}
        for image, label in zip(digits.images, digits.target, strict=True)
    ]
    train = [sample for number, sample in enumerate(samples) if number % 6]
    for name, part in {"train": train, "test": samples[::6]}.items():
        with stoker.Packer(folder / name, schema=schema, super_sample_bytes=16 << 10) as packer:
            packer.extend(part)


def train(folder: Path, epochs: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with Loader(folder / "train", batch_size=64, seed=7, memory="64MB", epochs=epochs) as loader:
        for epoch in range(epochs):
            for batch in loader:  # {"image": uint8 [64, 8, 8], "label": int64 [64]}
                loss = nn.functional.cross_entropy(model(batch["image"] / 16), batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch}: loss {loss.item():.3f}, waited {loader.stats().wait_seconds:.2f} s so far")
    return model


def accuracy(folder: Path, model: nn.Module) -> float:
    with Loader(folder / "test", batch_size=256, shuffle="none", evaluation=True, memory="64MB", epochs=1) as loader:
        answers = torch.cat([model(batch["image"] / 16).argmax(1) == batch["label"] for batch in loader])
    return answers.double().mean().item()


def main(folder: Path, epochs: int = 10) -> None:
    pack(folder)
    print(f"{accuracy(folder, train(folder, epochs)):.1%} of the test images are recognised")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(Path(sys.argv[1]))
    else:
        with TemporaryDirectory() as temporary:
            main(Path(temporary))
