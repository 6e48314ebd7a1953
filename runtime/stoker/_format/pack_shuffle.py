"""Which runs of a manifest are parts of one uniform permutation of a pack's samples."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from stoker.errors import FormatError

_PACK_ID = re.compile(r"[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True, slots=True)
class PackShuffle:
    """The uniform permutation of all samples of one pack, of which runs are consecutive parts.

    Attributes:
        seed: seed of the permutation, 0 to 2**64 - 1.
        pack: id of the pack: of its run or, if functions packed it, of its job; 16 hexadecimal digits.
    """

    seed: int
    pack: str


def encode_shuffles(runs: Sequence[str], shuffles: Mapping[str, PackShuffle]) -> str:
    """Return the permutations as JSON: seed, pack, and half-open interval of ``runs`` of each.

    Args:
        runs: ids of a manifest's runs, in order.
        shuffles: run → permutation.
    """
    intervals: list[list[int | str]] = []
    for shuffle, group in groupby(enumerate(runs), key=lambda item: shuffles.get(item[1])):
        numbers = [number for number, _ in group]
        if shuffle is not None:
            intervals.append([shuffle.seed, shuffle.pack, numbers[0], numbers[-1] + 1])
    return json.dumps(intervals, separators=(",", ":"))


def parse_shuffles(text: str, runs: Sequence[str]) -> dict[str, PackShuffle]:
    """Return run → permutation from the result of :func:`encode_shuffles`.

    Raises:
        FormatError: the text is something else.
    """
    shuffles: dict[str, PackShuffle] = {}
    try:
        intervals = json.loads(text)
        if not isinstance(intervals, list):
            raise TypeError
        for seed, pack, first, end in intervals:
            shuffle = parse_shuffle([seed, pack])
            if not (type(first) is type(end) is int and 0 <= first < end <= len(runs)):
                raise TypeError
            shuffles |= dict.fromkeys(runs[first:end], shuffle)
    except (ValueError, TypeError, RecursionError):
        raise FormatError(f"the manifest's 'shuffles' is not a list of permutations: {text[:80]!r}") from None
    return shuffles


def parse_shuffle(value: object) -> PackShuffle:
    """Return the permutation in ``[seed, pack]``, from JSON.

    Raises:
        TypeError: the value is something else.
    """
    match value:
        case [int(seed), str(pack)] if type(seed) is int and 0 <= seed < 1 << 64 and _PACK_ID.fullmatch(pack):
            return PackShuffle(seed, pack)
    raise TypeError(f"{value!r:.80} is not a permutation")
