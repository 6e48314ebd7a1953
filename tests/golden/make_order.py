"""Compute the golden orders from raw Philox words, in plain Python, sharing no code with stoker.

Written from the docstrings of ``order.py``, ``feistel.py`` and ``philox.py`` and from the papers they name; it imports
neither stoker nor numpy. ``python tests/golden/make_order.py`` rewrites ``order.json``, ``unit_order.json`` and
``sticky_order.json``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TypedDict

WORD = (1 << 64) - 1
SUPER_SAMPLES, ROWS, BLOCK, FULL, HOME = 1, 2, 3, 4, 7


class Case(TypedDict):
    """One golden order: what it depends on, and the samples by their number in the packed order."""

    samples: list[int]
    shuffle: str
    window: int
    lanes: int
    seed: int
    epoch: int
    ids: list[int]


class UnitCase(TypedDict):
    """One golden order of units: sizes of the bodies and of a unit, in bytes, and the case of the units."""

    super_samples: list[int]
    body_bytes: list[int]
    unit_bytes: int
    case: Case


class StickyCase(TypedDict):
    """One golden order with sticky lanes."""

    sticky: float
    case: Case


def philox4x64(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the Philox4x64-10 block of ``counter`` and ``key`` (Salmon et al., SC'11, section 3.3 and table 2)."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        first, second = a * 0xD2E7470EE14C6C93, c * 0xCA5A826395121157
        a, b, c, d = (second >> 64) ^ b ^ k0, second & WORD, (first >> 64) ^ d ^ k1, first & WORD
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & WORD, (k1 + 0xBB67AE8584CAA73B) & WORD
    return a, b, c, d


def words(count: int, seed: int, purpose: int, epoch: int, index: int = 0, part: int = 0) -> list[int]:
    drawn: list[int] = []
    while len(drawn) < count:
        drawn.extend(philox4x64((len(drawn) // 4 + 1, epoch, index, part), (seed, purpose)))
    return drawn[:count]


def permutation(count: int, seed: int, purpose: int, epoch: int, index: int = 0, part: int = 0) -> list[int]:
    drawn = words(count, seed, purpose, epoch, index, part)
    return sorted(range(count), key=lambda i: (drawn[i], i))


def mix(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & WORD
    value = (value ^ value >> 27) * 0x94D049BB133111EB & WORD
    return value ^ value >> 31


def full_order(total: int, seed: int, epoch: int) -> list[int]:
    half = 1
    while 4**half < total:
        half += 1
    keys = words(12, seed, FULL, epoch)

    def network(value: int) -> int:
        left, right = value >> half, value % (1 << half)
        for key in keys:
            left, right = right, left ^ mix(right ^ key) % (1 << half)
        return left << half | right

    ids = []
    for position in range(total):
        value = network(position)
        while value >= total:
            value = network(value)
        ids.append(value)
    return ids


Piece = list[tuple[int, int]]  # (super-sample, row) of every sample


def cut_into_lanes(samples: list[int], sequence: list[int], lanes: int) -> list[list[Piece]]:
    """Return each lane's pieces."""
    line = [(number, row) for number in sequence for row in range(samples[number])]
    shortest, longer = divmod(len(line), lanes)
    cut: list[list[Piece]] = []
    begin = 0
    for lane in range(lanes):
        end = begin + shortest + (lane < longer)
        pieces: dict[int, Piece] = {}
        for number, row in line[begin:end]:
            pieces.setdefault(number, []).append((number, row))
        cut.append(list(pieces.values()))
        begin = end
    return cut


def blocks_of(pieces: list[Piece], shuffle: str, window: int, seed: int, epoch: int) -> list[Piece]:
    """Return the blocks of a lane before each is permuted."""
    if shuffle == "none":
        return pieces
    if shuffle == "block":
        return [list(chain(*pieces[i : i + window])) for i in range(0, len(pieces), window)]
    parts = max(1, min(window, len(pieces) // 2))
    blocks: list[Piece] = [[] for _ in range(len(pieces) + parts - 1)]
    for i, piece in enumerate(pieces):
        number, first_row = piece[0]
        n = len(piece)
        drawn = permutation(n, seed, ROWS, epoch, number, first_row) if parts > 1 else range(n)
        for g in range(parts):
            blocks[i + g] += [piece[k] for k in list(drawn)[g * n // parts : (g + 1) * n // parts]]
    return blocks


def home_lanes(samples: list[int], lanes: int, seed: int, epoch: int, sticky: float) -> list[int]:
    """Return the home lane of each super-sample, as ``sticky.py`` says."""
    million, count = 1_000_000, len(samples)
    moved = round(million * (1 - sticky))
    groups = -(-million // moved)
    slots = permutation(count, seed, HOME, 0)
    for j in range(groups):
        mine = list(range(j, count, groups))
        members = [slots[slot] for slot in mine]
        d = (epoch * moved * groups + million * j) // (million * groups)
        for slot, k in zip(mine, permutation(len(mine), seed, HOME, d, j + 1), strict=True):
            slots[slot] = members[k]
    shortest, longer = divmod(sum(samples), lanes)
    cuts = [lane * shortest + min(lane, longer) for lane in range(lanes)]
    homes, begin = [0] * count, 0
    for number in slots:
        homes[number] = sum(cut <= begin for cut in cuts)
        begin += samples[number]
    return homes


def order(
    samples: list[int], shuffle: str, window: int, lanes: int, seed: int, epoch: int, sticky: float = 0.0
) -> list[int]:
    """Return the epoch's samples in order, each by its number in the packed order."""
    total = sum(samples)
    if shuffle == "full":
        return full_order(total, seed, epoch)
    count = len(samples)
    sequence = list(range(count)) if shuffle == "none" else permutation(count, seed, SUPER_SAMPLES, epoch)
    if sticky:
        homes = home_lanes(samples, lanes, seed, epoch, sticky)
        sequence = [number for lane in range(lanes + 1) for number in sequence if homes[number] == lane]
    delivered: list[list[int]] = []
    for lane, pieces in enumerate(cut_into_lanes(samples, sequence, lanes)):
        ids: list[int] = []
        for index, block in enumerate(blocks_of(pieces, shuffle, window, seed, epoch)):
            drawn = range(len(block)) if shuffle == "none" else permutation(len(block), seed, BLOCK, epoch, index, lane)
            ids += [sum(samples[: block[k][0]]) + block[k][1] for k in drawn]
        delivered.append(ids)
    return [delivered[p % lanes][p // lanes] for p in range(total)]


def unit_samples(super_samples: list[int], body_bytes: list[int], unit_bytes: int) -> list[int]:
    """Return the number of samples in each unit: the order of units is that of super-samples of these sizes."""
    units: list[int] = []
    for samples, size in zip(super_samples, body_bytes, strict=True):
        rows = max(1, unit_bytes * samples // size) if size else samples
        units += [min(rows, samples - first) for first in range(0, samples, max(1, rows))]
    return units


SIZES = {
    "one": [1],
    "single": [40],
    "equal": [16] * 12,
    "uneven": [1, 30, 2, 17, 9, 9, 1, 1, 25, 3, 40, 8],
}
SHUFFLES = [
    ("none", 1),
    ("block", 1),
    ("block", 3),
    ("block", 50),
    *(("window", w) for w in (1, 2, 3, 8, 50)),
    ("full", 1),
]


def cases() -> list[Case]:
    """Return every golden order."""
    made: list[Case] = []
    for samples in SIZES.values():
        for shuffle, window in SHUFFLES:
            for lanes in (1,) if shuffle == "full" else (1, 3, 8):
                for seed, epoch in ((7, 0), ((1 << 64) - 1, 3)):
                    ids = order(samples, shuffle, window, lanes, seed, epoch)
                    made.append(
                        Case(
                            samples=samples,
                            shuffle=shuffle,
                            window=window,
                            lanes=lanes,
                            seed=seed,
                            epoch=epoch,
                            ids=ids,
                        )
                    )
    return made


UNIT_SIZES = {
    "equal": ([16] * 12, [1600] * 12, 400),
    "uneven": ([1, 30, 2, 17, 9, 1, 25, 40], [999, 30_000, 7, 17_001, 1, 0, 25_000, 4_294_963_200], 5000),
    "large": ([65_536, 3], [4_294_967_295, 4_294_967_295], 1 << 23),
}


def unit_cases() -> list[UnitCase]:
    """Return every golden order of units."""
    made: list[UnitCase] = []
    for super_samples, body_bytes, unit_bytes in UNIT_SIZES.values():
        samples = unit_samples(super_samples, body_bytes, unit_bytes)
        for window, lanes, seed, epoch in ((3, 1, 7, 0), (256, 1, 7, 0), (5, 3, (1 << 64) - 1, 3)):
            ids = order(samples, "window", window, lanes, seed, epoch)[:500]
            case = Case(samples=samples, shuffle="window", window=window, lanes=lanes, seed=seed, epoch=epoch, ids=ids)
            made.append(UnitCase(super_samples=super_samples, body_bytes=body_bytes, unit_bytes=unit_bytes, case=case))
    return made


def sticky_cases() -> list[StickyCase]:
    """Return every golden order with sticky lanes."""
    made: list[StickyCase] = []
    sizes = [*SIZES.values(), [5 + number % 3 for number in range(60)]]
    for samples in sizes:
        for shuffle, window, lanes, seed, sticky in (
            ("window", 3, 3, 7, 0.9),
            ("window", 2, 8, (1 << 64) - 1, 0.5),
            ("block", 3, 4, 7, 0.65),
            ("window", 8, 2, 7, 0.99),
        ):
            for epoch in (0, 1, 7):
                ids = order(samples, shuffle, window, lanes, seed, epoch, sticky)
                case = Case(
                    samples=samples, shuffle=shuffle, window=window, lanes=lanes, seed=seed, epoch=epoch, ids=ids
                )
                made.append(StickyCase(sticky=sticky, case=case))
    return made


def text(golden: Sequence[Case | UnitCase | StickyCase]) -> str:
    """Return a golden file, one case a line."""
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in golden)
    return f"[\n{lines}\n]\n"


if __name__ == "__main__":
    Path(__file__).with_name("order.json").write_text(text(cases()))
    Path(__file__).with_name("unit_order.json").write_text(text(unit_cases()))
    Path(__file__).with_name("sticky_order.json").write_text(text(sticky_cases()))
