"""TLS certificates of tier servers: from files, or ephemeral ones that clients verify by their fingerprint."""

from __future__ import annotations

import hashlib
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from stoker._base.plugins import require_extra
from stoker.errors import ConfigError

_LIFE = timedelta(days=3650)
"""Validity of an ephemeral certificate, which is lost with its process; clients verify only its fingerprint."""
_SKEW = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The certificate of a server.

    Attributes:
        context: TLS 1.3 context with the certificate and its key.
        fingerprint: SHA-256 of the certificate, 64 hexadecimal digits.
    """

    context: ssl.SSLContext
    fingerprint: str


def load_tls(chain: Path, key: Path) -> ServerTls:
    """Load a certificate from PEM files.

    Args:
        chain: Certificate chain, the server's own certificate first.
        key: Private key, without a passphrase.

    Raises:
        ConfigError: The files cannot be used.
    """
    return ServerTls(server_context(chain, key), read_fingerprint(chain))


def server_context(chain: Path, key: Path) -> ssl.SSLContext:
    """Return a TLS 1.3 server context with a certificate and its key; see :func:`load_tls`.

    Raises:
        ConfigError: The files cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(chain, key, password=_refuse_passphrase)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"the certificate {chain} and its key {key} cannot be used: {error}") from None
    return context


def read_fingerprint(chain: Path) -> str:
    """Return the SHA-256 of the first certificate in a PEM file, 64 hexadecimal digits.

    Raises:
        ConfigError: The file cannot be read, or holds no certificate.
    """
    try:
        text = chain.read_text("ascii")
        start = text.index(ssl.PEM_HEADER)
        der = ssl.PEM_cert_to_DER_cert(text[start : text.index(ssl.PEM_FOOTER, start) + len(ssl.PEM_FOOTER)])
    except (OSError, ValueError) as error:
        raise ConfigError(f"{chain} holds no certificate: {error}") from None
    return hashlib.sha256(der).hexdigest()


def _refuse_passphrase() -> str:
    raise ValueError("the key has a passphrase")


def create_ephemeral_tls(extra: str = "tier") -> ServerTls:
    """Create a self-signed certificate for this process.

    Args:
        extra: Extra of stoker that installs the package cryptography, for the error message.

    Raises:
        MissingExtraError: The package cryptography is not installed.
    """
    with _ephemeral_files(extra) as (chain, key):
        return load_tls(chain, key)


@contextmanager
def _ephemeral_files(extra: str) -> Iterator[tuple[Path, Path]]:
    """Yield the files of a new certificate and its key, which OpenSSL needs; only this user may read them."""
    with require_extra("a certificate for TLS, where --certificate and --key give none,", extra):
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    from tempfile import TemporaryDirectory  # imported only if needed

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "stoker tier")])
    now = datetime.now(UTC)
    certificate = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), now - _SKEW, now + _LIFE
    ).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    with TemporaryDirectory(prefix="stoker-tier-") as folder:
        chain_file, key_file = Path(folder, "certificate.pem"), Path(folder, "key.pem")
        chain_file.write_bytes(certificate.public_bytes(pem))
        key_file.touch(mode=0o600)
        key_file.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()))
        yield chain_file, key_file
