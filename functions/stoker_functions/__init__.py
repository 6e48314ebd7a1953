"""Code that runs in stateless functions: handlers for any platform, and adapters to AWS Lambda and Google Cloud.

The handlers are the names of :mod:`stoker_functions.aws` and :mod:`stoker_functions.gcp`; :mod:`stoker_functions.serve`
answers requests for data sets in any program.
"""

from typing import TYPE_CHECKING, Any

from stoker._base.plugins import load_name
from stoker._deprecation import declare_renamed

__all__ = ["Runner", "parse_answer"]

_NAMES_OF = {"stoker_functions._executors.worker": "Runner parse_answer"}

declare_renamed(__name__, {"answer_of": "parse_answer"})

if TYPE_CHECKING:
    from stoker_functions._executors.worker import Runner, parse_answer
else:

    def __getattr__(name: str) -> Any:
        return load_name(__name__, name, _NAMES_OF)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
