"""``stoker allocate``: a file of jobs in, what each gets out; whatever is wrong with the file is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stoker import FetchConfig, cli
from stoker._cache.tiers import CacheSpec
from stoker._cluster.spec import ClusterSpec

CLUSTER = '[cluster]\ncache_bytes = "150GB"\nbandwidth = "80Mbit"\n'
FAST = '[[jobs]]\nname = "fast"\ndataset_bytes = "100GB"\ncompute = "100MB/s"\n'
SLOW = '[[jobs]]\nname = "slow"\ndataset_bytes = "100GB"\nsamples_per_second = 200\nsample_bytes = "100KB"\n'
WIDE = '[[jobs]]\nname = "wide"\ndataset_bytes = "50GB"\ncompute = "200MB"\nnodes = 2\n'

NOT = "must be more than 0 and less than inf, not {} (the job '{}')"


def written(folder: Path, text: str) -> Path:
    path = folder / "jobs.toml"
    path.write_text(text, "utf-8")
    return path


def divided(capsys: pytest.CaptureFixture[str], path: Path, *arguments: str) -> Any:
    assert cli.main(["allocate", str(path), "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], path: Path, *arguments: str) -> str:
    assert cli.main(["allocate", str(path), *arguments]) == 2
    return capsys.readouterr().err


def test_each_job_gets_its_cache_bandwidth_rate_and_bottleneck(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = divided(capsys, written(tmp_path, CLUSTER + SLOW + FAST))
    slow, fast = found["jobs"]
    assert (fast["cache_bytes"], slow["cache_bytes"]) == (100e9, 50e9)
    assert (fast["bytes_per_second"], slow["bytes_per_second"]) == (0.0, 1e7)
    assert (fast["bound"], slow["bound"]) == ("compute", "compute")
    assert slow["hit_rate"] == 0.5
    assert found["total"]["cache_bytes"] == found["cluster"]["cache_bytes"] == 150e9
    assert found["total"]["rate_bytes_per_second"] == found["total"]["compute_bytes_per_second"] == 1.2e8


def test_a_job_that_waits_for_data_is_bound_by_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = divided(capsys, written(tmp_path, CLUSTER + SLOW + FAST), "--cache", "0", "--policy", "max-min")[
        "jobs"
    ]
    assert (fast["bound"], slow["bound"]) == ("I/O", "I/O")
    assert fast["rate_bytes_per_second"] / 100e6 == pytest.approx(slow["rate_bytes_per_second"] / 20e6)


def test_options_take_the_place_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, CLUSTER + FAST)
    found = divided(capsys, path, "--cache", "10GB", "--bandwidth", "1Gbit/s", "--policy", "equal")
    assert found["cluster"] == {"cache_bytes": 10**10, "bytes_per_second": 1.25e8}
    assert found["policy"] == "equal"
    assert (
        divided(capsys, written(tmp_path, FAST), "--cache", "10GB", "--bandwidth", "1GB")["jobs"][0]["bound"]
        == "compute"
    )


def test_what_to_give_to_the_loader_is_a_part_for_each_node_and_the_whole_of_it_to_each_job_that_shares_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    same = 'dataset = "same"\n'
    jobs = FAST + same + FAST.replace("fast", "twin") + same + WIDE
    fast, twin, wide = divided(capsys, written(tmp_path, CLUSTER + jobs), "--cache", "200GB")["jobs"]
    assert fast["cache"] == twin["cache"] == "disk:/mnt/nvme/stoker?limit=100000MB"
    assert wide["cache"] == "disk:/mnt/nvme/stoker?limit=50000MB"
    for each, limit_bytes in ((fast, 100 * 10**9), (twin, 100 * 10**9), (wide, 50 * 10**9)):
        assert CacheSpec.parse(each["cache"]).limit_bytes == each["limit_bytes"] == limit_bytes


def test_a_job_whose_nodes_share_their_caches_gets_a_part_of_the_data_for_each_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, CLUSTER + WIDE + 'cache = "cluster"\n')
    wide = divided(capsys, path)["jobs"][0]
    assert (wide["cache_bytes"], wide["hit_rate"], wide["cache"]) == (50e9, 1.0, None)
    assert wide["cluster"] == "disk:/mnt/nvme/stoker?limit=25000MB"
    assert ClusterSpec.parse(wide["cluster"]).limit_bytes == wide["limit_bytes"]
    assert cli.main(["allocate", str(path)]) == 0
    assert 'Loader(…, cluster="disk:/mnt/nvme/stoker?limit=25000MB")' in capsys.readouterr().out


def test_bandwidth_is_divided_by_nodes_and_is_what_a_fetcher_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = divided(capsys, written(tmp_path, CLUSTER + WIDE), "--cache", "0")["jobs"][0]
    assert wide["max_bytes_per_second"] == int(wide["bytes_per_second"] / 2) > 0
    assert FetchConfig(max_bytes_per_second=wide["max_bytes_per_second"]).max_bytes_per_second


def test_people_read_a_table_with_totals_and_lines_to_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["allocate", str(written(tmp_path, CLUSTER + SLOW + FAST))]) == 0
    assert capsys.readouterr().out == (
        "greedy: from the second epoch on\n"
        "  job    cache   hits  bandwidth  trains    of full rate  bound\n"
        "  slow   50 GB   50%   10 MB/s    20 MB/s   100%          compute\n"
        "  fast   100 GB  100%  0 B/s      100 MB/s  100%          compute\n"
        "  total  150 GB        10 MB/s    120 MB/s  100%\n"
        "  of     150 GB        10 MB/s\n"
        "settings of each job, if a node has one rank\n"
        '  slow  Loader(…, cache="disk:/mnt/nvme/stoker?limit=50000MB", '
        "fetch=FetchConfig(max_bytes_per_second=10000000))\n"
        '  fast  Loader(…, cache="disk:/mnt/nvme/stoker?limit=100000MB")\n'
    )


def test_jobs_without_a_share_under_greedy_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, CLUSTER + SLOW + FAST)
    assert cli.main(["allocate", str(path), "--cache", "1GB", "--bandwidth", "1MB"]) == 0
    assert "nothing is left for slow; with --policy max-min all jobs train" in capsys.readouterr().out
    assert cli.main(["allocate", str(path), "--cache", "0", "--bandwidth", "0"]) == 0
    shown = capsys.readouterr().out
    assert "max-min" not in shown
    assert "Loader" not in shown


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "cluster.cache_bytes is missing"),
        (CLUSTER, "has no jobs: describe each one in a [[jobs]] table"),
        ("[cluster", "is not TOML"),
        ("jobs = " + "[" * 5000, "is not TOML"),
        (CLUSTER.replace("80Mbit", "80Mb") + FAST, "cluster.bandwidth is '80Mb', not a rate such as"),
        (CLUSTER.replace('"150GB"', "-1") + FAST, "cluster.cache_bytes: a number of bytes cannot be negative"),
        (CLUSTER + "disks = 3\n" + FAST, "cluster.disks has no effect here"),
        (CLUSTER + FAST.replace('"fast"', "7"), "jobs[0].name is 7, not a text"),
        (CLUSTER + SLOW + FAST.replace('"100GB"', '"all"'), "jobs[1].dataset_bytes: 'all' is not a number of bytes"),
        (CLUSTER + FAST.replace('dataset_bytes = "100GB"', ""), "jobs[0].dataset_bytes is missing (the job 'fast')"),
        (CLUSTER + FAST.replace('"100GB"', "0"), "dataset_bytes " + NOT.format(0, "fast")),
        (CLUSTER + FAST.replace('"100MB/s"', "1e8"), "jobs[0].compute is 100000000.0, not a text (the job 'fast')"),
        (CLUSTER + FAST.replace('"100MB/s"', '"0"'), "compute_bytes_per_second " + NOT.format(0.0, "fast")),
        (CLUSTER + FAST + "nodes = 0\n", "jobs[0].nodes is 0, not an integer from 1 to 65,536 (the job 'fast')"),
        (CLUSTER + FAST + 'cache = "all"\n', "jobs[0].cache is 'all', not one of disk, cluster (the job 'fast')"),
        (CLUSTER + FAST + "gpus = 8\n", "jobs[0].gpus has no effect here"),
        (CLUSTER + SLOW + 'compute = "1GB"\n', "jobs[0]: compute and samples_per_second both give"),
        (CLUSTER + SLOW.replace("200", "nan"), "jobs[0].samples_per_second is nan, not a number"),
        (CLUSTER + SLOW.replace("200", "inf"), "jobs[0].samples_per_second is inf, not a number from 0 to 1,000,000,0"),
        (CLUSTER + SLOW.replace("200", "1e308"), "jobs[0].samples_per_second is 1e+308, not a number from 0 to"),
        (CLUSTER + SLOW.replace("100KB", "0"), "compute_bytes_per_second " + NOT.format(0.0, "slow")),
        (CLUSTER + FAST.replace("100MB", "9999999PB"), "jobs[0].compute is '9999999PB/s', not a rate of at most"),
        (CLUSTER.replace("80Mbit", "99999999Tbit") + FAST, "cluster.bandwidth is '99999999Tbit', not a rate of at"),
        (CLUSTER.replace("150GB", "2000PiB") + FAST, "cluster.cache_bytes is '2000PiB', not a number of bytes of at"),
        (CLUSTER + FAST + "nodes = 70000\n", "jobs[0].nodes is 70000, not an integer from 1 to 65,536"),
        (CLUSTER + FAST + FAST, "two jobs are called 'fast'"),
        ("jobs = 3\n" + CLUSTER, "jobs is 3, not an array of tables"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_named_by_job_and_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, problem: str
) -> None:
    assert problem in refused(capsys, written(tmp_path, text))


def test_a_file_that_is_not_there_is_an_error_and_no_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "cannot be read" in refused(capsys, tmp_path / "none.toml")


@pytest.mark.parametrize("arguments", [["--bandwidth", "10Gb"], ["--cache", "-1"], ["--policy", "no-cache"]])
def test_options_that_mean_nothing_are_refused(tmp_path: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["allocate", str(written(tmp_path, CLUSTER + FAST)), *arguments])
    assert ended.value.code == 2


def test_the_example_of_the_page_prints_what_the_page_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "allocation.md").read_text("utf-8")
    example, shown = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)[0] for kind in ("toml", "text"))
    assert cli.main(["allocate", str(written(tmp_path, example))]) == 0
    assert capsys.readouterr().out == shown
