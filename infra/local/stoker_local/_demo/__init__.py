"""``stoker demo``: one model, one bucket, two ways to read it; or raw images, and functions that pack them."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace

from stoker.cli import Command
from stoker.cli.flags import positive
from stoker.errors import ConfigError, MissingExtraError
from stoker_local._demo.screen import Screen

_EPOCHS = 8
_IMAGES = 2500


def _configure(parser: ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=7, metavar="N", help="of all that is random (default: 7)")
    training = parser.add_argument_group("two trainings, with and without stoker")
    training.add_argument("--epochs", type=positive, metavar="N", help=f"of both trainings (default: {_EPOCHS})")
    training.add_argument(
        "--workers", type=positive, metavar="N", help="of the plain DataLoader (default: try a few, take the best)"
    )
    functions = parser.add_argument_group("functions that pack what arrives, and die while they do")
    functions.add_argument("--functions", action="store_true", help="show these instead")
    functions.add_argument("--images", type=positive, metavar="N", help=f"that arrive (default: {_IMAGES:,})")


def _check(args: Namespace) -> None:
    """Raise ConfigError for options that do not go together."""
    if args.functions and (args.epochs is not None or args.workers is not None):
        raise ConfigError("--epochs and --workers are of the trainings; they cannot go with --functions")
    if args.images is not None and not args.functions:
        raise ConfigError("--images goes with --functions only")
    if args.seed < 0:
        raise ConfigError(f"--seed {args.seed} is negative")


def _run(args: Namespace) -> int:
    """Run one of the demos.

    Raises:
        ConfigError: options do not go together.
        MissingExtraError: what the demo needs is not installed.
    """
    _check(args)
    with Screen(sys.stdout) as screen:
        if args.functions:
            screen.line("Raw images become training data, in functions that may die at any moment.")
        else:
            screen.line("A model learns handwritten digits from a bucket, twice.")
        screen.draw("loading PyTorch and scikit-learn ...")
        try:
            # Imported only here: every command of stoker loads this module, and PyTorch takes seconds.
            if args.functions:
                from stoker_local._demo import function_run

                config = function_run.FunctionDemoConfig(images=args.images or _IMAGES, seed=args.seed)
                return function_run.run(config, screen)
            from stoker_local._demo.run import run

            return run(args.epochs or _EPOCHS, args.seed, args.workers, screen)
        except ModuleNotFoundError as error:
            raise MissingExtraError(f"the demo needs {error.name}; pip install 'stoker[local]'") from error


command = Command(
    name="demo",
    help="train on digits from a local bucket with and without stoker; or watch functions pack what arrives",
    configure=_configure,
    run=_run,
)
