"""The cost of erasure coding, compared with a copy of the same bytes: `python -m benchmarks.erasure`.

Objects of 1, 8 and 32 MiB of random bytes. Encoding writes all parity shards; restoring writes one lost data shard, as
in most reads, which use the first shards to arrive, or as many as there are parity shards. 10+3 uses zfec, the others
NumPy. For comparison, in turn in each round: memcpy of the object, and its CRC-32C. One thread, warm memory; medians of
the rounds, in GB of the object per second, and as a multiple of the time of a copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np

from stoker._base.checksum import crc32c
from stoker_warm._erasure import ErasureCode, encode, restore

SIZES_MIB = (1, 8, 32)
CODES = ("4+2", "10+1", "10+2", "10+3")
ROUNDS = 41


def works(size_bytes: int) -> dict[str, Callable[[], object]]:
    """Return the functions to time, by name; none of them changes the object."""
    data = memoryview(bytearray(np.random.default_rng(0).bytes(size_bytes)))
    copy = memoryview(bytearray(size_bytes))
    source, target = np.frombuffer(data, np.uint8), np.frombuffer(copy, np.uint8)
    found: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(target, source),
        "crc32c": lambda: crc32c(data),
    }
    for code in map(ErasureCode.parse, CODES):
        parity = [memoryview(bytearray(code.shard_bytes(size_bytes))) for _ in range(code.parity)]
        encode(data, code, parity)
        found[f"{code} encode"] = partial(encode, data, code, parity)
        by_position = dict(enumerate(parity, code.data))
        for lost in sorted({1, code.parity}):
            found[f"{code} restore {lost}"] = partial(restore, code, size_bytes, data, by_position, range(lost))
    return found


def measure(size_bytes: int) -> dict[str, float]:
    """Return the seconds of each function, the median of rounds in which they take turns."""
    timed = works(size_bytes)
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(ROUNDS):
        for name, work in timed.items():
            begun = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - begun)
    return {name: median(each[1:]) for name, each in seconds.items()}


def main() -> None:
    measured = {mib: measure(mib << 20) for mib in SIZES_MIB}
    print(f"medians of {ROUNDS - 1} rounds; GB/s, and time in copies of the object\n")
    print("| what | " + " | ".join(f"{mib} MiB | copies" for mib in SIZES_MIB) + " |")
    print("| --- |" + " ---: | ---: |" * len(SIZES_MIB))
    for name in next(iter(measured.values())):
        cells = [
            f"{(mib << 20) / seconds[name] / 1e9:.1f} | {seconds[name] / seconds['memcpy']:.1f}"
            for mib, seconds in measured.items()
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
