"""Scenarios in files: the examples run, and what is wrong is named."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from stoker import FetchSize, NextBatch, Prices, open_store
from stoker._diagnostics.latency import Constant, LateTail, LogNormal, RecordedLatency
from stoker.errors import ConfigError
from stoker_sim._bucket import read_durations
from stoker_sim._commands.simulate import scenario_outcome
from stoker_sim._scenario import simulate
from stoker_sim._scenario_file import read_scenario
from support.packing import numbered_samples, pack

EXAMPLES = sorted((Path(__file__).parents[2] / "examples/scenarios").glob("*.toml"))
LEAST = """
[dataset]
super_samples = 20
samples = 10
super_sample_bytes = "1MiB"
[node]
batch_size = 10
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "scenario.toml"
    path.write_text(text)
    return path


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_its_table_adds_up(path: Path) -> None:
    file = read_scenario(path)
    run = simulate(file.scenario)
    found = scenario_outcome(path.stem, file.scenario, run, prices=Prices.load(), url=file.url)
    (table,) = found.tables
    columns = dict(zip(table.columns, zip(*table.rows, strict=True), strict=True))
    assert columns["epoch"] == (*range(file.scenario.epochs), "all")
    for name in ("look-ups", "misses", "requests", "hedges", *(each for each in columns if each.startswith("from "))):
        assert sum(columns[name][:-1]) == columns[name][-1]
    assert columns["request dollars"][-1] == pytest.approx(columns["requests"][-1] * 4e-7)
    for least, mean, most in zip(*(columns[f"wait s, {each}"] for each in ("least", "mean", "most")), strict=True):
        assert least <= mean <= most


def test_what_is_left_out_has_the_defaults(tmp_path: Path) -> None:
    scenario = read_scenario(written(tmp_path, LEAST)).scenario
    assert (scenario.epochs, scenario.seed, scenario.in_step, scenario.feed.world_size) == (1, 0, False, 1)
    assert scenario.bucket.first_byte == LogNormal(0.02, 0.08)
    assert scenario.compute == Constant(0.0)
    assert scenario.caches == []


def test_given_figures_are_used(tmp_path: Path) -> None:
    (tmp_path / "seconds.json").write_text("[0.1, 0.2]")
    text = """
        nodes = 4
        epochs = 2
        [order]
        shuffle = "block"
        window = 2
        [bucket]
        connection_bytes_per_second = "40MB"
        requests_per_second = 50
        first_byte = { recorded = "seconds.json", late_fraction = 0.1, late_seconds = 2 }
    """
    node = """
        schedule = { kind = "fetch-size", fetch_size = 4, threshold = 2 }
        fetch = { hedge = false, attempts = 3, start_concurrency = 20 }
        [[node.caches]]
        kind = "memory"
        limit_bytes = "4MiB"
        [[node.caches]]
        limit_bytes = "8MiB"
        policy = "lru"
        [[node.caches]]
        name = "far"
        limit_bytes = "8MiB"
        policy = "replica-aware"
    """
    scenario = read_scenario(written(tmp_path, text + LEAST + node)).scenario
    assert scenario.bucket.first_byte == LateTail(RecordedLatency((0.1, 0.2)), 0.1, 2.0)
    assert scenario.bucket.connection_bytes_per_second == 40e6
    assert (scenario.feed.order.shuffle, scenario.feed.order.lanes, scenario.feed.end_epoch) == ("block", 4, 2)
    assert scenario.feed.schedule == FetchSize(4, 2)
    assert (scenario.feed.fetch.hedge, scenario.feed.fetch.attempts) == (False, 3)
    assert scenario.feed.fetch.start_concurrency == 20
    assert [(each.name, each.limit_bytes, each.policy) for each in scenario.caches] == [
        ("memory", 4 << 20, "next-use"),
        ("disk", 8 << 20, "lru"),
        ("far", 8 << 20, "replica-aware"),
    ]


def test_next_batch_is_a_schedule(tmp_path: Path) -> None:
    scenario = read_scenario(written(tmp_path, LEAST + 'schedule = { kind = "next-batch" }')).scenario
    assert scenario.feed.schedule == NextBatch(1)


def test_a_packed_data_set_is_named_by_its_url_and_simulated_without_its_bytes(tmp_path: Path) -> None:
    async def packed() -> int:
        store = open_store(tmp_path / "bucket")
        try:
            return len(await pack(store, numbered_samples(500), super_sample_bytes=2000))
        finally:
            await store.close()

    super_samples = asyncio.run(packed())
    text = f'[dataset]\nurl = "{tmp_path}/bucket"\n[node]\nbatch_size = 50\n'
    file = read_scenario(written(tmp_path, text))
    assert file.url == f"{tmp_path}/bucket"
    assert sum(each.lookups for each in simulate(file.scenario).epochs) == super_samples > 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("epochs = 0", "epochs is 0, not an integer of at least 1"),
        ("nodes = true", "nodes is True, not an integer"),
        ('in_step = "yes"', "in_step is 'yes', not true or false"),
        ("speed = 3", "speed has no effect here"),
        ("bucket = 3", r"bucket is 3, not a table, \[bucket\]"),
        ("bucket.rate = 3", "bucket.rate has no effect here"),
        ("bucket.error_fraction = 2", "bucket: error_fraction must be at least 0 and less than 1"),
        ("bucket.connection_bytes_per_second = '3 apples'", "bucket.connection_bytes_per_second: '3 apples' is not"),
        ("bucket.first_byte.seconds = -1", "bucket.first_byte.seconds is -1, not a number from 0 to 10"),
        ("bucket.first_byte.seconds = nan", "bucket.first_byte.seconds is nan"),
        ("bucket.first_byte.median_seconds = 1", "bucket.first_byte.p99_seconds is missing"),
        ("bucket.first_byte = { median_seconds = 2, p99_seconds = 1 }", "bucket.first_byte.p99_seconds is 1.0"),
        (
            "bucket.first_byte = { seconds = 1, late_fraction = 2, late_seconds = 1 }",
            "first_byte.late_fraction is 2, not a number from 0 to 1",
        ),
        (
            "bucket.first_byte = { seconds = 1, median_seconds = 2 }",
            "bucket.first_byte.median_seconds has no effect here",
        ),
        ("bucket.first_byte.recorded = 'none.json'", "none.json cannot be read"),
        ("bucket.trace = 'none.json'", "none.json"),
        ("order.shuffle = 'random'", "order.shuffle is 'random', not one of none"),
        ("order.window = 0", "order: window must be at least 1, not 0"),
        ("this is not TOML", "is not TOML"),
    ],
)
def test_a_field_that_is_wrong_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_scenario(written(tmp_path, f"{line}\n{LEAST}"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("schedule.kind = 'fast'", "node.schedule.kind is 'fast', not one of continuous"),
        ("schedule = { kind = 'next-batch', depth = 0 }", "node.schedule.depth is 0"),
        ("schedule = { kind = 'continuous', depth = 1 }", "node.schedule.depth has no effect here"),
        ("fetch.attempts = 0", "node.fetch: attempts must be more than 0"),
        ("fetch.hedges = 1", "node.fetch.hedges has no effect here"),
        ("caches = 'disk'", r"node.caches is 'disk', not an array of tables, \[\[node.caches\]\]"),
        ("caches = [{ kind = 'disk' }]", r"node.caches\[0\].limit_bytes is missing"),
        ("caches = [{ limit_bytes = 1, policy = 'best' }]", r"node.caches\[0\].policy is 'best', not one of"),
        (
            "caches = [{ limit_bytes = 1, bytes_per_second = 0 }]",
            r"node.caches\[0\].bytes_per_second is 0, not a number of",
        ),
        ("memory_bytes = '-1'", "node.memory_bytes"),
        ("drop_last = true\nmemory = 3", "node.memory has no effect here"),
    ],
)
def test_a_field_of_a_node_that_is_wrong_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_scenario(written(tmp_path, f"{LEAST}{line}\n"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read"):
        read_scenario(tmp_path / "none.toml")


def test_an_epoch_without_a_batch_is_refused(tmp_path: Path) -> None:
    text = LEAST.replace("batch_size = 10", "batch_size = 500\ndrop_last = true")
    with pytest.raises(ConfigError, match="no global batch is whole: drop_last leaves out all 200 samples"):
        read_scenario(written(tmp_path, text))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("list.json", "[0.25, 0.5]"),
        ("lines.csv", "0.25\n\n0.5\n"),
        (
            "trace.json",
            json.dumps([{"name": "first_byte", "dur": 250_000}, {"name": "x"}, {"name": "first_byte", "dur": 5e5}]),
        ),
        (
            "object.json",
            json.dumps({"traceEvents": [{"name": "first_byte", "dur": each} for each in (250_000, 500_000)]}),
        ),
    ],
)
def test_durations_are_read(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_durations(tmp_path / name) == RecordedLatency((0.25, 0.5))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "[1, -2]", "[1, NaN]", "hello", "[1, {}]", '{"traceEvents": [{"name": "other", "dur": 1}]}', "["],
)
def test_what_has_no_durations_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.json"):
        read_durations(tmp_path / "bad.json")


def test_bytes_that_are_no_text_have_no_durations(tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not text"):
        read_durations(tmp_path / "bad.csv")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bucket.first_byte.seconds = inf", "bucket.first_byte.seconds is inf, not a number from 0 to 10"),
        ("bucket.first_byte.seconds = 1e308", "bucket.first_byte.seconds is 1e.308, not a number from 0 to 10"),
        ("bucket.first_byte = { median_seconds = 0, p99_seconds = 1 }", "median_seconds is 0, not a number from 1e-09"),
        ("bucket.first_byte = { median_seconds = 1, p99_seconds = inf }", "p99_seconds is inf, not a number from 0 to"),
        ("bucket.connection_bytes_per_second = 1e-300", "connection_bytes_per_second is 1e-300, not a number of at"),
        ("bucket.connection_bytes_per_second = '1B'", "connection_bytes_per_second is '1B', not a number of at least"),
        ("bucket.total_bytes_per_second = 0", "bucket.total_bytes_per_second is 0, not a number of at least 1000"),
        ("bucket.requests_per_second = 1e-300", "bucket.requests_per_second is 1e-300, not a number of at least 0.001"),
        (f"nodes = {1 << 63}", f"nodes is {1 << 63}, not a number of 64 bits"),
        ("nodes = 0x" + "f" * 5000, "nodes is a int that cannot be shown, not a number of 64 bits"),
        ("nodes = 1000000", "nodes is 1000000, not an integer from 1 to 65,536"),
        ("epochs = 1_000_000_000", "epochs 1,000,000,000 of 20 batches and 20 super-samples each are more than"),
    ],
)
def test_a_figure_that_nothing_could_be_reckoned_with_is_named_with_its_range(
    tmp_path: Path, line: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_scenario(written(tmp_path, f"{line}\n{LEAST}"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compute.seconds = 1e300", "node.compute.seconds is 1e.300, not a number from 0 to 86,400"),
        ("network_bytes_per_second = 1e-9", "node.network_bytes_per_second is 1e-09, not a number of at least 1000"),
        ("memory_bytes = '999999999PB'", "node.memory_bytes is '999999999PB', not a number of bytes of at most"),
        ("fetch.deadline_seconds = 0x" + "f" * 300, "node.fetch.deadline_seconds is .* not a number of 64 bits"),
        ("caches = [{ limit_bytes = '1000KiB' }]", r"node.caches\[0\].limit_bytes is 1024000, not at least 1048576"),
        ("caches = [{ limit_bytes = '1MiB' }, { limit_bytes = 9 }]", r"node.caches\[1\].limit_bytes is 9, not at"),
    ],
)
def test_a_figure_of_a_node_that_nothing_could_be_reckoned_with_is_named_with_its_range(
    tmp_path: Path, line: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_scenario(written(tmp_path, f"{LEAST}{line}\n"))


def test_a_cache_of_one_super_sample_is_none_too_small(tmp_path: Path) -> None:
    scenario = read_scenario(
        written(tmp_path, LEAST + "caches = [{ limit_bytes = '1MiB' }]\nfetch.hedge = false")
    ).scenario
    assert simulate(scenario).requests == 20


@pytest.mark.parametrize("line", ["bucket.total_bytes_per_second = 1000", "bucket.error_fraction = 0.999"])
def test_an_unusably_slow_bucket_is_refused_with_its_figures(tmp_path: Path, line: str) -> None:
    scenario = read_scenario(written(tmp_path, f"{line}\n{LEAST}")).scenario
    figure = line.removeprefix("bucket.").replace(" = ", "=")
    with pytest.raises(ConfigError, match=rf"super-samples of up to 1\.00 MiB: BucketModel\(.*{figure}"):
        simulate(scenario)


def test_a_deprecated_field_is_read_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match=r"^FetchConfig\(concurrency_most=…\) is deprecated: write max_conc"):
        scenario = read_scenario(written(tmp_path, LEAST + "fetch.concurrency_most = 32")).scenario
    assert scenario.feed.fetch.max_concurrency == 32


def test_a_field_by_both_names_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"node\.fetch: FetchConfig got concurrency_most=, the deprecated name of max_concurrency="
    ):
        read_scenario(written(tmp_path, LEAST + "fetch = { concurrency_most = 32, max_concurrency = 32 }"))


def test_a_deprecated_cache_policy_is_the_present_one_with_a_warning(tmp_path: Path) -> None:
    file = written(tmp_path, LEAST + "caches = [{ limit_bytes = '1MiB', policy = 'uniform' }]")
    with pytest.warns(DeprecationWarning, match="^the cache policy uniform is deprecated: write no-evict$"):
        assert [each.policy for each in read_scenario(file).scenario.caches] == ["no-evict"]
