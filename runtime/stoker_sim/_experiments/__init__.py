"""The papers' experiments, run again: each is a name that ``stoker simulate`` knows."""

from __future__ import annotations

from importlib import import_module

from stoker.errors import ConfigError
from stoker_sim._experiments.outcome import Experiment

__all__ = ["NAMES", "load"]

_PLACES = {
    "deli-table-1": "deli_figures",
    "deli-table-2": "deli_costs",
    **{f"deli-figure-{number}": "deli_figures" for number in range(3, 10)},
    **dict.fromkeys(("ours", "caching", "ddp", "scale"), "ours"),
    "ipdl": "ipdl",
    **dict.fromkeys(("diesel-reads", "diesel-start-up"), "diesel"),
    **dict.fromkeys(("silod", "silod-estimator"), "silod"),
    "infinicache": "infinicache",
    "warm-tier": "warm_tier",
}
"""Experiment → module of this folder that has it in its ``EXPERIMENTS``."""

NAMES = tuple(_PLACES)
"""All experiments, in the order in which they are shown."""


def load(name: str) -> Experiment:
    """Return an experiment.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in _PLACES:
        raise ConfigError(f"there is no experiment {name!r}; there are {', '.join(NAMES)}")
    module = import_module(f"{__name__}.{_PLACES[name]}")
    experiments: tuple[Experiment, ...] = module.EXPERIMENTS
    return next(each for each in experiments if each.name == name)
