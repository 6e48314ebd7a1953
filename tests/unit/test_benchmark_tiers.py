"""The benchmark of the places that a loader can read from."""

from __future__ import annotations

import asyncio
import os

import pytest
from benchmarks.tiers import __main__ as program
from benchmarks.tiers.__main__ import Turn, measure, ratio, rows, turn, verdicts
from benchmarks.tiers.place import Objects, Place
from benchmarks.tiers.places import PLACES

TITLES = {"plain": "plain TCP copy", "serve": "stoker tier serve", "tls": "TLS copy", "serve-tls": "with TLS"}


def done(*seconds: float, client_seconds: float = 0.0, server_seconds: float = 0.0) -> Turn:
    """Return a turn of reads of 1 GB."""
    return Turn(seconds=seconds, size_bytes=10**9, client_seconds=client_seconds, server_seconds=server_seconds)


def test_the_median_of_the_ratios_within_rounds_is_reported() -> None:
    turns = {"plain": [done(1.0), done(2.0), done(8.0)], "serve": [done(2.0), done(2.0), done(10.0)]}
    assert ratio(turns, "serve", "plain") == pytest.approx(0.8)


def test_a_row_has_latencies_of_all_reads_and_medians_of_the_rounds() -> None:
    turns = {
        "plain": [done(0.5, 0.5, client_seconds=1.0, server_seconds=0.2)] * 3,
        "serve": [done(each, each, client_seconds=each, server_seconds=0.4) for each in (1.0, 1.0, 2.0)],
    }
    plain, serve = rows({name: TITLES[name] for name in turns}, turns)
    assert plain == ("plain TCP copy", "500.00", "500.00", "2.00", "100%", "0.50", "0.10")
    assert serve == ("stoker tier serve", "1000.00", "2000.00", "1.00", "50%", "0.50", "0.20")


def test_without_a_plain_copy_nothing_is_compared_with_it() -> None:
    turns = {"serve": [done(1.0)]}
    assert rows({"serve": "server"}, turns)[0][4] == ""
    assert verdicts({"serve": "server"}, turns) == []


@pytest.mark.parametrize(("seconds", "verdict"), [(1.6, "62% of a plain TCP copy, at least 60%: met"), (1.7, "missed")])
def test_the_target_is_six_tenths_of_a_plain_copy(seconds: float, verdict: str) -> None:
    turns = {"plain": [done(1.0)], "serve": [done(seconds)], "tls": [done(4.0)], "serve-tls": [done(5.0)]}
    of_plain, of_tls = verdicts(TITLES, turns)
    assert verdict in of_plain
    assert of_tls == "with TLS: 80% of a TLS copy"


def test_a_turn_reads_all_objects_in_turn_after_some_that_do_not_count() -> None:
    read, used = list[int](), [0.0]

    async def noted(number: int, into: memoryview) -> None:
        read.append(number)
        used[0] += 1.0

    place = Place(name="place", read=noted, server_seconds=lambda: used[0], max_reads=5)
    found = asyncio.run(turn(place, Objects(3, 10), 7, memoryview(bytearray(10))))
    assert read == [0, 1, 0, 1, 2, 0, 1]
    assert (len(found.seconds), found.server_seconds) == (5, 5.0)


def test_places_deliver_what_they_were_filled_with_and_give_back_what_they_took() -> None:
    names, cores = ("plain", "tls", "serve", "serve-tls", "memory", "disk"), os.sched_getaffinity(0)
    titles, turns = asyncio.run(measure(names, Objects(3, 100_000), rounds=2, reads=3))
    assert tuple(titles) == tuple(turns) == names
    assert titles["serve"] == "stoker tier serve"
    assert titles["serve-tls"] == "stoker tier serve, TLS"
    for name in names:
        assert [len(each.seconds) for each in turns[name]] == [3, 3]
        assert (turns[name][0].server_seconds > 0) == (name not in ("memory", "disk"))
    assert os.sched_getaffinity(0) == cores


def test_an_unknown_place_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        program.main(["nowhere"])
    assert "there is no place nowhere" in capsys.readouterr().err
    assert set(PLACES) >= {name for names in program.TARGETS for name in names[:2]}
