from __future__ import annotations

import pytest

from stoker._shared.address import Address
from stoker.errors import ConfigError
from support.cases import for_each


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7412", "127.0.0.1", 7412),
        ("tier.internal:0", "tier.internal", 0),
        ("[fd00::5]:65535", "fd00::5", 65535),
        ("[::]:7411", "::", 7411),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, host: str, port: int) -> None:
    assert Address.parse(text) == Address(host, port)
    assert str(Address(host, port)) == text


@for_each(
    "text",
    [
        "",
        "7411",
        "host",
        "host:",
        ":7411",
        "host:65536",
        "host:-1",
        "host:\u0667",
        "fd00::5:7411",
        "[host]:7411",
        "a b:1",
    ],
)
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not HOST:PORT; write for example 10\.0\.0\.5:7411 or \[fd00::5\]:7411"):
        Address.parse(text)


@pytest.mark.parametrize(
    ("host", "is_local", "is_everywhere"),
    [
        ("127.0.0.1", True, False),
        ("::1", True, False),
        ("localhost", True, False),
        ("10.0.0.5", False, False),
        ("0.0.0.0", False, True),  # noqa: S104 - nobody listens
        ("::", False, True),
    ],
)
def test_an_address_tells_who_can_connect_to_it(host: str, is_local: bool, is_everywhere: bool) -> None:
    address = Address(host, 7411)
    assert (address.is_local, address.is_everywhere) == (is_local, is_everywhere)
