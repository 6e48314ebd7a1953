"""What the pages say of the warm tier: their URLs are ones, and their table has all settings with their defaults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stoker._shared.client import ServerAddress
from stoker.errors import ConfigError
from stoker_warm._config import WarmDeployment
from stoker_warm._tier import parse_server_url

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "docs" / name for name in ("tiers.md", "function-cloud.md")]
URL = re.compile(r"warm(?:\+lambda|\+gcf)?://[^`'\"\s]*")
FLEET = "warm+lambda://stoker?listen=127.0.0.1:0"


@pytest.fixture(scope="module")
def rows() -> list[list[str]]:
    """The table of settings: names and defaults of each row."""
    page = (ROOT / "docs" / "tiers.md").read_text("utf-8")
    table = page.partition("| setting of a proxy |")[2].partition("\n\n")[0]
    return [line.split(" | ")[:2] for line in table.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_url_of_a_tier_is_one(page: Path) -> None:
    # In the place of what is the reader's stand capitals.
    urls = {re.sub(r"=ADDRESS", "=http://10.0.0.5:80", each) for each in URL.findall(page.read_text("utf-8"))}
    urls = {each for each in urls if not re.search("PREFIX|HOST", each)}
    assert urls
    for url in urls:
        if url.startswith("warm://"):
            ServerAddress.parse(parse_server_url(url))
        else:
            WarmDeployment.parse(url)


def test_the_table_has_all_settings_and_no_others(rows: list[list[str]]) -> None:
    with pytest.raises(ConfigError, match="tier; use ") as caught:
        WarmDeployment.parse(f"{FLEET}&nonsense=1")
    settings = set(str(caught.value).partition("tier; use ")[2].split(", "))
    assert {name for names, _ in rows for name in re.findall(r"`(\w+)`", names)} == settings


def test_settings_given_as_the_table_has_them_change_nothing(rows: list[list[str]]) -> None:
    given = {
        name: re.sub(r"[`,]", "", default)
        for names, defaults in rows
        for name, default in zip(re.findall(r"`(\w+)`", names), defaults.split(", "), strict=False)
        if re.match(r"`?\d", default)
    }
    assert {"nodes", "code", "linger", "ping", "wake", "read", "write", "writes", "objects", "pending"} <= set(given)
    told = "".join(f"&{name}={default}" for name, default in given.items())
    assert WarmDeployment.parse(FLEET + told) == WarmDeployment.parse(FLEET)
