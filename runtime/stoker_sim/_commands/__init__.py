"""The commands ``stoker plan``, ``stoker simulate`` and ``stoker allocate``."""

from stoker.cli import Command

plan_command = Command.of_module(
    "stoker_sim._commands.plan",
    name="plan",
    help="predict the stalls and costs of a training, and suggest settings",
)
allocate_command = Command.of_module(
    "stoker_sim._commands.allocate", name="allocate", help="divide cache and bandwidth among jobs"
)
simulate_command = Command.of_module(
    "stoker_sim._commands.simulate",
    name="simulate",
    help="run the papers' experiments, or your own scenario, in virtual time",
)
