"""The command ``stoker shuffle``, loaded by its entry point; a separate module from the job that functions import."""

from stoker.cli import Command

shuffle_command = Command.of_module(
    "stoker_functions._shuffle_job.command",
    name="shuffle",
    help="write the samples of coming epochs in the order of shuffle 'full', for shuffle='materialized'",
)
