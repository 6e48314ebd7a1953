"""``stoker plan``, ``simulate`` and ``allocate``."""

from stoker.cli import Command

plan_command = Command.of_module(
    "stoker_sim._commands.plan",
    name="plan",
    help="predict what a training takes of a data set, and say what to change",
)
allocate_command = Command.of_module(
    "stoker_sim._commands.allocate", name="allocate", help="divide cache and bandwidth among jobs that share them"
)
simulate_command = Command.of_module(
    "stoker_sim._commands.simulate",
    name="simulate",
    help="run the papers' experiments, or a scenario of yours, in virtual time",
)
