"""The papers' experiments, run again: each is a name that ``stoker simulate`` knows."""

from __future__ import annotations

from importlib import import_module

from stoker.errors import ConfigError
from stoker_sim._experiments.outcome import Experiment

__all__ = ["NAMES", "load"]

_PLACES = {
    "deli-table-1": "deli_figures",
    "deli-table-2": "deli_costs",
    "deli-figure-3": "deli_figures",
    "deli-figure-4": "deli_figures",
    "deli-figure-5": "deli_figures",
    "deli-figure-6": "deli_figures",
    "deli-figure-7": "deli_figures",
    "deli-figure-8": "deli_figures",
    "deli-figure-9": "deli_figures",
    "ours": "ours",
    "caching": "ours",
    "ddp": "ours",
    "scale": "ours",
    "ipdl": "ipdl",
    "diesel-reads": "diesel",
    "diesel-start-up": "diesel",
    "silod": "silod",
    "silod-estimator": "silod",
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
