"""The process that libFuzzer runs in: ``python -m fuzz.target READER CORPUS -OPTION=VALUE…``."""

from __future__ import annotations

import random
import sys
from importlib import import_module
from typing import Any

__all__ = ["main"]


def main() -> None:
    """Attack the reader that the command line names, and never return."""
    atheris: Any = import_module("atheris")  # not among what the test suite needs
    with atheris.instrument_imports(include=["stoker", "stoker_torch._state"]):
        from support.fuzzed.mutations import resealed
        from support.fuzzed.registry import READERS
    reader = READERS[sys.argv.pop(1)]
    seeds = list(reader.seeds())

    def read(data: bytes) -> None:
        reader.outcome(data)
        if (again := resealed(data)) != data:  # or libFuzzer would have to guess checksums
            reader.outcome(again)

    def mutate(data: bytes, max_bytes: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.5:
            changed: bytes = atheris.Mutate(data, max_bytes)
            return changed
        return reader.mutate(data, [*seeds, data], rng)[:max_bytes]

    atheris.Setup(sys.argv, read, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
