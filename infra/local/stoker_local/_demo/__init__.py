"""``stoker demo``: trains with and without stoker from a local bucket, or shows functions that pack raw images."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from stoker.cli import Command
from stoker.cli.flags import positive
from stoker.errors import ConfigError, MissingExtraError
from stoker_local._demo.screen import Screen

_DEFAULT_EPOCHS = 8
_DEFAULT_IMAGES = 2500


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=7, metavar="N", help="seed of everything random (default: 7)")
    parser.set_defaults(example="stoker demo --functions")
    training = parser.add_argument_group("training with and without stoker")
    training.add_argument(
        "--epochs", type=positive, metavar="N", help=f"epochs of each training (default: {_DEFAULT_EPOCHS})"
    )
    training.add_argument(
        "--workers", type=positive, metavar="N", help="workers of the plain DataLoader (default: choose by trial)"
    )
    functions = parser.add_argument_group("functions that pack arriving images, with injected faults")
    functions.add_argument("--functions", action="store_true", help="show functions instead of training")
    functions.add_argument(
        "--images", type=positive, metavar="N", help=f"number of images (default: {_DEFAULT_IMAGES:,})"
    )


def _check(args: Namespace) -> None:
    """Raise ConfigError for options that cannot be combined."""
    if args.functions and (args.epochs is not None or args.workers is not None):
        raise ConfigError("--epochs and --workers cannot be combined with --functions, which does not train")
    if args.images is not None and not args.functions:
        raise ConfigError("--images requires --functions")
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed} is negative; it must be at least 0")


def _run(args: Namespace) -> int:
    """Run one of the demos.

    Raises:
        ConfigError: options cannot be combined.
        MissingExtraError: a package that the demo needs is not installed.
    """
    _check(args)
    with Screen(sys.stdout) as screen:
        if args.functions:
            screen.line("Raw images become training data, in functions that may die at any moment.")
        else:
            screen.line("A model learns handwritten digits from a bucket, twice.")
        screen.draw("loading PyTorch and scikit-learn ...")
        try:
            # Imported late: every stoker command imports this module, and importing PyTorch takes seconds.
            if args.functions:
                from stoker_local._demo import function_run

                config = function_run.FunctionDemoConfig(images=args.images or _DEFAULT_IMAGES, seed=args.seed)
                return function_run.run(config, screen)
            from stoker_local._demo.run import run

            return run(args.epochs or _DEFAULT_EPOCHS, args.seed, args.workers, screen)
        except ModuleNotFoundError as error:
            raise MissingExtraError(f"the demo needs {error.name}; pip install 'stoker[local]'") from error


command = Command(
    name="demo",
    help="train on digits from a local bucket with and without stoker, or watch functions pack arriving images",
    configure=_configure,
    run=_run,
)
