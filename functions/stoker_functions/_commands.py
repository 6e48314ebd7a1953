"""``stoker shuffle``: found by its entry point, and apart from the job, which functions import, too."""

from stoker.cli import Command

shuffle_command = Command.of_module(
    "stoker_functions._shuffle_job.command",
    name="shuffle",
    help="write the samples of coming epochs in the order of shuffle 'full', for shuffle='materialized'",
)
