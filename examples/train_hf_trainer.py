"""Train with Hugging Face Trainer on one or several processes; a second run resumes from the last checkpoint."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate
from train_digits import pack
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from stoker_torch import Loader, StreamDataset


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(image / 16)
        return {"loss": nn.functional.cross_entropy(logits, label), "logits": logits}


class LoaderTrainer(Trainer):
    def get_train_dataloader(self) -> Any:
        return self.loader


class SaveLoader(TrainerCallback):
    def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        path = Path(args.output_dir, f"checkpoint-{state.global_step}", "loader.pt")
        torch.save(others["train_dataloader"].state_dict(), path)


def main(folder: Path, steps: int) -> None:
    args = TrainingArguments(
        folder / "run", max_steps=steps, save_steps=50, learning_rate=3e-3, lr_scheduler_type="constant",
        label_names=["label"], ignore_data_skip=True, report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    with args.main_process_first():  # the arguments have determined this rank
        if not (folder / "train").exists():
            pack(folder)
    # Trainer's own DataLoader shards the samples: its data set is whole.
    test = StreamDataset(folder / "test", shuffle="none", memory="64MB", rank=0, world_size=1)
    trainer = LoaderTrainer(Digits(), args, default_collate, eval_dataset=test, callbacks=[SaveLoader()])
    trainer.compute_metrics = lambda found: {"accuracy": (found[0].argmax(1) == found[1]).mean()}
    last = get_last_checkpoint(args.output_dir)
    with Loader(folder / "train", batch_size=64, seed=7, memory="64MB") as trainer.loader:
        if last is not None:
            trainer.loader.load_state_dict(torch.load(Path(last) / "loader.pt"))
        trainer.train(resume_from_checkpoint=last)
    print(f"step {trainer.state.global_step}: {trainer.evaluate()['eval_accuracy']:.1%} of the images recognised")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
