"""A tier of machines that share it is opened by the plug-in of its URL's scheme."""

from __future__ import annotations

from importlib import metadata
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from stoker import open_store
from stoker._base.plugins import plugin_names
from stoker._cache.tiers import open_tier
from stoker._shared.secret import TierSecret
from stoker.abc import Readable
from stoker.errors import ConfigError, MissingExtraError
from stoker_warm._auth import WarmSecret

STORE = open_store("memory://data")


class SharedTier:
    """A tier that records the arguments it was opened with."""

    def __init__(self, url: str, *, store: Readable, processes: int) -> None:
        self.name = f"{url} for {processes}"
        self.store = store


def install(monkeypatch: pytest.MonkeyPatch, **points: str) -> None:
    installed = EntryPoints(EntryPoint(name, value, "stoker.tiers") for name, value in points.items())
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: installed.select(group=group))


def test_the_schemes_of_warm_tiers_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"warm", "warm+gcf", "warm+lambda"} <= set(plugin_names("stoker.tiers"))
    monkeypatch.setenv("STOKER_WARM_SECRET", WarmSecret.generate().reveal())
    monkeypatch.setenv("STOKER_TIER_SECRET", TierSecret.generate().reveal())
    assert open_tier("warm+lambda://stoker?listen=127.0.0.1:0", store=STORE).name == "warm"
    assert open_tier("warm://127.0.0.1:7412", store=STORE, processes=4).name == "shared"


def test_the_plug_in_of_the_scheme_gets_url_store_and_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, shared=f"{__name__}:SharedTier", other="no_such_module:tier")
    tier = open_tier("shared://host/x?limit=8GB", store=STORE, processes=3)
    assert tier.name == "shared://host/x?limit=8GB for 3"
    assert getattr(tier, "store", None) is STORE


def test_an_unregistered_scheme_is_refused_with_the_registered_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"the scheme 'ftp'; installed: .*warm, warm\+gcf, warm\+lambda; .* stoker.tiers"
    ):
        open_tier("ftp://host", store=STORE)
    install(monkeypatch)
    with pytest.raises(ConfigError, match="installed: none"):
        open_tier("warm://host", store=STORE)


@pytest.mark.parametrize("url", ["", "10.0.0.5:7411", "warm:", 7411, None, "\x1b[2J"])
def test_what_is_no_url_is_shown(url: str) -> None:
    with pytest.raises(ConfigError, match="a tier must be a URL") as refused:
        open_tier(url, store=STORE)
    assert ascii(url) in str(refused.value)


def test_a_text_that_may_hold_a_password_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        open_tier("user:secret@host", store=STORE)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("no_such_module:tier", "No module named 'no_such_module'"),
        (f"{__name__}:nothing", "no attribute 'nothing'"),
        ("support.failing_plugin:tier", r"ZeroDivisionError\('.*'\)"),
    ],
)
def test_an_entry_point_that_cannot_be_loaded_names_itself_and_the_cause(
    monkeypatch: pytest.MonkeyPatch, value: str, cause: str
) -> None:
    install(monkeypatch, broken=value)
    with pytest.raises(MissingExtraError, match=rf"broken \({value}\) cannot be loaded: .*{cause}"):
        open_tier("broken://host", store=STORE)
