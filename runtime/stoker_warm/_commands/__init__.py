"""``stoker warm``."""

from stoker.cli import Command

warm_command = Command.of_module(
    "stoker_warm._commands.warm",
    name="warm",
    help="keep super-samples in the memory of functions: run, watch, stop it",
)
