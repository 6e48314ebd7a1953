from __future__ import annotations

from pathlib import Path

import pytest

from stoker._shared.address import Address
from stoker.errors import ConfigError
from stoker.fanout import ExecutorOptions
from stoker_warm._auth import WarmSecret
from stoker_warm._config import WarmConfig, WarmDeployment
from stoker_warm._erasure import ErasureCode
from stoker_warm._tier import InProcessProxy, parse_server_url
from support.cases import for_each
from support.warm_platform import MAC

FINGERPRINT = "0123456789abcdef" * 4
FLEET = "warm+lambda://stoker?listen=10.0.0.5:7411"


def test_functions_need_a_prefix_and_where_they_dial_and_have_defaults_for_the_rest() -> None:
    assert WarmDeployment.parse(FLEET) == WarmDeployment(
        executor="lambda",
        options=ExecutorOptions(prefix="stoker"),
        config=WarmConfig(),
        listen=Address("10.0.0.5", 7411),
    )
    assert WarmDeployment.parse("warm+gcf://mine?listen=127.0.0.1:0").executor == "gcf"
    assert WarmDeployment.parse("warm+gcf://mine?listen=127.0.0.1:0").bucket == "gs"


def test_every_setting_of_functions_is_taken() -> None:
    url = (
        "warm+lambda://team-a?nodes=20&code=4+2&listen=0.0.0.0:7411&advertise=10.0.0.5:17411&region=eu-central-1"
        "&keep_warm=45s&linger=0.5s&ping=0.1s&wake=4s&read=2s&write=9s&pending=1GiB&writes=3&objects=5000"
        "&endpoint=http://127.0.0.1:9000&certificate=/a%20b/c.pem&key=/k.pem&memory=1GiB&vcpus=2&bucket=s3express"
        "&egress=other_region"
    )
    config = WarmConfig(
        nodes=20,
        code=ErasureCode(4, 2),
        keep_warm_seconds=45.0,
        linger_seconds=0.5,
        ping_seconds=0.1,
        wake_seconds=4.0,
        read_seconds=2.0,
        write_seconds=9.0,
        pending_bytes=1 << 30,
        writes=3,
        max_objects=5000,
    )
    options = ExecutorOptions(
        prefix="team-a",
        region="eu-central-1",
        endpoint_url="http://127.0.0.1:9000",
        memory_bytes=1 << 30,
        vcpus=2,
    )
    assert WarmDeployment.parse(url) == WarmDeployment(
        executor="lambda",
        options=options,
        config=config,
        listen=Address("0.0.0.0", 7411),  # noqa: S104 - nobody listens
        advertised=Address("10.0.0.5", 17411),
        certificate=(Path("/a b/c.pem"), Path("/k.pem")),
        bucket="s3express",
        egress="other_region",
    )
    assert WarmDeployment.parse(
        "warm+gcf://p?listen=10.0.0.5:1&project=mine&account=a%40b.iam"
    ).options == ExecutorOptions(prefix="p", project="mine", service_account="a@b.iam")


@for_each(
    ("url", "named"),
    [
        ("", "not the scheme of a warm tier"),
        ("10.0.0.5:7411", "not the scheme of a warm tier"),
        ("http://10.0.0.5:7411", "not the scheme of a warm tier"),
        ("warm+local://stoker?listen=10.0.0.5:7411", "not the scheme of a warm tier"),
        ("warm+lambda://stoker", "listen"),
        ("warm+lambda://?listen=10.0.0.5:7411", "prefix"),
        ("warm+lambda://a/b?listen=10.0.0.5:7411", "prefix"),
        ("warm+lambda://stoker?listen=here", "listen"),
        (f"{FLEET}&advertise=10.0.0.5:0", "advertise"),
        ("warm+lambda://stoker?listen=0.0.0.0:7411", "add advertise="),
        ("warm+lambda://stoker?listen=[::]:7411", "add advertise="),
        (f"{FLEET}&listen=10.0.0.5:7412", "listen is given twice"),
        (f"{FLEET}&nodes=x", "nodes"),
        (f"{FLEET}&nodes=3", "nodes must be from 12"),
        (f"{FLEET}&nodes=12&nodes=12", "nodes is given twice"),
        (f"{FLEET}&nodes=-1", "nodes"),
        (f"{FLEET}&nodes=", "nodes has no value"),
        (f"{FLEET}&code=10%2B", "code"),
        (f"{FLEET}&code=ten", "code"),
        (f"{FLEET}&pending=8M", "pending"),
        (f"{FLEET}&pending=0", "pending_bytes"),
        (f"{FLEET}&key=/k.pem", "certificate= and key="),
        (f"{FLEET}&egress=moon", "egress"),
        (f"{FLEET}&endpoint=http://10.0.0.5/%0a", "endpoint"),
        (f"{FLEET}&&", "''"),
        (f"{FLEET}&memory=0", "memory_bytes"),
        (f"{FLEET}&region=\u00e9", "region"),
    ],
)
def test_what_is_wrong_is_named(url: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        WarmDeployment.parse(url)


@pytest.mark.parametrize("url", ["warm+lambda://user:hunter2@stoker?listen=10.0.0.5:7411", f"{FLEET}&secret=hunter2"])
def test_a_secret_in_a_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        WarmDeployment.parse(url)
    assert "hunter2" not in str(refused.value)


def test_a_text_is_wanted() -> None:
    with pytest.raises(ConfigError, match="must be a URL, not None"):
        WarmDeployment.parse(None)  # type: ignore[arg-type]  # as a user may give it


def test_a_setting_that_means_nothing_to_the_functions_is_refused_before_anything_listens() -> None:
    with pytest.raises(ConfigError, match="project has no effect for functions"):
        InProcessProxy(WarmDeployment.parse(f"{FLEET}&project=mine"), WarmSecret.generate(), MAC)


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("warm://127.0.0.1:7412", "http://127.0.0.1:7412"),
        (f"warm://10.0.0.5:7412?fingerprint={FINGERPRINT}", f"https://10.0.0.5:7412?fingerprint={FINGERPRINT}"),
        ("https://10.0.0.5:7412", "https://10.0.0.5:7412"),
    ],
)
def test_a_proxy_elsewhere_is_a_tier_server(url: str, server: str) -> None:
    assert parse_server_url(url) == server


@pytest.mark.parametrize("setting", ["backup=300s", "put_back=4"])
def test_a_removed_setting_is_accepted_with_a_warning_that_names_it(setting: str) -> None:
    name = setting.partition("=")[0]
    with pytest.warns(DeprecationWarning, match=f"^{name}= of a warm tier has no effect: .*; leave it out") as caught:
        assert WarmDeployment.parse(f"{FLEET}&{setting}") == WarmDeployment.parse(FLEET)
    assert [each.filename for each in caught] == [__file__]
