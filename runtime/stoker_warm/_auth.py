"""Mutual authentication of a node and its proxy, and connecting to a proxy.

The handshake is a mutual challenge and response over a secret that is never sent. It does no I/O:

``proxy: CHALLENGE {nonce} · node: PROOF {node, nonce, mac, and the fields of its greeting} · proxy: WELCOME {mac}``

Each mac is HMAC-SHA256 over a label of its own and the transcript: the protocol's version, the proxy's nonce, the proof
without its mac, and the fingerprint of the TLS certificate, which the proxy has configured and the node has received.
Therefore a proof is valid for one connection only, it cannot be reflected, and it is wrong if it is relayed through
another certificate. TLS protects the frames that follow; without TLS, nodes connect over loopback only.

The proxy's certificate may be self-signed: a node receives its SHA-256 through a trusted channel, its invocation,
accepts no other certificate, and includes the fingerprint in the handshake.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import secrets
from collections.abc import Callable
from hashlib import sha256
from typing import TypeVar

from stoker._shared import secret as _shared
from stoker._shared.address import Address
from stoker._stores.options import create_fingerprint_context
from stoker.errors import ConfigError, ConnectionLostError, CredentialsError, DeadlineError, WireError
from stoker_warm._frames import PROTOCOL_VERSION, Head, Kind

P = TypeVar("P", bound=asyncio.BaseProtocol)

Message = tuple[Kind, Head]
"""A frame to send."""

_CONNECT_TIMEOUT_SECONDS = 5.0
_NONCE_BYTES = 32
_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_PROOF_LABEL, _WELCOME_LABEL = "stoker warm proof", "stoker warm welcome"
_SECRET_REMEDY = "check that STOKER_WARM_SECRET is the same for the proxy and its nodes"  # noqa: S105 - advice


class WarmSecret(_shared.EnvironmentSecret):
    """Secret that the proxy and the nodes of one deployment share."""

    __slots__ = ()
    variable = "STOKER_WARM_SECRET"
    owner = "the warm tier"
    remedy = "create one with `stoker warm secret`, and set it for the proxy and its nodes"

    def mac(self, *parts: str | int | Head) -> str:
        """Return the HMAC-SHA256 of some values, in hexadecimal digits."""
        text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
        return hmac.new(self._key, text.encode(), sha256).hexdigest()


def _create_nonce() -> bytes:
    return secrets.token_bytes(_NONCE_BYTES)


class ProxyHandshake:
    """The proxy's side of the handshake on one connection; returns the messages to send, and authenticates the node.

    Args:
        secret: Secret of the deployment.
        fingerprint: SHA-256 of this side's TLS certificate in hexadecimal digits; empty without TLS.
        create_nonce: Function that returns 32 random bytes.

    Attributes:
        peer: Name of the node (key ``node``) and the fields of its greeting; None until the node is authenticated.
    """

    def __init__(
        self, secret: WarmSecret, *, fingerprint: str = "", create_nonce: Callable[[], bytes] = _create_nonce
    ) -> None:
        self._secret, self._fingerprint, self._nonce = secret, fingerprint, create_nonce().hex()
        self.peer: Head | None = None

    def begin(self, fingerprint: str = "") -> Message:
        """Return the challenge. The node's certificate, if it has one, is ignored."""
        return Kind.CHALLENGE, {"nonce": self._nonce}

    def receive(self, kind: Kind, head: Head) -> Message:
        """Verify the node's proof, and return the welcome.

        Raises:
            WireError: The frame is not a PROOF, or it is a second one.
            CredentialsError: The node does not know the secret, or has received another certificate.
        """
        _check_kind(Kind.PROOF, kind, self.peer is None)
        proof = dict(head)
        mac, node = _parse_field(proof, "mac", _HEX), _parse_field(proof, "node", _NAME)
        _parse_field(proof, "nonce", _HEX)
        del proof["mac"]
        parts = (PROTOCOL_VERSION, self._fingerprint, self._nonce, proof)
        if not hmac.compare_digest(mac, self._secret.mac(_PROOF_LABEL, *parts)):
            raise CredentialsError(
                f"a peer named {node} does not know the warm tier's secret, or has received another certificate; "
                f"{_SECRET_REMEDY}"
            )
        self.peer = {name: value for name, value in proof.items() if name != "nonce"}
        return Kind.WELCOME, {"mac": self._secret.mac(_WELCOME_LABEL, *parts)}


class NodeHandshake:
    """The node's side of the handshake on one connection; returns the messages to send, and authenticates the proxy.

    Args:
        secret: Secret of the deployment.
        node: Name of the node: up to 64 letters, digits, dots, underscores and hyphens.
        greeting: Further fields to send, other than ``node``, ``create_nonce`` and ``mac``.
        fingerprint: Expected SHA-256 of the proxy's certificate in hexadecimal digits; empty without TLS.
        create_nonce: Function that returns 32 random bytes.

    Attributes:
        peer: An empty head once the proxy is authenticated; None before.
    """

    def __init__(
        self,
        secret: WarmSecret,
        node: str,
        greeting: Head,
        *,
        fingerprint: str = "",
        create_nonce: Callable[[], bytes] = _create_nonce,
    ) -> None:
        self._secret, self._fingerprint = secret, fingerprint
        self._proof = {**greeting, "node": node, "nonce": create_nonce().hex()}
        self._transcript: tuple[str | int | Head, ...] = ()
        self.peer: Head | None = None

    def begin(self, fingerprint: str = "") -> None:
        """Compare the proxy's certificate, if it has one, with the expected one; there is nothing to send.

        Raises:
            CredentialsError: The certificate is not the expected one.
        """
        if not hmac.compare_digest(fingerprint, self._fingerprint):
            raise CredentialsError(
                f"the proxy's TLS certificate is {fingerprint[:16] or 'none'}…, expected was "
                f"{self._fingerprint[:16] or 'none'}…; check its address and the fingerprint in the event"
            )

    def receive(self, kind: Kind, head: Head) -> Message | None:
        """Return the proof after a challenge, and None after a valid welcome.

        Raises:
            WireError: The frame is not the next one of the handshake.
            CredentialsError: The proxy or this node does not know the secret.
        """
        if kind is Kind.FAILED:
            raise CredentialsError(f"the proxy rejected this node's proof that it knows the secret; {_SECRET_REMEDY}")
        if not self._transcript:
            _check_kind(Kind.CHALLENGE, kind, True)
            self._transcript = (PROTOCOL_VERSION, self._fingerprint, _parse_field(head, "nonce", _HEX), self._proof)
            return Kind.PROOF, {**self._proof, "mac": self._secret.mac(_PROOF_LABEL, *self._transcript)}
        _check_kind(Kind.WELCOME, kind, self.peer is None)
        if not hmac.compare_digest(
            _parse_field(head, "mac", _HEX), self._secret.mac(_WELCOME_LABEL, *self._transcript)
        ):
            raise CredentialsError(f"the proxy does not know the warm tier's secret; {_SECRET_REMEDY}")
        self.peer = {}
        return None


Handshake = ProxyHandshake | NodeHandshake


def _check_kind(expected: Kind, kind: Kind, is_due: bool) -> None:
    if kind is not expected or not is_due:
        raise WireError(f"a {kind.name} frame arrived in a handshake instead of {expected.name if is_due else 'none'}")


def _parse_field(head: Head, name: str, pattern: re.Pattern[str]) -> str:
    value = head.get(name)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise WireError(f"the field {name!r} of a handshake is not a string that matches {pattern.pattern}")
    return value


async def connect_to_proxy(address: Address, fingerprint: str, create_protocol: Callable[[], P]) -> P:
    """Connect to a proxy. The handshake compares the proxy's certificate, so it needs the fingerprint as well.

    Args:
        address: Address of the proxy.
        fingerprint: SHA-256 of the proxy's certificate in hexadecimal digits; empty for no TLS.
        create_protocol: Function that creates the protocol of the connection.

    Raises:
        ConfigError: There is no fingerprint and the proxy is not on loopback, or the fingerprint is malformed.
        ConnectionLostError: The proxy cannot be reached.
        DeadlineError: The proxy does not answer within 5 s.
    """
    if fingerprint and not _HEX.fullmatch(fingerprint):
        raise ConfigError("the fingerprint of a certificate must be its SHA-256 in 64 hexadecimal digits")
    if not fingerprint and not address.is_local:
        raise ConfigError(
            f"the warm tier's proxy at {address} cannot be used without TLS, which is for loopback only; pass the "
            "fingerprint of its certificate"
        )
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_SECONDS):
            _, spoken = await loop.create_connection(
                create_protocol, address.host, address.port, ssl=create_fingerprint_context() if fingerprint else None
            )
    except TimeoutError:
        raise DeadlineError(
            f"the warm tier's proxy at {address} does not answer within {_CONNECT_TIMEOUT_SECONDS:g} s"
        ) from None
    except OSError as error:  # ssl.SSLError is one
        raise ConnectionLostError(
            f"the warm tier's proxy at {address} cannot be reached: {error}; does `stoker warm proxy` run there?"
        ) from None
    return spoken
