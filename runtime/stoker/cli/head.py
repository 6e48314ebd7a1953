"""``stoker head``: the first samples of a data set, as they were packed."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from itertools import islice

from stoker._dataset import Dataset
from stoker.cli.flags import add_dataset, positive, store_options
from stoker.cli.output import preview, table

__all__ = ["configure", "run"]


def configure(parser: ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_dataset(parser)
    parser.add_argument("-n", type=positive, default=5, metavar="N", help="how many samples (default: 5)")


def run(args: Namespace) -> int:
    """Run the command and return its exit code."""
    with Dataset(args.url, version=args.at, options=store_options(args, args.url)) as dataset:
        for number, sample in enumerate(islice(dataset, args.n)):
            rows = [(name, preview(dataset.schema[name], value)) for name, value in sample.items()]
            print(f"sample {number}\n{table(rows)}")
    return 0
