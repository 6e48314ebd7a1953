"""``stoker cost``: flags, files and data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import stoker
import stoker_sim
from stoker import Dataset, cli


@pytest.fixture(autouse=True)
def packaged_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_PRICES", raising=False)


@pytest.fixture
def url(tmp_path: Path) -> str:
    path = str(tmp_path / "train")
    with stoker.Packer(path, schema={"x": stoker.Array("uint8", (1000,))}, super_sample_bytes=20_000) as packer:
        packer.extend({"x": [number] * 1000} for number in range(100))
    return path


def run_cost(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert cli.main(["cost", *map(str, arguments)]) == code
    found = capsys.readouterr()
    return found.err if code else found.out


def bill(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Return the dollars of each line, and the total, by name."""
    document = json.loads(run_cost(capsys, *arguments, "--json"))
    found = {part["name"]: part["dollars"] for part in document["parts"]}
    assert document["dollars"] == pytest.approx(sum(found.values()))
    return {**found, "total": document["dollars"], "of": document["prices"]["of"]}


def test_figures_alone_are_enough(capsys: pytest.CaptureFixture[str]) -> None:
    found = bill(capsys, "--gets", 1e6, "--puts", 1000, "--lists", 10, "--size", "100GiB", "--months", 2)
    assert found == {
        "data at rest": pytest.approx(4.6),
        "GET requests": pytest.approx(0.4),
        "PUT requests": pytest.approx(0.005),
        "LIST requests": pytest.approx(0.00005),
        "total": pytest.approx(5.00505),
        "of": ["Amazon S3 Standard (us-east-1)"],
    }


@pytest.mark.parametrize(
    ("store", "dollars"),
    [("s3", 0.4), ("s3express", 0.03 + 0.6), ("gs", 0.4), ("gsrapid", 0.2)],
)
def test_storage_classes_differ(capsys: pytest.CaptureFixture[str], store: str, dollars: float) -> None:
    found = bill(capsys, "--store", store, "--gets", 1_000_000, "--read", "1000GiB")
    assert found["total"] == pytest.approx(dollars)


def test_a_data_set_is_known_by_its_manifest(capsys: pytest.CaptureFixture[str], url: str) -> None:
    with Dataset(url) as dataset:
        super_samples, size_bytes = len(dataset.manifest), dataset.manifest.size_bytes
    assert super_samples == 6
    found = bill(capsys, url, "--store", "s3", "--epochs", 10, "--nodes", 2, "--packing", "--egress", "other_region")
    assert found["data at rest"] == pytest.approx(size_bytes / 2**30 * 0.023)
    assert found["GET requests"] == pytest.approx((2 + 10 * 7) * 0.4e-6)
    assert found["PUT requests"] == pytest.approx(12 * 5e-6)
    assert found["egress, other region"] == pytest.approx(10 * 7 / 6 * size_bytes / 2**30 * 0.02)
    cached = bill(capsys, url, "--store", "s3", "--epochs", 11, "--hit-rate", 0.5)
    assert cached["GET requests"] == pytest.approx((1 + 6 + 10 * 3) * 0.4e-6)
    assert bill(capsys, url)["total"] == 0
    assert bill(capsys, url, "--store", "r2", "--egress", "internet")["of"] == ["Cloudflare R2 Standard (auto)"]
    eight = ("--nodes", 2, "--machine", "p5.48xlarge", "--wait-hours", 0, "--accelerators", 4)
    assert bill(capsys, url, "--store", "s3", *eight)["GET requests"] == pytest.approx((8 + 11) * 0.4e-6)
    assert bill(capsys, url, "--store", "s3", *eight[:-2])["GET requests"] == pytest.approx((16 + 11) * 0.4e-6)


def test_an_idle_accelerator_is_a_line_by_hours_or_by_share(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--accelerator", "p5.48xlarge", "--nodes", 2, "--compute-hours", 9)
    by_share, by_hours = bill(capsys, *asked, "--stall", 0.1), bill(capsys, *asked, "--wait-hours", 1)
    assert by_share["waiting for data"] == pytest.approx(2 * 55.04) == by_hours["waiting for data"]
    assert by_hours["computing"] == pytest.approx(18 * 55.04)
    assert bill(capsys, *asked, "--accelerators", 1)["computing"] == pytest.approx(18 * 6.88)


def test_disks_functions_and_a_warm_tier_are_lines_too(capsys: pytest.CaptureFixture[str]) -> None:
    found = bill(
        capsys,
        *("--disk", "pd-standard", "--disk-size", "100GiB", "--nodes", 3),
        *("--function", "lambda-arm", "--calls", 1000, "--call-seconds", 2, "--function-memory", "1GiB"),
        *("--cold-starts", 10, "--init-seconds", 1),
        *("--warm-functions", 10, "--warm-hours", 1, "--served", "75MB", "--serve-calls", 10),
    )
    assert found["disks"] == pytest.approx(12.0)
    assert found["functions: running"] == pytest.approx(2000 * 0.0000133334)
    assert found["functions: INIT"] == pytest.approx(10 * 0.0000133334)
    assert found["warm tier, keeping warm: requests"] == pytest.approx(600 * 0.2e-6)
    assert found["warm tier, serving: running"] == pytest.approx(1.5 * 0.0000133334)
    assert found["of"] == ["Google standard persistent disk (us-central1)", "AWS Lambda, Arm (us-east-1)"]


def test_a_figure_of_back_ups_is_accepted_with_a_warning_and_costs_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "job.toml"
    path.write_text("warm_functions = 10\nwarm_hours = 1\nback_up_every = 300\n", "utf-8")
    arguments = ["cost", "--figures", str(path), "--back-up-seconds", "1"]
    assert cli.main(arguments) == 0
    told = capsys.readouterr()
    assert "back" not in told.out
    assert told.out == run_cost(capsys, "--warm-functions", 10, "--warm-hours", 1)
    warned = [line.split(": ")[2] for line in told.err.splitlines()]
    assert warned == ["back_up_every has no effect", "back_up_seconds has no effect"]


def test_cloud_run_has_one_processor_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--function", "cloud-run", "--calls", 1000, "--call-seconds", 4)
    assert bill(capsys, *asked)["total"] == pytest.approx(0.1137, abs=1e-4)
    assert bill(capsys, *asked, "--function-vcpus", 2)["functions: processors"] == pytest.approx(8000 * 0.000024)
    refused = run_cost(capsys, "--calls", 10, "--function-vcpus", 2, code=2)
    assert "function_vcpus has no effect for AWS Lambda, x86" in refused


def test_tmp_of_functions_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--calls", 1000, "--call-seconds", 4, "--function-tmp", "10GiB")
    assert bill(capsys, *asked)["functions: /tmp"] == pytest.approx(4000 * 9.5 * 0.0000000309)
    assert "no price of /tmp" in run_cost(capsys, *asked, "--function", "cloud-run", code=2)


def test_a_file_has_the_same_figures_and_flags_come_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('store = "gs"\ngets = 1_000_000\nsize = "1GiB"\negress = "internet"\nread = "1GiB"\n', "utf-8")
    found = bill(capsys, "--figures", path)
    assert found["egress, internet"] == pytest.approx(0.12)
    assert found["GET requests"] == pytest.approx(0.4)
    assert bill(capsys, "--figures", path, "--gets", 1000)["GET requests"] == pytest.approx(0.0004)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cost = 1", "the unknown figure 'cost'; the figures are epochs"),
        ("gets = -1", "gets: '-1' is not from 0 to 1e+15"),
        ("gets = true", "gets: 'True' is not a number"),
        ("gets = nan", "gets: 'nan' is not from 0 to"),
        ("gets = 0x" + "f" * 5000, "job.toml: gets: Exceeds the limit"),
        ("nodes = 1.5", "nodes: '1.5' is not a positive whole number"),
        ("nodes = 99999999999999999999", "has more than 18 digits"),
        ('packing = "yes"', "packing must be true or false, not 'yes'"),
        ('size = "much"', "size: 'much' is not a number of bytes"),
        ('egress = "moon"', "egress: 'moon' is not one of same_region"),
        ("gets = [1]", "is not a number"),
        ("gets", "is not TOML"),
        ("gets = " + "[" * 5000, "is not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "job.toml").write_text(text, "utf-8")
    assert message in run_cost(capsys, "--figures", tmp_path / "job.toml", code=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to estimate"),
        (["--figures", "/nowhere/job.toml"], "cannot be read"),
        (["--epochs", "3"], "--epochs has no effect without URL"),
        (["--machine", "g6.xlarge"], "--machine has no effect without --compute-hours or --wait-hours"),
        (["--compute-hours", "1"], "--compute-hours has no effect without --machine"),
        (["--machine", "abacus", "--compute-hours", "1"], "no prices for the machine abacus, only for g6.xlarge"),
        (["--machine", "g6.xlarge", "--compute-hours", "1", "--accelerators", "2"], "has 1 accelerator, not 2"),
        (
            ["--machine", "g6.xlarge", "--compute-hours", "1", "--stall", "0.1", "--wait-hours", "1"],
            "both give the waiting time",
        ),
        (["--store", "floppy", "--gets", "1"], "no prices for a store named floppy, only for s3"),
        (["--function", "abacus", "--calls", "1"], "no prices for functions on abacus"),
        (["--store", "gs"], "--store has no effect without URL or --size or --gets"),
        (["--egress", "internet", "--calls", "1"], "--egress has no effect without URL or --size or --gets"),
        (["--months", "2", "--gets", "1"], "--months has no effect without URL or --size or --disk-size"),
        (["--nodes", "2", "--gets", "1"], "--nodes has no effect without URL or --machine or --disk"),
        (["--disk", "gp3"], "--disk has no effect without --disk-size"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in run_cost(capsys, *arguments, code=2)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--gets", "-1"],
        ["--gets", "1e16"],
        ["--back-up-every", "0"],
        ["--back-up-every", "1e-300"],
        ["--stall", "1"],
        ["--nodes", "0"],
        ["--egress", "moon"],
        ["--months", "1e306"],
        ["--size", "2000PiB"],
    ],
)
def test_a_wrong_flag_is_refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["cost", *arguments])
    assert arguments[0] in capsys.readouterr().err


def test_people_get_a_table_that_adds_up_and_says_whose_prices_it_has(capsys: pytest.CaptureFixture[str]) -> None:
    out = run_cost(capsys, "--gets", 1500, "--size", "1GiB", "--machine", "g6.xlarge", "--compute-hours", 1000)
    *rows, total, prices = out.splitlines()
    assert [row.rsplit("  ", 1)[0].rstrip() for row in rows] == [
        "data at rest      1  GB-months",
        "GET requests  1,500  requests",
        "computing     1,000  node-hours",
    ]
    assert len({len(row) for row in (*rows, total)}) == 1
    assert total.split() == ["total", "$804.82"]
    assert prices == "list prices of 2026-11-21: Amazon S3 Standard (us-east-1); AWS g6.xlarge, 1 L4 (us-east-1)"


def test_what_uses_nothing_costs_nothing_by_nobodys_prices(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cost(capsys, "--gets", 0) == "total      $0.000000\n"


def test_another_price_file_may_be_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(stoker_sim.__file__).parent / "published/deli_prices.toml"
    monkeypatch.setenv("STOKER_PRICES", str(path))
    assert bill(capsys, "--machine", "n1-standard-2-k80", "--compute-hours", 2)["total"] == pytest.approx(1.09)
    assert bill(capsys, "--store", "gs", "--gets", 1e6)["total"] == pytest.approx(0.4)
    assert "no prices for s3" in run_cost(capsys, "--gets", 1, code=2)


COMPARED = ("--compare-tiers", "--size", "33GB", "--gets", 197_500, "--hours", 50)
PLACES = (
    *("bucket", "bucket in one zone", "disk of each trainer", "memory of each trainer"),
    *("stoker tier serve", "managed Valkey or Redis", "warm functions"),
)


def compared(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    """Return the document of a comparison, its places by their names."""
    document = json.loads(run_cost(capsys, *arguments, "--json"))
    document["tiers"] = {tier["place"]: tier for tier in document["tiers"]}
    return dict(document)


def test_places_are_compared_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    header, *rows = run_cost(capsys, *COMPARED).splitlines()
    assert header.split() == ["place", "dollars", "a", "read", "what", "limits", "it"]
    assert tuple(row.split("  ")[0] for row in rows[:7]) == PLACES
    assert "$0.08   $0.0000004  time to the first byte" in rows[0]
    assert "$0.0016  <$0.0000001" in rows[3]
    assert "3 x AWS r7g.large" in rows[4]
    assert rows[7] == "197,500 reads by 1 trainer in 50 hours, of 3,934 objects of 8.00 MiB"
    assert "docs/tiers.md" in rows[9]
    assert rows[10].startswith("list prices of ")


def test_a_comparison_as_json_has_places_their_lines_and_the_workload(capsys: pytest.CaptureFixture[str]) -> None:
    document = compared(capsys, *COMPARED)
    assert tuple(document["tiers"]) == PLACES
    assert document.keys() == {"prices", "workload", "tiers"}
    assert document["workload"] == {
        "size_bytes": 33_000_000_000,
        "reads": 197_500,
        "hours": 50,
        "object_bytes": 8 << 20,
        "trainers": 1,
        "egress": "same_region",
    }
    bucket = document["tiers"]["bucket"]
    assert bucket["dollars"] == pytest.approx(0.079)
    assert bucket["dollars_per_read"] == pytest.approx(0.4e-6)
    assert [part["name"] for part in bucket["parts"]] == ["GET requests"]
    for tier in document["tiers"].values():
        assert tier["dollars"] == pytest.approx(sum(part["dollars"] for part in tier["parts"]))


def test_missing_prices_are_named_and_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = (row for row in run_cost(capsys, *COMPARED, "--store", "gs").splitlines() if row.startswith("managed"))
    assert row.endswith("the price file has no price for us-central1")
    assert "no price " in row
    found = compared(capsys, *COMPARED, "--store", "gs")["tiers"]
    assert (found["managed Valkey or Redis"]["dollars"], found["managed Valkey or Redis"]["parts"]) == (None, [])
    assert found["bucket in one zone"]["of"] == "Google Cloud Storage Rapid"
    assert found["warm functions"]["of"] == "Google Cloud Run, request-based billing"


def test_a_data_set_gives_the_objects_and_the_reads_of_a_comparison(
    capsys: pytest.CaptureFixture[str], url: str
) -> None:
    with Dataset(url) as dataset:
        super_samples, size_bytes = len(dataset.manifest), dataset.manifest.size_bytes
    work = compared(capsys, url, "--store", "s3", "--compare-tiers", "--hours", 2, "--epochs", 10)["workload"]
    assert work["size_bytes"] == size_bytes
    assert work["object_bytes"] == pytest.approx(size_bytes / super_samples)
    assert work["reads"] == 1 + 10 * super_samples  # and the manifest


def test_figures_of_a_comparison_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    of = ("--nodes", 4, "--machine", "g6.xlarge", "--disk", "pd-standard", "--object-size", "1MiB", "--linger", 0.05)
    found = compared(capsys, *COMPARED, *of, "--function", "lambda-arm", "--warm-memory", "3GiB")
    assert found["workload"]["trainers"] == 4
    assert found["workload"]["object_bytes"] == 1 << 20
    assert found["tiers"]["disk of each trainer"]["count"] == 4
    assert found["tiers"]["memory of each trainer"]["limit"].endswith("which has 16 GiB")
    assert found["tiers"]["warm functions"]["of"] == "AWS Lambda, Arm"
    assert found["tiers"]["warm functions"]["count"] == 14


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--compare-tiers", "--size", "1GB", "--gets", 1), "compare_tiers needs hours"),
        (("--compare-tiers", "--size", "1GB", "--hours", 1), "compare_tiers needs gets greater than 0"),
        (("--compare-tiers", "--gets", 1, "--hours", 1), "compare_tiers needs size greater than 0"),
        ((*COMPARED, "--puts", 1), "puts has no effect with compare_tiers"),
        (("--gets", 1, "--hours", 1), "--hours has no effect without --compare-tiers"),
        ((*COMPARED, "--warm-memory", "128MiB"), "has no room"),
    ],
)
def test_a_comparison_that_cannot_be_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], message: str
) -> None:
    assert message in run_cost(capsys, *arguments, code=2)
