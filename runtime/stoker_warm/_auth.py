"""Authentication of a node and its proxy, and dialling a proxy.

The handshake is a mutual challenge and response over a secret that is never sent. It does no I/O:

``proxy: CHALLENGE {nonce} · node: PROOF {node, nonce, mac, and what else it says of itself} · proxy: WELCOME {mac}``

Each mac is HMAC-SHA256 over a label of its own and everything that was said: the protocol's version, the proxy's nonce,
the proof but for its mac, and the fingerprint of the TLS certificate, which the proxy knows of itself and the node saw.
So a proof is good for one connection only, cannot be turned round, and one that is passed on through another
certificate is wrong. TLS protects what follows; without it a proxy is dialled over loopback only.

The proxy's certificate may be self-signed: a node is told its SHA-256 by a channel that is trusted already, its
invocation, takes no other, and binds it into the handshake.
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
    """The secret that the proxy and the nodes of one deployment share."""

    __slots__ = ()
    variable = "STOKER_WARM_SECRET"
    owner = "the warm tier"
    remedy = "`stoker warm secret` makes one; give it to proxy and nodes as STOKER_WARM_SECRET"

    def mac(self, *said: str | int | Head) -> str:
        """Return the HMAC-SHA256 of what was said, in hexadecimal digits."""
        text = json.dumps(said, sort_keys=True, separators=(",", ":"))
        return hmac.new(self._key, text.encode(), sha256).hexdigest()


def _create_nonce() -> bytes:
    return secrets.token_bytes(_NONCE_BYTES)


class ProxyHandshake:
    """The side that listens, for one connection: returns what to send, and in the end knows the node.

    Args:
        secret: of the deployment.
        fingerprint: SHA-256 of this side's TLS certificate in hexadecimal digits, empty without TLS.
        create_nonce: returns 32 random bytes.

    Attributes:
        peer: what the node has said of itself, once that is proven: its name as ``node``, and its greeting; else None.
    """

    def __init__(
        self, secret: WarmSecret, *, fingerprint: str = "", create_nonce: Callable[[], bytes] = _create_nonce
    ) -> None:
        self._secret, self._fingerprint, self._nonce = secret, fingerprint, create_nonce().hex()
        self.peer: Head | None = None

    def begin(self, fingerprint: str = "") -> Message:
        """Return the challenge; which certificate the node shows, if any, does not matter."""
        return Kind.CHALLENGE, {"nonce": self._nonce}

    def receive(self, kind: Kind, head: Head) -> Message:
        """Return the welcome, if a frame proves that the node knows the secret.

        Raises:
            WireError: the frame is no proof, or not the first one.
            CredentialsError: the node does not know the secret.
        """
        _check_kind(Kind.PROOF, kind, self.peer is None)
        proof = dict(head)
        mac, node = _parse_field(proof, "mac", _HEX), _parse_field(proof, "node", _NAME)
        _parse_field(proof, "nonce", _HEX)
        del proof["mac"]
        said = (PROTOCOL_VERSION, self._fingerprint, self._nonce, proof)
        if not hmac.compare_digest(mac, self._secret.mac(_PROOF_LABEL, *said)):
            raise CredentialsError(
                f"somebody who calls itself {node} does not know the warm tier's secret, or saw another certificate; "
                f"{_SECRET_REMEDY}"
            )
        self.peer = {name: value for name, value in proof.items() if name != "nonce"}
        return Kind.WELCOME, {"mac": self._secret.mac(_WELCOME_LABEL, *said)}


class NodeHandshake:
    """The side that dials out, for one connection: returns what to send, and in the end knows the proxy.

    Args:
        secret: of the deployment.
        node: its name, up to 64 letters, digits, dots, underscores and hyphens.
        greeting: what else it says of itself; not ``node``, ``create_nonce`` or ``mac``.
        fingerprint: of the certificate that the proxy must show, empty without TLS.
        create_nonce: returns 32 random bytes.

    Attributes:
        peer: an empty head, once the proxy has proven that it knows the secret; else None.
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
        """Compare the certificate that the proxy showed, if any, with the expected one; send nothing.

        Raises:
            CredentialsError: it is another one.
        """
        if not hmac.compare_digest(fingerprint, self._fingerprint):
            raise CredentialsError(
                f"the proxy showed the TLS certificate {fingerprint[:16] or 'none'}…, expected was "
                f"{self._fingerprint[:16] or 'none'}…; check its address and the fingerprint that was passed on"
            )

    def receive(self, kind: Kind, head: Head) -> Message | None:
        """Return the proof for a challenge, and None for a welcome.

        Raises:
            WireError: the frame is not the next one of a handshake.
            CredentialsError: one of both does not know the secret.
        """
        if kind is Kind.FAILED:
            raise CredentialsError(
                f"the proxy did not take the proof that this side knows its secret; {_SECRET_REMEDY}"
            )
        if not self._transcript:
            _check_kind(Kind.CHALLENGE, kind, True)
            self._transcript = (PROTOCOL_VERSION, self._fingerprint, _parse_field(head, "nonce", _HEX), self._proof)
            return Kind.PROOF, {**self._proof, "mac": self._secret.mac(_PROOF_LABEL, *self._transcript)}
        _check_kind(Kind.WELCOME, kind, self.peer is None)
        if not hmac.compare_digest(
            _parse_field(head, "mac", _HEX), self._secret.mac(_WELCOME_LABEL, *self._transcript)
        ):
            raise CredentialsError(f"who listens there does not know the warm tier's secret; {_SECRET_REMEDY}")
        self.peer = {}
        return None


Handshake = ProxyHandshake | NodeHandshake


def _check_kind(expected: Kind, kind: Kind, is_due: bool) -> None:
    if kind is not expected or not is_due:
        raise WireError(f"a {kind.name} frame came in a handshake where {expected.name if is_due else 'none'} was due")


def _parse_field(head: Head, name: str, pattern: re.Pattern[str]) -> str:
    value = head.get(name)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise WireError(f"the field {name!r} of a handshake is no text like {pattern.pattern}")
    return value


async def connect_to_proxy(address: Address, fingerprint: str, create_protocol: Callable[[], P]) -> P:
    """Connect to a proxy. The handshake compares its certificate, so it needs the fingerprint as well.

    Args:
        address: of the proxy.
        fingerprint: of its certificate; empty for no TLS.
        create_protocol: makes what speaks.

    Raises:
        ConfigError: the proxy is not on this machine and there is no fingerprint, or it is none.
        ConnectionLostError: the proxy cannot be reached.
        DeadlineError: it does not answer in time.
    """
    if fingerprint and not _HEX.fullmatch(fingerprint):
        raise ConfigError("a certificate's fingerprint is its SHA-256 in 64 hexadecimal digits")
    if not fingerprint and not address.is_local:
        raise ConfigError(
            f"the warm tier's proxy at {address} is dialled without TLS, which is for loopback only: pass on the "
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
