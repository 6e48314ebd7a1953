"""Many small cases in one test: as tests of their own they would cost more than what they check."""

from __future__ import annotations

import functools
import inspect
import reprlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

__all__ = ["for_each"]

Test = Callable[..., None]
SHORTENED = reprlib.Repr()
SHORTENED.maxstring = SHORTENED.maxother = 300


def for_each(
    names: str | Sequence[str], cases: Iterable[Any], *, ids: Callable[[Any], str] | Iterable[str] | None = None
) -> Callable[[Test], Test]:
    """Run a test for every case, one after another, with the arguments of ``pytest.mark.parametrize``.

    The first failure ends the test, and a note below it names its case. Cases share the test's fixtures, so it must
    leave these as it found them.

    Args:
        names: the arguments that a case has values for, with commas between them or in a tuple.
        cases: values of the arguments: one for one name, a tuple for several.
        ids: the names of the cases, or what returns one from a value; without it a case is named by its values.
    """
    arguments = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    every = [(case,) if len(arguments) == 1 and isinstance(names, str) else tuple(case) for case in cases]
    assert every, f"there is no case of {names}"
    listed = None if ids is None or callable(ids) else list(ids)

    def name_of(place: int) -> str:
        if listed is not None:
            return listed[place]
        if callable(ids):
            return "-".join(str(ids(value)) for value in every[place])
        return ", ".join(f"{name}={SHORTENED.repr(value)}" for name, value in zip(arguments, every[place], strict=True))

    def decorated(test: Test) -> Test:
        @functools.wraps(test)
        def run_all(**fixtures: Any) -> None:
            __tracebackhide__ = True
            for place, values in enumerate(every):
                try:
                    test(**fixtures, **dict(zip(arguments, values, strict=True)))
                except BaseException as failure:
                    failure.add_note(f"in the case {name_of(place)}")
                    raise

        signature = inspect.signature(test)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in arguments]
        assert len(kept) == len(signature.parameters) - len(arguments), f"{test.__name__} does not take {names}"
        vars(run_all)["__signature__"] = signature.replace(parameters=kept)
        return run_all

    return decorated
