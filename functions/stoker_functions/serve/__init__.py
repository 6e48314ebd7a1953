"""Data sets over HTTP: manifests, super-samples, batches and values for clients without bucket credentials.

The platforms' handlers are in :mod:`stoker_functions.aws` and :mod:`stoker_functions.gcp`. Any ASGI server can serve:

Example:
    >>> config = ServeConfig(datasets={"train": "s3://bucket/train"})
    >>> service = Service(config, stoker.open_store)
    >>> app = asgi_app(service.answer)  # uvicorn module:app
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stoker._deprecation import declare_renamed, load_renamed
from stoker._stores.access_token import TokenKeys
from stoker_functions.serve._answers import GOOGLE_ANSWER_BYTES, LAMBDA_ANSWER_BYTES, ServeConfig
from stoker_functions.serve._messages import (
    HttpError,
    Request,
    Response,
    asgi_app,
    from_asgi,
    from_lambda_url,
    receive_asgi,
    to_asgi,
    to_lambda_url,
)
from stoker_functions.serve._service import Service

__all__ = [
    "GOOGLE_ANSWER_BYTES",
    "LAMBDA_ANSWER_BYTES",
    "HttpError",
    "Request",
    "Response",
    "ServeConfig",
    "Service",
    "TokenKeys",
    "asgi_app",
    "from_asgi",
    "from_lambda_url",
    "receive_asgi",
    "to_asgi",
    "to_lambda_url",
]

declare_renamed(__name__, {"Refusal": "HttpError"})

if not TYPE_CHECKING:  # else type checkers would accept any name

    def __getattr__(name: str) -> Any:
        return load_renamed(__name__, name)
