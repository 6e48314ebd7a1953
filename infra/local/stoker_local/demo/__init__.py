"""``stoker demo``: one model, one bucket, two ways to read it."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from stoker.cli.command import Command
from stoker.cli.flags import positive
from stoker.errors import MissingExtraError
from stoker_local.demo.screen import Screen

__all__ = ["command"]


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("--epochs", type=positive, default=8, metavar="N", help="of both trainings (default: 8)")
    parser.add_argument("--seed", type=int, default=7, metavar="N", help="of the model and the orders (default: 7)")
    parser.add_argument(
        "--workers", type=positive, metavar="N", help="of the plain DataLoader (default: try a few, take the best)"
    )


def _run(args: Namespace) -> int:
    with Screen(sys.stdout) as screen:
        screen.line("A model learns handwritten digits from a bucket, twice.")
        screen.draw("loading PyTorch and scikit-learn ...")
        try:
            # Only here: every command of stoker loads this module, and PyTorch takes seconds.
            from stoker_local.demo.run import DemoConfig, run
        except ModuleNotFoundError as error:
            raise MissingExtraError(f"the demo needs {error.name}; pip install 'stoker[local]'") from error
        return run(DemoConfig(epochs=args.epochs, seed=args.seed, workers=args.workers), screen)


command = Command(
    name="demo",
    help="train on digits from a local bucket twice: with one object per image, and with stoker",
    configure=_configure,
    run=_run,
)
