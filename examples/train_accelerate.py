"""Train with Hugging Face Accelerate on one or several processes; a second run resumes from the last checkpoint.

On two: accelerate launch --cpu --num_processes 2 examples/train_accelerate.py FOLDER STEPS
"""

import sys
from itertools import chain, islice
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.utils.data import DataLoader
from train_digits import pack

from stoker_torch import Loader, StreamDataset


def accuracy(folder: Path, accelerator: Accelerator, model: nn.Module) -> float:
    # Accelerate shards the batches of a prepared DataLoader: the data set is whole on every rank.
    dataset = StreamDataset(folder / "test", shuffle="none", memory="64MB", rank=0, world_size=1)
    right = []
    for batch in accelerator.prepare(DataLoader(dataset, batch_size=64)):
        answers = model(batch["image"] / 16).argmax(1) == batch["label"]
        right.append(accelerator.gather_for_metrics(answers))
    return torch.cat(right).double().mean().item()


def main(folder: Path, steps: int, epochs: int = 10) -> None:
    accelerator = Accelerator(cpu=True)  # first, since it determines this rank
    with accelerator.main_process_first():
        if not (folder / "train").exists():
            pack(folder)
    model: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=3e-3))
    with Loader(folder / "train", batch_size=64, seed=7, memory="64MB", epochs=epochs) as loader:
        accelerator.register_for_checkpointing(loader)  # which saves and restores its state
        if (folder / "checkpoint").exists():
            accelerator.load_state(str(folder / "checkpoint"))
        batches = chain.from_iterable(loader for _ in range(loader.state_dict()["epoch"], epochs))
        for batch in islice(batches, steps):
            images, labels = send_to_device((batch["image"], batch["label"]), accelerator.device)
            loss = nn.functional.cross_entropy(model(images / 16), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.save_state(str(folder / "checkpoint"))
    accelerator.print(loader)
    accelerator.print(f"{accuracy(folder, accelerator, model):.1%} of the test images are recognised")
    accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
