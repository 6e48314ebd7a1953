"""The price file and its arithmetic."""

from __future__ import annotations

import datetime
import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from stoker import Operation, Prices
from stoker._base.meter import PriceKey
from stoker._cost.prices import GB_BYTES
from stoker.errors import ConfigError
from support.cases import for_each

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
    for table in (prices.stores, prices.functions, prices.machines, prices.disks, prices.caches):
        for name in table:
            entry = table[name]
            assert entry.source.startswith("https://")
            assert entry.name
            assert entry.region


@for_each(
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


def test_a_file_without_machines_and_disks_is_valid_and_their_prices_are_an_error(tmp_path: Path) -> None:
    path = changed(tmp_path, PACKAGED[PACKAGED.index("# Whole machines") :], "")
    prices = Prices.load(path)
    assert prices.function("lambda").dollars_per_request == 0.0000002
    with pytest.raises(ConfigError, match=r"no prices for the machine g6\.xlarge, which the price file omits"):
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
        ("GET = 0.0004, ", "", r"stores\.s3: dollars_per_1000_requests has no GET"),
        ("GET = 0.0004,", "GET = 0.0004, POST = 1.0,", "a name in .*dollars_per_1000_requests is not one of 'GET', "),
        ("GET = 0.0004,", "GET = -1.0,", r"GET must be at least 0, not -1\.0"),
        ("GET = 0.0004,", "GET = nan,", "GET must be at least 0, not nan"),
        ("GET = 0.0004,", "GET = inf,", "GET must be at most 1,000,000,000,000, not inf"),
        ("GET = 0.0004,", "GET = 1e300,", "GET must be at most 1,000,000,000,000, not 1e.300"),
        (
            "GET = 0.0004,",
            "GET = 0x" + "f" * 5000 + ",",
            "at most 1,000,000,000,000, not a int that cannot be shown",
        ),
        ("GET = 0.0004,", "GET = true,", "GET is of type bool, not float"),
        ("GET = 0.0004,", 'GET = "0.0004",', "GET is of type str, not float"),
        ('region = "us-east-1"\nsource', "source", r"stores\.s3 lacks the field 'region'"),
        ("region =", "place =", r"stores\.s3 has an unknown field 'place'"),
        ('"us-east-1"', "1", r"stores\.s3\.region is of type int, not str"),
        (
            "[stores.gs]",
            "[stores.Google]",
            "the name of a store in the price file must be made of .* such as r2 or minio, not 'Google'",
        ),
        (
            'endpoints = ["*.r2',
            'endpoints = ["https://*.r2',
            "endpoints has 'https://.*r2.cloudflarestorage.com', not a host",
        ),
        (
            'endpoints = ["*.r2.cloudflarestorage.com"]',
            "endpoints = 1",
            r"r2\.endpoints is of type int, not an array",
        ),
        ("above_gb_seconds = 15e9", "above_gb_seconds = 1e9", "tiers of AWS Lambda, x86 are not in rising order"),
        ("above_gb_seconds = 15e9, ", "", r"functions\.lambda\.tiers\[1\] lacks the field 'above_gb_seconds'"),
        ("billing_unit_seconds = 0.1", "billing_unit_seconds = -1", "billing_unit_seconds must be at least 0, not -1"),
        ("currency", 'overlay = "yes"\ncurrency', "overlay must be true or false, not 'yes'"),
        ("[machines.cloud", "[machinery.cloud", "prices has an unknown field 'machinery'"),
        ("accelerators = 8", "accelerators = 8.0", r"p5\.48xlarge\.accelerators is of type float, not int"),
        ("accelerators = 8", "accelerators = -8", "accelerators must be at least 0, not -8"),
        ("dollars_per_hour = 55.04", "dollars_per_hour = -1", "dollars_per_hour must be at least 0, not -1"),
        ("[disks.gp3]", "[disks.gp3.large]", r"disks\.gp3 has an unknown field 'large'"),
        ("2026-11-21", '"today"', "date is of type str, not date"),
        ("2026-11-21", "2026-11-21T00:00:00", "date is of type datetime, not date"),
        ('"USD"', '"EUR"', "currency must be \"USD\", not 'EUR'"),
        (
            "egress_dollars_per_gb = {",
            "egress_dollars_per_gb = 0.0 # {",
            "dollars_per_gb is of type float, not an object",
        ),
        ("currency", "[", "is not TOML"),
    ],
)
def test_a_wrong_price_file_is_refused_with_the_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Prices.load(changed(tmp_path, old, new))
    assert "prices.toml" in str(caught.value)


@for_each(
    ("key", "name"),
    [
        (PriceKey("s3://b/train", "https://0a1b.r2.cloudflarestorage.com"), "Cloudflare R2 Standard"),
        (PriceKey("s3://b/train", "https://0A1B.eu.R2.cloudflarestorage.com:443/"), "Cloudflare R2 Standard"),
        (PriceKey("s3://b/train", "http://minio:9000"), "MinIO"),
        (PriceKey("s3://b/train", "http://minio.storage.svc.cluster.local:9000"), "MinIO"),
        (PriceKey("s3://b/train", "http://user:secret@minio:9000"), "MinIO"),
        (PriceKey("s3://b/train", "https://r2.cloudflarestorage.com.example.org"), "Amazon S3 Standard"),
        (PriceKey("s3://b/train", "http://127.0.0.1:9000"), "Amazon S3 Standard"),
        (PriceKey("s3://b/train", "http://127.0.0.1:9000", "minio"), "MinIO"),
        (PriceKey("s3://b/train", "https://0a1b.r2.cloudflarestorage.com", "s3"), "Amazon S3 Standard"),
        (PriceKey("gs://b/train", "", "gsrapid"), "Google Cloud Storage Rapid"),
        (PriceKey("s3://fast--use1-az4--x-s3/train"), "Amazon S3 Express One Zone"),
        (PriceKey("r2/train"), "this machine"),
        (PriceKey("r2"), "this machine"),
    ],
)
def test_a_store_behind_an_endpoint_is_found_by_the_users_name_then_by_host_then_by_url(
    key: PriceKey, name: str
) -> None:
    assert Prices.load().store(key).name == name


def test_what_a_user_names_and_the_file_lacks_is_an_error_that_names_the_others() -> None:
    with pytest.raises(ConfigError, match="no prices for a store named b2, only for s3, s3express, gs, gsrapid, r2"):
        Prices.load().store(PriceKey("s3://b", name="b2"))


def test_r2_has_no_egress_fee_and_cheaper_requests() -> None:
    r2 = Prices.load().store(PriceKey("s3://b", name="r2"))
    assert r2.transfer_dollars(read_bytes=1 << 40, written_bytes=1 << 40, egress="internet") == 0
    assert r2.request_dollars(Operation.GET) * 1e6 == pytest.approx(0.36)
    assert r2.request_dollars(Operation.PUT) * 1e6 == pytest.approx(4.5)


def test_an_overlay_changes_what_it_has_and_leaves_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.toml"
    path.write_text(
        """
        overlay = true
        [stores.s3]
        dollars_per_1000_requests = { GET = 0.0003 }
        [stores.minio]
        endpoints = ["10.0.0.5:9000", "s3.example.com"]
        [machines.mine]
        name = "mine"
        region = "here"
        source = ""
        dollars_per_hour = 2
        accelerators = 8
        """,
        "utf-8",
    )
    monkeypatch.setenv("STOKER_PRICES", str(path))
    found, packaged = Prices.load(), tomllib.loads(PACKAGED)
    assert found.date == packaged["date"]
    assert found.request_dollars("s3", Operation.GET) * 1e6 == pytest.approx(0.3)
    assert found.request_dollars("s3", Operation.PUT) * 1e6 == pytest.approx(5.0)
    assert found.machine("mine").dollars_per_accelerator_hour == 0.25
    assert found.machines.keys() == packaged["machines"].keys() | {"mine"}
    assert found.store(PriceKey("s3://b", "http://10.0.0.5:9000")).name == "MinIO"
    assert found.store(PriceKey("s3://b", "http://10.0.0.5:9001")).name == "Amazon S3 Standard"
    assert found.store(PriceKey("s3://b", "http://minio:9000")).name == "Amazon S3 Standard"  # a list is replaced


def test_a_file_that_is_no_overlay_still_replaces_the_packaged_one(tmp_path: Path) -> None:
    path = changed(tmp_path, "[stores.r2]", "[stores.r3]")
    path.write_text("overlay = false\n" + path.read_text("utf-8"), "utf-8")
    assert "r2" not in Prices.load(path).stores


def test_an_older_copy_of_the_price_file_is_still_valid(tmp_path: Path) -> None:
    text = PACKAGED
    for name in ("endpoints", "billing_unit_seconds", "dollars_per_tmp_gb_second", "free_tmp_gb"):
        text = re.sub(rf"^{name} = .*\n", "", text, flags=re.MULTILINE)
    path = tmp_path / "prices.toml"
    path.write_text(re.sub(r"^tiers = \[\n(    .*\n)+\]\n", "", text, flags=re.MULTILINE), "utf-8")
    assert "tiers =" not in path.read_text("utf-8")
    assert Prices.load(path).function("lambda").invocation_dollars(seconds=1, memory_bytes=GB_BYTES, vcpus=0) > 0


def test_memory_beyond_6_and_15_billion_gb_seconds_a_month_is_cheaper() -> None:
    lambda_ = Prices.load().function("lambda")
    assert lambda_.memory_dollars(1e9) == pytest.approx(16_666.7)
    assert lambda_.memory_dollars(6e9) == pytest.approx(100_000.2)
    assert lambda_.memory_dollars(15e9) == pytest.approx(100_000.2 + 135_000)
    assert lambda_.memory_dollars(16e9) == pytest.approx(235_000.2 + 13_333.4)
    arm = Prices.load().function("lambda-arm")
    assert arm.memory_dollars(20e9) == pytest.approx(100_000.5 + 135_001.125 + 13_333.375)


@pytest.mark.parametrize(
    ("platform", "seconds", "billed"),
    [
        ("lambda", 0.0, 0.0),
        ("lambda", 0.0101, 0.011),
        ("lambda", 0.3, 0.3),
        ("cloud-run", 0.002, 0.1),
        ("cloud-run", 1.1, 1.1),  # a multiple, but for an error of floating point
        ("cloud-run", 1.1001, 1.2),
    ],
)
def test_a_duration_is_rounded_up_to_what_the_platform_bills_by(platform: str, seconds: float, billed: float) -> None:
    assert Prices.load().function(platform).billed_seconds(seconds) == pytest.approx(billed)


def test_a_missing_or_binary_price_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Prices.load(tmp_path / "none.toml")
    for unreadable in (b"\xff\xfe", b"a = " + b"[" * 5000):
        (tmp_path / "binary.toml").write_bytes(unreadable)
        with pytest.raises(ConfigError, match="is not TOML"):
            Prices.load(tmp_path / "binary.toml")
