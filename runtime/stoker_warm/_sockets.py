"""Dialling a proxy, with TLS wherever others could listen in on the way.

The proxy's certificate may be one that it has signed itself: who dials is told the certificate's fingerprint by a
channel that is trusted already (the invocation, the URL), takes no other, and binds it into the handshake.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stoker.errors import ConfigError, ConnectionLostError, DeadlineError
from stoker_warm._handshake import is_private

P = TypeVar("P", bound=asyncio.BaseProtocol)

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9._-]{1,253}):(\d{1,5})", re.ASCII)
_FINGERPRINT = re.compile(r"[0-9a-f]{64}", re.ASCII)
_DIAL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Address:
    """A host and a TCP port.

    Attributes:
        host: a name or an address.
        port: 0 to 65535; 0 is for listening only, on any that is free.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return what ``host:port`` or ``[v6]:port`` says.

        Raises:
            ConfigError: it says something else.
        """
        match = _ADDRESS.fullmatch(text)
        if match is None or int(match[2]) > 65535:
            raise ConfigError(f"{text!r:.80} is no address; write for example 10.0.0.5:7411 or [fd00::5]:7411")
        return cls(match[1].strip("[]"), int(match[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """What the proxy shows, in PEM files.

    Attributes:
        chain: the certificate, its own first.
        key: its private key, without a passphrase.
    """

    chain: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """Return how to listen with it.

        Raises:
            ConfigError: the files cannot be used.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        try:
            context.load_cert_chain(self.chain, self.key, password=_no_passphrase)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the certificate {self.chain} and its key {self.key} cannot be used: {error}") from None
        return context

    def fingerprint(self) -> str:
        """Return the SHA-256 of the certificate, 64 hexadecimal digits.

        Raises:
            ConfigError: the file cannot be read.
        """
        try:
            text = self.chain.read_text("ascii")
            first = text[: text.index("-----END CERTIFICATE-----")] + "-----END CERTIFICATE-----\n"
            return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first[first.index("-----BEGIN") :])).hexdigest()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self.chain} holds no certificate: {error}") from None


async def dial(address: Address, fingerprint: str, protocol: Callable[[], P], seconds: float = _DIAL_SECONDS) -> P:
    """Connect to a proxy. Its certificate is compared by the handshake, which must be told the fingerprint, too.

    Args:
        address: of the proxy.
        fingerprint: of its certificate; empty for no TLS.
        protocol: makes what speaks.
        seconds: that it may take.

    Raises:
        ConfigError: without a fingerprint, others could listen in on the way; or it is none.
        ConnectionLostError: there is nobody.
        DeadlineError: nobody answers in time.
    """
    if fingerprint and not _FINGERPRINT.fullmatch(fingerprint):
        raise ConfigError("a certificate's fingerprint is its SHA-256 in 64 hexadecimal digits")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds):
            transport, spoken = await loop.create_connection(
                protocol, address.host, address.port, ssl=_pinning() if fingerprint else None
            )
    except TimeoutError:
        raise DeadlineError(f"the warm tier's proxy at {address} does not answer within {seconds:g} s") from None
    except OSError as error:  # ssl.SSLError is one
        raise ConnectionLostError(
            f"the warm tier's proxy at {address} cannot be reached: {error}; does `stoker warm proxy` run there?"
        ) from None
    peer = transport.get_extra_info("peername")
    if peer is not None:  # else it has ended already, and what speaks knows why
        try:
            check_privacy(peer[0], has_tls=bool(fingerprint))
        except BaseException:
            transport.abort()
            raise
    return spoken


def check_privacy(address: str, *, has_tls: bool) -> None:
    """Check that nobody else can listen in on connections of an address.

    Raises:
        ConfigError: others can, and there is no TLS.
    """
    if not has_tls and not is_private(address):
        raise ConfigError(
            f"{address} is on no private network: give the proxy a certificate and its key, and tell its fingerprint"
        )


def _pinning() -> ssl.SSLContext:
    """Return a context that takes any certificate: the handshake knows which one it must be."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _no_passphrase() -> str:
    raise ValueError("the key has a passphrase")
