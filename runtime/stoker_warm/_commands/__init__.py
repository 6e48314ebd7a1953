"""``stoker warm``."""

from stoker.cli import Command

warm_command = Command.of_module(
    "stoker_warm._commands.warm", name="warm", help="run, inspect, measure and stop a tier in the memory of functions"
)
