"""Functions on Google Cloud, called over HTTP with an identity token."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from urllib.parse import urlsplit

from stoker._stores.google_credentials import IdentityTokens
from stoker._stores.http import HttpRequest, HttpResponse
from stoker.abc import Answer
from stoker.errors import ConfigError, CredentialsError, StokerError
from stoker.fanout import ExecutorOptions, error_of_function
from stoker_functions._executors.transport import HttpExecutor, parse_result, platform_error

_SIZES = {"compact": (4 << 30, 1.0), "shuffle": (8 << 30, 2.0)}  # memory and processors, as in infra/terraform
_SIZE = (2 << 30, 1.0)  # of all other functions
_BILLED_STEP_SECONDS = 0.1
_FUNCTION_PLACEHOLDER = "{function}"


class GcfExecutor(HttpExecutor):
    """Posts events to ``https://{region}-{project}.cloudfunctions.net/{prefix}-{function}``.

    With an ``endpoint_url``, functions are below that URL instead. If it contains ``{function}``, the function's name
    replaces that, as for Cloud Run services: ``https://{function}-123456789012.us-central1.run.app``. An endpoint
    without TLS gets no token.

    Google does not report the billed time of a call. It is taken as the time of the answer, rounded up to 0.1 s, with
    the memory and processors of the options, else those that ``infra/terraform`` gives the function.

    Raises:
        ConfigError: neither region and project nor an endpoint are given.
    """

    name = "gcf"
    platform = "cloud-run"
    vendor = "Google"
    max_event_bytes = 32 << 20
    timeout_seconds = 3630.0  # a function has at most 3600
    max_calls = 100
    heeds = frozenset({"prefix", "region", "project", "endpoint_url", "service_account"})

    def __init__(self, options: ExecutorOptions) -> None:
        super().__init__(options)
        if options.endpoint_url is None and not (options.region and options.project):
            raise ConfigError(
                "functions on Google Cloud are found by region and project, or by an endpoint; set "
                "--function-region and --function-project, or --function-url; in a warm tier's URL, region= and "
                "project=, or endpoint="
            )
        self._root = options.endpoint_url or f"https://{options.region}-{options.project}.cloudfunctions.net"
        self._tokens: Callable[[str], IdentityTokens] | None = None

    async def __aenter__(self) -> GcfExecutor:
        self._connect(self._root)
        if urlsplit(self._root).scheme == "https":
            self._tokens = cache(partial(IdentityTokens, service_account=self._options.service_account))
        return self

    def vcpus(self, function: str) -> float:
        """Return the processors of a function: those of the options, else those that it is deployed with."""
        return self._options.vcpus or deployed_size(function)[1]

    async def _signed(self, function: str, data: bytes) -> HttpRequest:
        url, headers = self._url(function), {"Content-Type": "application/json"}
        if self._tokens is not None:
            headers["Authorization"] = f"Bearer {await self._tokens(url).current()}"
        return HttpRequest(method="POST", url=url, headers=headers, address=url, data=data)

    def _answer(self, function: str, call: HttpRequest, reply: HttpResponse, seconds: float) -> Answer:
        if reply.is_error:
            error = _response_error(function, call.url, reply)
            if isinstance(error, CredentialsError) and self._tokens is not None:
                self._tokens(call.url).discard(call.headers["Authorization"].removeprefix("Bearer "))
            raise error
        return Answer(
            result=parse_result(call.url, reply.body),
            billed_seconds=math.ceil(seconds / _BILLED_STEP_SECONDS) * _BILLED_STEP_SECONDS,
            memory_bytes=self._options.memory_bytes or deployed_size(function)[0],
            is_cold=None,
            vcpus=self.vcpus(function),
        )

    def _url(self, function: str) -> str:
        name = self._name(function)
        if _FUNCTION_PLACEHOLDER in self._root:
            return self._root.replace(_FUNCTION_PLACEHOLDER, name)
        return f"{self._root.rstrip('/')}/{name}"


def deployed_size(function: str) -> tuple[int, float]:
    """Return the memory in bytes and the number of processors that a function is deployed with."""
    return _SIZES.get(function, _SIZE)


def _response_error(function: str, url: str, reply: HttpResponse) -> StokerError:
    """Return the function's error, if the response has its type, else the platform's."""
    document = reply.document
    if isinstance(document.get("errorType"), str):
        return error_of_function(function, document["errorType"], str(document.get("errorMessage", "")))
    return platform_error(url, reply, text=reply.body.decode("utf-8", "replace"))
