"""What a service may read and send."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stoker._stores.access_token import DATASET_NAME, TokenKeys
from stoker.errors import ConfigError

__all__ = ["GOOGLE_ANSWER_BYTES", "LAMBDA_ANSWER_BYTES", "ServeConfig"]

LAMBDA_ANSWER_BYTES = 4_500_000
"""Of 6 MB that Lambda sends, which base64 fills by four bytes for three."""

GOOGLE_ANSWER_BYTES = 31 << 20
"""Of 32 MiB that Cloud Run sends unless it is streamed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Settings of a service.

    Attributes:
        datasets: name → URL: what is served.
        token_keys: that clients' tokens are checked with; None accepts no token.
        answer_bytes: the largest body that the platform sends.
        redirect_seconds: that a signed URL to a larger one holds; only its request must begin within.
        answer_seconds: after which a request is put off rather than left to the platform's time limit.
        memory_bytes: for what is kept between requests, and what batches are read with.

    Raises:
        ConfigError: a value is out of range.
    """

    datasets: Mapping[str, str]
    token_keys: TokenKeys | None = None
    answer_bytes: int = LAMBDA_ANSWER_BYTES
    redirect_seconds: int = 60
    answer_seconds: float = 25.0
    memory_bytes: int = 128 << 20

    def __post_init__(self) -> None:
        for name in self.datasets:
            if not DATASET_NAME.fullmatch(name):
                raise ConfigError(f"the name {name[:80]!r} of a data set that is served is not {DATASET_NAME.pattern}")
        for name in ("answer_bytes", "redirect_seconds", "answer_seconds", "memory_bytes"):
            if not getattr(self, name) >= 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
