"""The secret of a job, and proofs of it between machines.

Both sides of a connection prove that they have the secret, each by an HMAC-SHA256 over numbers that both have drawn
and over the certificate of the connection (channel binding, as in RFC 5929): a machine between them, with a certificate
of its own, sees proofs that fit no other connection.
"""

from __future__ import annotations

import hmac
from hashlib import sha256

from stoker._shared.secret import EnvironmentSecret

SECRET_VARIABLE = "STOKER_CLUSTER_SECRET"  # noqa: S105 - a name


class ClusterSecret(EnvironmentSecret):
    """The secret that lets loaders and cache processes of a job use each other's caches."""

    __slots__ = ()
    variable = SECRET_VARIABLE
    owner = "the cluster cache"
    remedy = (
        "create one with 'python -c \"import secrets; print(secrets.token_urlsafe(32))\"', and set it as "
        f"{SECRET_VARIABLE} in the environment of all ranks"
    )

    def proof(self, role: str, nonces: bytes, fingerprint: str) -> bytes:
        """Return the proof of one side.

        Args:
            role: ``client`` or ``process``.
            nonces: numbers of the process and of the client.
            fingerprint: SHA-256 of the certificate of the connection; empty without TLS.
        """
        return hmac.digest(self._key, b"\0".join([role.encode(), fingerprint.encode(), nonces]), sha256)

    def derive_key(self, purpose: str) -> bytes:
        """Return a key of 32 bytes for another purpose."""
        return hmac.digest(self._key, b"key\0" + purpose.encode(), sha256)

    def is_proof(self, proof: bytes, role: str, nonces: bytes, fingerprint: str) -> bool:
        """Return whether a proof is the one that a side with this secret sends."""
        return hmac.compare_digest(proof, self.proof(role, nonces, fingerprint))
