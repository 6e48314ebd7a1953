"""The price file and its arithmetic."""

from __future__ import annotations

import datetime
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from stoker.errors import ConfigError
from stoker.prices import GB_BYTES, Operation, Prices

PACKAGED = resources.files("stoker").joinpath("prices.toml").read_text("utf-8")


@pytest.fixture(autouse=True)
def no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_PRICES", raising=False)


def changed(tmp_path: Path, old: str, new: str) -> Path:
    """Return a copy of the packaged file with one text replaced everywhere."""
    assert old in PACKAGED
    path = tmp_path / "prices.toml"
    path.write_text(PACKAGED.replace(old, new), "utf-8")
    return path


def test_the_packaged_file_says_its_date_and_where_each_price_comes_from() -> None:
    prices = Prices.load()
    assert prices.date == tomllib.loads(PACKAGED)["date"]
    assert isinstance(prices.date, datetime.date)
    for table in (prices.stores, prices.functions, prices.machines, prices.disks):
        for name in table:
            entry = table[name]
            assert entry.source.startswith("https://")
            assert entry.name
            assert entry.region


@pytest.mark.parametrize(
    ("scheme", "operation", "per_million"),
    [
        ("s3", Operation.GET, 0.4),
        ("s3", Operation.HEAD, 0.4),
        ("s3", Operation.PUT, 5.0),
        ("s3", Operation.LIST, 5.0),
        ("s3", Operation.DELETE, 0.0),
        ("s3express", Operation.GET, 0.03),
        ("gs", Operation.GET, 0.4),
        ("gs", Operation.PUT, 5.0),
        ("gsrapid", Operation.GET, 0.2),
        ("gsrapid", Operation.PUT, 1.13),
        ("file", Operation.GET, 0.0),
        ("memory", Operation.PUT, 0.0),
    ],
)
def test_a_million_requests_cost_what_the_price_lists_say(
    scheme: str, operation: Operation, per_million: float
) -> None:
    assert Prices.load().request_dollars(scheme, operation) * 1e6 == pytest.approx(per_million)


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("s3://bucket/train", "Amazon S3 Standard"),
        ("s3", "Amazon S3 Standard"),
        ("s3://fast--use1-az4--x-s3/train", "Amazon S3 Express One Zone"),
        ("s3://bucket/not--x-s3", "Amazon S3 Standard"),
        ("gs://bucket", "Google Cloud Storage Standard"),
        ("/data/train", "this machine"),
        ("relative/folder", "this machine"),
        ("file:///data", "this machine"),
        ("memory://name", "this machine"),
    ],
)
def test_a_url_finds_the_prices_of_its_store(url: str, name: str) -> None:
    assert Prices.load().store(url).name == name


def test_an_unknown_store_is_an_error_and_not_free() -> None:
    with pytest.raises(ConfigError, match="no prices for az:// stores, only for s3"):
        Prices.load().store("az://container")


def test_transfer_counts_retrieval_upload_and_the_way_out() -> None:
    store = Prices.load().store("s3express")
    moved = store.transfer_dollars(read_bytes=2 * GB_BYTES, written_bytes=GB_BYTES, egress="internet")
    assert moved == pytest.approx(2 * (0.0006 + 0.09) + 0.0032)
    assert Prices.load().store("s3").transfer_dollars(read_bytes=1 << 40, written_bytes=0, egress="same_region") == 0


def test_storage_is_billed_by_gb_and_month() -> None:
    assert Prices.load().store("s3").storage_dollars(100 * GB_BYTES, months=2) == pytest.approx(4.6)


def test_a_function_is_billed_by_memory_processors_and_request() -> None:
    functions = Prices.load().functions
    lambda_ = functions["lambda"].invocation_dollars(seconds=10, memory_bytes=2 * GB_BYTES, vcpus=1)
    assert lambda_ == pytest.approx(20 * 0.0000166667 + 0.2e-6)
    cloud_run = functions["cloud-run"].invocation_dollars(seconds=10, memory_bytes=GB_BYTES, vcpus=2)
    assert cloud_run == pytest.approx(10 * 0.0000025 + 20 * 0.000024 + 0.4e-6)


@pytest.mark.parametrize(
    ("machine", "dollars_per_accelerator_hour"),
    [("g6.xlarge", 0.8048), ("g5.xlarge", 1.006), ("p5.48xlarge", 6.88), ("cloud-run-l4", 3600 * 0.0002907)],
)
def test_an_accelerator_has_its_share_of_a_machine(machine: str, dollars_per_accelerator_hour: float) -> None:
    found = Prices.load().machine(machine)
    assert found.dollars_per_accelerator_hour == pytest.approx(dollars_per_accelerator_hour)


def test_a_disk_is_billed_by_gb_and_month() -> None:
    assert Prices.load().disk("pd-standard").storage_dollars(100 * GB_BYTES, months=0.5) == pytest.approx(2.0)


def test_a_file_without_machines_and_disks_is_valid_and_asking_for_them_says_so(tmp_path: Path) -> None:
    path = changed(tmp_path, PACKAGED[PACKAGED.index("# Whole machines") :], "")
    prices = Prices.load(path)
    assert prices.function("lambda").dollars_per_request == 0.0000002
    with pytest.raises(ConfigError, match=r"no prices for the machine g6\.xlarge, which the price file leaves out"):
        prices.machine("g6.xlarge")
    with pytest.raises(ConfigError, match="no prices for disks of the kind gp3"):
        prices.disk("gp3")


@pytest.mark.parametrize("url", ["gsrapid", "gsrapid://bucket"])
def test_a_file_need_not_have_every_store_and_what_it_lacks_is_not_free(tmp_path: Path, url: str) -> None:
    rapid = PACKAGED[PACKAGED.index("# A zonal bucket") : PACKAGED.index("[functions.lambda]")]
    with pytest.raises(ConfigError, match="no prices for gsrapid:// stores, only for s3"):
        Prices.load(changed(tmp_path, rapid, "")).store(url)


def test_what_has_no_prices_is_an_error_that_names_what_has() -> None:
    prices = Prices.load()
    with pytest.raises(ConfigError, match=r"no prices for the machine h100, only for g6\.xlarge, g5\.xlarge"):
        prices.machine("h100")
    with pytest.raises(ConfigError, match="no prices for functions on azure, only for lambda, lambda-arm, cloud-run"):
        prices.function("azure")


def test_another_file_is_given_by_path_or_by_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = changed(tmp_path, "GET = 0.0004,", "GET = 1,")
    assert Prices.load(path).request_dollars("s3", Operation.GET) == 0.001
    assert Prices.load().request_dollars("s3", Operation.GET) < 0.001
    monkeypatch.setenv("STOKER_PRICES", str(path))
    assert Prices.load().request_dollars("s3", Operation.GET) == 0.001


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("GET = 0.0004, ", "", r"stores\.s3\.dollars_per_1000_requests has no GET"),
        ("GET = 0.0004,", "GET = 0.0004, POST = 1.0,", "has unknown POST"),
        ("GET = 0.0004,", "GET = -1.0,", r"GET is -1\.0, not a price"),
        ("GET = 0.0004,", "GET = nan,", "GET is nan, not a price"),
        ("GET = 0.0004,", "GET = inf,", "GET is inf, not a price"),
        ("GET = 0.0004,", "GET = 1e300,", "GET is 1e.300, not a price from 0 to 1,000,000,000,000 dollars"),
        ("GET = 0.0004,", "GET = 0x" + "f" * 5000 + ",", "GET is a int that cannot be shown, not a price"),
        ("GET = 0.0004,", "GET = true,", "GET is True, not a price"),
        ("GET = 0.0004,", 'GET = "0.0004",', "GET is '0.0004', not a price"),
        ("region =", "place =", r"stores\.s3 has no region"),
        ('"us-east-1"', "1", r"stores\.s3\.region is 1, not text"),
        ("[stores.gs]", "[stores.google]", "stores has unknown google"),
        ("[machines.cloud", "[machinery.cloud", "the file has unknown machinery"),
        ("accelerators = 8", "accelerators = 8.0", r"p5\.48xlarge\.accelerators is 8\.0, not a number"),
        ("accelerators = 8", "accelerators = -8", "is -8, not a number"),
        ("dollars_per_hour = 55.04", "dollars_per_hour = -1", "dollars_per_hour is -1, not a price"),
        ("[disks.gp3]", "[disks.gp3.large]", r"disks\.gp3 has no name"),
        ("2026-11-21", '"today"', "date 'today' is not a date"),
        ("2026-11-21", "2026-11-21T00:00:00", "is not a date"),
        ('"USD"', '"EUR"', "currency 'EUR' is not USD"),
        ("egress_dollars_per_gb = {", "egress_dollars_per_gb = 0.0 # {", r"egress_dollars_per_gb is 0\.0, not a table"),
        ("currency", "[", "is not TOML"),
    ],
)
def test_a_wrong_price_file_is_refused_with_the_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Prices.load(changed(tmp_path, old, new))
    assert "prices.toml" in str(caught.value)


def test_a_missing_or_binary_price_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Prices.load(tmp_path / "none.toml")
    for unreadable in (b"\xff\xfe", b"a = " + b"[" * 5000):
        (tmp_path / "binary.toml").write_bytes(unreadable)
        with pytest.raises(ConfigError, match="is not TOML"):
            Prices.load(tmp_path / "binary.toml")
