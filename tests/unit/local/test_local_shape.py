import random
import socket
import statistics
import sys

import pytest

from stoker_local import PROFILES, NetworkShape
from stoker_local._network import SO_MAX_PACING_RATE, Pacer, Shaper


def _clock_after(pacer: Pacer, sizes: list[int], lateness: random.Random | None = None) -> float:
    now = 0.0
    for size in sizes:
        wait = pacer.reserve(size, now)
        if wait:
            now += wait + (lateness.random() * 0.002 if lateness else 0.0)
    return now


def test_a_pacer_never_exceeds_its_rate_and_burst() -> None:
    elapsed = _clock_after(Pacer(1e6, burst_seconds=0.005), [10_000] * 200)
    assert elapsed == pytest.approx(2.0 - 0.005)


def test_late_timers_do_not_lower_the_rate() -> None:
    elapsed = _clock_after(Pacer(1e6, burst_seconds=0.005), [10_000] * 200, random.Random(1))
    assert 1.994 < elapsed < 2.01


def test_idle_time_is_not_saved_beyond_the_burst() -> None:
    pacer = Pacer(1000.0, burst_seconds=0.5)
    pacer.reserve(1000, 0.0)
    assert pacer.reserve(1000, 100.0) == pytest.approx(0.5)


def test_connections_share_the_total_rate_and_each_keeps_its_own() -> None:
    shaper = Shaper(NetworkShape(connection_bytes_per_second=1e6, total_bytes_per_second=2e6, software_pacing=True))
    with socket.socket() as one, socket.socket() as other:
        first, second = shaper.create_pacers(one), shaper.create_pacers(other)
    assert first[0] is second[0]
    assert first[1] is not second[1]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux paces sockets")
def test_linux_paces_a_connection_in_the_kernel() -> None:
    with socket.socket() as connection:
        assert Shaper(NetworkShape(connection_bytes_per_second=90e6)).create_pacers(connection) == ()
        assert connection.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) == 90_000_000


def test_delays_repeat_with_their_seed_and_have_the_median_that_is_asked() -> None:
    shape = NetworkShape(first_byte_seconds=0.02, first_byte_sigma=0.5, seed=3)
    one, other = ([shaper.first_byte_delay() for _ in range(2001)] for shaper in (Shaper(shape), Shaper(shape)))
    assert one == other
    assert statistics.median(one) == pytest.approx(0.02, rel=0.1)
    assert len(set(one)) > 1000


def test_without_sigma_the_delay_is_constant() -> None:
    shaper = Shaper(NetworkShape(first_byte_seconds=0.02))
    assert {shaper.first_byte_delay() for _ in range(10)} == {0.02}


def test_the_tail_hits_the_fraction_that_is_asked() -> None:
    shaper = Shaper(PROFILES["cloud-tail"])
    hits = [shaper.tail_delay() for _ in range(4000)]
    assert set(hits) == {0.0, 2.0}
    assert hits.count(2.0) == pytest.approx(200, rel=0.3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"first_byte_seconds": -1.0},
        {"first_byte_seconds": float("inf")},
        {"first_byte_sigma": float("nan")},
        {"tail_fraction": 1.5},
        {"connection_bytes_per_second": 0.0},
        {"total_bytes_per_second": float("nan")},
    ],
)
def test_an_impossible_shape_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
        NetworkShape(**wrong)  # type: ignore[arg-type]  # the keyword is a parameter of the test


def test_gets_that_come_too_fast_are_refused_or_wait() -> None:
    refusing = Shaper(NetworkShape(gets_per_second=10, gets_burst=3))
    assert [refusing.rate_limit_delay(now) for now in (0.0, 0.0, 0.0, 0.0, 0.05, 0.11, 0.11)] == [
        0,
        0,
        0,
        None,
        None,
        0,
        None,
    ]
    waiting = Shaper(NetworkShape(gets_per_second=10, gets_burst=2, gets_wait=True))
    assert [waiting.rate_limit_delay(0.0) for _ in range(4)] == pytest.approx([0.0, 0.0, 0.1, 0.2])
    assert Shaper(NetworkShape()).rate_limit_delay(0.0) == 0.0
    with pytest.raises(ValueError, match=r"gets_per_second must be .*, not -1"):
        NetworkShape(gets_per_second=-1)
