"""What ``stoker cost`` can be told, by flags or in a TOML file: one table of figures."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from stoker._base.fields import read_toml, shown
from stoker._base.operations import Egress
from stoker.cli.flags import number_from, positive, size
from stoker.errors import ConfigError

__all__ = ["add_figures", "figures"]


_number = number_from(0.0, 1e15)
"""Reads any figure that is no size, no share and no count of what there is one of at least."""


def _share(text: str) -> float:
    number = _number(text)
    if number >= 1:
        raise ArgumentTypeError(f"{text!r} is not a share from 0 to less than 1")
    return number


def _egress(text: str) -> str:
    if text not in get_args(Egress):
        raise ArgumentTypeError(f"{text!r} is not one of {', '.join(get_args(Egress))}")
    return text


@dataclass(frozen=True, slots=True)
class _Figure:
    """A flag, ``--a-name``, and a key of the file, ``a_name``; without ``read`` it is a switch."""

    name: str
    read: Callable[[str], Any] | None
    metavar: str
    help: str

    @property
    def flags(self) -> tuple[str, ...]:
        flag = f"--{self.name.replace('_', '-')}"
        return (flag, "--accelerator") if self.name == "machine" else (flag,)


_GROUPS: dict[str, tuple[_Figure, ...]] = {
    "the data set (read from its manifest where there is a URL)": (
        _Figure("epochs", positive, "N", "epochs that read it (default: 1)"),
        _Figure("hit_rate", _share, "SHARE", "of look-ups behind the first epoch that a cache answers (default: 0)"),
        _Figure("packing", None, "", "count the writes that make it, too"),
    ),
    "the bucket": (
        _Figure(
            "store",
            str,
            "NAME",
            "s3, s3express, gs, gsrapid, r2, minio or another of the price file (default: the URL's, else s3)",
        ),
        _Figure("egress", _egress, "WHERE", "of the reader: same_region (the default), other_region or internet"),
        _Figure("size", size, "SIZE", "at rest (default: the data set's)"),
        _Figure("months", _number, "N", "for which data and disks are kept (default: 1)"),
        _Figure("gets", _number, "N", "GET requests, beside the data set's"),
        _Figure("puts", _number, "N", "PUT requests, beside the data set's"),
        _Figure("lists", _number, "N", "pages of listings"),
        _Figure("read", size, "SIZE", "read, beside the data set's"),
        _Figure("written", size, "SIZE", "written, beside the data set's"),
    ),
    "the machines": (
        _Figure("machine", str, "NAME", "with the accelerator: g6.xlarge, p5.48xlarge, cloud-run-l4, …"),
        _Figure("nodes", positive, "N", "machines that share each epoch, a rank an accelerator (default: 1)"),
        _Figure("accelerators", positive, "N", "of each machine that the job has (default: all)"),
        _Figure("compute_hours", _number, "H", "that each machine computes"),
        _Figure("wait_hours", _number, "H", "that each waits for data"),
        _Figure("stall", _share, "SHARE", "of its hours that each waits, instead of --wait-hours"),
        _Figure("disk", str, "KIND", "of disk in each: gp3, pd-standard, pd-balanced"),
        _Figure("disk_size", size, "SIZE", "of each disk"),
    ),
    "functions": (
        _Figure("function", str, "PLATFORM", "lambda (the default), lambda-arm or cloud-run"),
        _Figure("calls", _number, "N", "calls"),
        _Figure("call_seconds", _number, "S", "that each runs"),
        _Figure("function_memory", size, "SIZE", "of a function (default: 1769MiB)"),
        _Figure("function_vcpus", _number, "N", "of a function, where they are billed apart (default: 1)"),
        _Figure("function_tmp", size, "SIZE", "of /tmp of a function; Lambda gives 512 MB for nothing (default: that)"),
        _Figure("cold_starts", _number, "N", "of the calls, how many start an instance"),
        _Figure("init_seconds", _number, "S", "that a start takes"),
    ),
    "a warm tier (on the same platform)": (
        _Figure("warm_functions", positive, "N", "functions that keep data in memory"),
        _Figure("warm_hours", _number, "H", "for so long"),
        _Figure("warm_memory", size, "SIZE", "of each (default: 1536MiB)"),
        _Figure("served", size, "SIZE", "that they serve, at 75 MB/s each"),
        _Figure("serve_calls", _number, "N", "calls that serve it"),
        _Figure(
            "back_up_every", number_from(0.001, 1e15), "S", "seconds between back-ups of each (default: none are made)"
        ),
        _Figure("back_up_seconds", _number, "S", "that a back-up takes"),
    ),
}
_BUCKET = ("URL", "size", "gets", "puts", "lists", "read", "written")
_NEEDS: dict[str, tuple[str, ...]] = {
    "accelerators": ("machine",),
    "back_up_every": ("warm_functions",),
    "back_up_seconds": ("back_up_every",),
    "call_seconds": ("calls",),
    "cold_starts": ("calls",),
    "compute_hours": ("machine",),
    "disk": ("disk_size",),
    "disk_size": ("disk",),
    "egress": _BUCKET,
    "epochs": ("URL",),
    "function": ("calls", "warm_functions"),
    "function_memory": ("calls",),
    "function_tmp": ("calls",),
    "function_vcpus": ("calls", "warm_functions"),
    "hit_rate": ("URL",),
    "init_seconds": ("cold_starts",),
    "machine": ("compute_hours", "wait_hours"),
    "months": ("URL", "size", "disk_size"),
    "nodes": ("URL", "machine", "disk"),
    "packing": ("URL",),
    "serve_calls": ("served",),
    "served": ("warm_functions",),
    "stall": ("compute_hours",),
    "store": _BUCKET,
    "wait_hours": ("machine",),
    "warm_functions": ("warm_hours",),
    "warm_hours": ("warm_functions",),
    "warm_memory": ("warm_functions",),
}
"""Figure → others, one of which it means nothing without."""
_FIGURES = {figure.name: figure for group in _GROUPS.values() for figure in group}


def add_figures(parser: ArgumentParser) -> None:
    """Add a flag for each figure, and the file."""
    where = "TOML file with any of these figures, its keys named as the flags are, with underscores; flags come first"
    parser.add_argument("--figures", type=Path, metavar="FILE", help=where)
    for title, group in _GROUPS.items():
        section = parser.add_argument_group(title)
        for figure in group:
            how: dict[str, Any] = {"type": figure.read, "metavar": figure.metavar}
            if figure.read is None:
                how = {"action": "store_true", "default": None}
            section.add_argument(*figure.flags, dest=figure.name, help=figure.help, **how)


def figures(args: Namespace, *, has_dataset: bool) -> dict[str, Any]:
    """Return the figures that are given, by name; flags go before the file.

    Raises:
        ConfigError: the file cannot be read, or has what is no figure; or a figure means nothing without another one.
    """
    flags = {name: value for name in _FIGURES if (value := getattr(args, name)) is not None}
    given = (_of_file(args.figures) if args.figures else {}) | flags
    there = given.keys() | ({"URL"} if has_dataset else set())
    for name in given:
        needed = _NEEDS.get(name, ())
        if needed and not there & set(needed):
            raise ConfigError(f"{name} means nothing without {' or '.join(needed)}")
    if {"stall", "wait_hours"} <= given.keys():
        raise ConfigError("stall and wait_hours say the same; give one of them")
    return given


def _of_file(path: Path) -> dict[str, Any]:
    found = {}
    for name, value in read_toml(path).items():
        figure = _FIGURES.get(name)
        if figure is None:
            raise ConfigError(f"{path} has {shown(name)}, which is no figure; there are {', '.join(_FIGURES)}")
        if figure.read is None:
            if not isinstance(value, bool):
                raise ConfigError(f"{path}: {name} is true or false, not {shown(value)}")
            found[name] = value
            continue
        try:
            found[name] = figure.read(str(value))
        except (ArgumentTypeError, ValueError) as error:  # ValueError: it is an integer of thousands of digits
            raise ConfigError(f"{path}: {name}: {error}") from None
    return found
