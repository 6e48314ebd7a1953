"""Functions on AWS Lambda, invoked and waited for.

Waiting costs a connection each and brings the result, the error and the bill back with it; an invocation that nobody
waits for would need a place where all this is found later.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import aioboto3
from aiobotocore.awsrequest import AioAWSResponse
from aiobotocore.config import AioConfig
from botocore.awsrequest import AWSPreparedRequest
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError

from stoker._stores.http import Call, Failure, without_secrets
from stoker._stores.http_session import SessionReader
from stoker.abc import Answer, Executor
from stoker.errors import ConfigError, ConnectionLostError, CredentialsError, DeadlineError, StokerError
from stoker.fanout import ExecutorOptions, error_of_function
from stoker_functions._executors.transport import open_session, refusal, result_of

_MAX_EVENT_BYTES = 6 << 20
_CONCURRENCY = 1000  # what an account has at first is less or equal
_TIMEOUT_SECONDS = 930.0  # a function has at most 900
_LOST = ("Runtime.ExitError", "Sandbox.Failure")
_TIMED_OUT = "Sandbox.Timedout"
_BILLED = re.compile(r'(?:Billed Duration: |"billedDurationMs":\s*)([0-9]{1,9})')
_MEMORY = re.compile(r'(?:Memory Size: |"memorySizeMB":\s*)([0-9]{1,9})')
_COLD = re.compile(r"Init Duration: |Restore Duration: |\"(?:init|restore)DurationMs\"")
_REPORT = re.compile(r"^REPORT RequestId: .*$|^.*\"platform\.report\".*$", re.MULTILINE)


class LambdaExecutor(Executor):
    """Calls ``{prefix}-{function}`` by synchronous ``Invoke``, each at most once: botocore's own retries are off.

    Region, endpoint and credentials come from the options, else from the standard AWS environment and files.

    Raises:
        ConfigError: the AWS configuration is not valid.
    """

    name = "lambda"
    platform = "lambda"
    heeds = frozenset({"prefix", "region", "endpoint_url"})

    def __init__(self, options: ExecutorOptions) -> None:
        self.concurrency = options.concurrency or _CONCURRENCY
        self._options = options
        self._stack = AsyncExitStack()
        self._client: Any = None  # there are no types of this client

    async def __aenter__(self) -> LambdaExecutor:
        try:
            async with AsyncExitStack() as stack:
                context = aioboto3.Session().client(
                    "lambda",
                    region_name=self._options.region or os.environ.get("AWS_REGION"),  # which botocore does not read
                    endpoint_url=self._options.endpoint_url,
                    config=AioConfig(retries={"total_max_attempts": 1, "mode": "standard"}),
                )
                client = await stack.enter_async_context(context)
                timeout_seconds = self._options.timeout_seconds or _TIMEOUT_SECONDS
                session = open_session(client.meta.endpoint_url, timeout_seconds=timeout_seconds)
                client.meta.events.register("before-send.lambda", _Sender(await stack.enter_async_context(session)))
                self._stack, self._client = stack.pop_all(), client
        except NoRegionError:
            raise ConfigError(
                "the functions' AWS region is not known; set AWS_REGION, or --function-region; in a warm "
                "tier's URL region="
            ) from None
        except ConfigError:
            raise
        except (BotoCoreError, ValueError) as error:  # the latter for an endpoint that is no URL
            raise ConfigError(f"the AWS configuration is not valid: {error}") from None
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client = None
        await self._stack.aclose()

    async def call(self, function: str, event: Mapping[str, Any]) -> Answer:
        """Invoke a function and wait for its end.

        Raises:
            ConfigError: the event has more than 6 MB.
            ThrottledError: 429: the account's, or the function's, concurrency is used up.
            TransientError: the invocation was lost, or the function was killed or ran out of time.
            FunctionError: the function failed.
            StoreError: Lambda refuses for a reason that will stay.
        """
        if self._client is None:
            raise ConfigError("an executor is used inside its 'async with' block")
        name = f"{self._options.prefix}-{function}"
        payload = json.dumps(dict(event)).encode()
        if len(payload) > _MAX_EVENT_BYTES:
            raise ConfigError(f"an event for {name} has {len(payload)} bytes, Lambda takes 6 MB; plan smaller parts")
        begun_seconds = asyncio.get_running_loop().time()
        try:
            response = await self._client.invoke(
                FunctionName=name, InvocationType="RequestResponse", LogType="Tail", Payload=payload
            )
            body: bytes = await response["Payload"].read()
        except ClientError as error:
            raise _refused(name, error) from None
        except NoCredentialsError:
            raise CredentialsError(
                "no AWS credentials were found: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ) from None
        except BotoCoreError as error:
            raise CredentialsError(f"{name} could not be called: {error}") from None
        seconds = asyncio.get_running_loop().time() - begun_seconds
        result = result_of(name, body)
        if "FunctionError" in response:
            raise _failed(name, result)
        bill = bill_of(response.get("LogResult", ""))
        if bill is None:
            return Answer(result=result, billed_seconds=seconds, memory_bytes=0, is_cold=None)
        return Answer(result=result, billed_seconds=bill.seconds, memory_bytes=bill.memory_bytes, is_cold=bill.is_cold)


class _Sender:
    """Sends what botocore has signed: its own way sends nothing over an idle connection, and follows redirects."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def __call__(self, request: AWSPreparedRequest, **_: object) -> AioAWSResponse:
        headers = {name: value if isinstance(value, str) else value.decode() for name, value in request.headers.items()}
        address = request.url.removesuffix("/invocations")
        call = Call(method=request.method, url=request.url, headers=headers, address=address, data=request.body)
        reply = await SessionReader(self._session).read(call)
        answered = {name.lower(): value for name, value in reply.headers.items()}
        body = _Body(without_secrets(reply.body, headers))
        return AioAWSResponse(request.url, reply.status, answered, body)  # type: ignore[arg-type]  # as aiobotocore's own


@dataclass(slots=True)
class _Body:
    """A body that has arrived, as aiobotocore reads one."""

    data: bytes

    @property
    def content(self) -> _Body:
        return self

    async def read(self, _: int = -1) -> bytes:
        return self.data


def _failed(name: str, said: Mapping[str, Any]) -> StokerError:
    """Return the error of a function, or of the platform that ended it."""
    error_type, message = str(said.get("errorType") or ""), str(said.get("errorMessage") or "no message")
    if error_type == _TIMED_OUT or (not error_type and "Task timed out after" in message):
        return DeadlineError(f"{name} ran out of time ({message}); it is called again")
    if error_type in _LOST:
        return ConnectionLostError(f"the instance that ran {name} ended ({message}); it is called again")
    return error_of_function(name, error_type or "Unhandled", message)


def _refused(name: str, error: ClientError) -> StokerError:
    said, metadata = error.response.get("Error", {}), error.response.get("ResponseMetadata", {})
    status = metadata.get("HTTPStatusCode", 0)
    failure = Failure(
        address=name,
        status=status,
        code=str(said.get("Code", "")),
        text=str(said.get("Message", "")),
        headers=metadata.get("HTTPHeaders", {}),
    )
    return refusal(failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What an invocation is charged for.

    Attributes:
        seconds: initialisation included.
        memory_bytes: that the function is configured with.
        is_cold: whether the instance was started for it.
    """

    seconds: float
    memory_bytes: int
    is_cold: bool


def bill_of(log_result: str) -> Bill | None:
    """Return what the end of an invocation's log says, base64-encoded as ``Invoke`` returns it.

    The report is a line of text or, for functions that log in JSON, an object. None if there is none: the platform
    does not promise one.
    """
    try:
        log = base64.b64decode(log_result, validate=True).decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        return None
    reports = _REPORT.findall(log)
    if not reports:
        return None
    billed, memory = _BILLED.search(reports[-1]), _MEMORY.search(reports[-1])
    if billed is None or memory is None:
        return None
    return Bill(
        seconds=int(billed[1]) / 1000,
        memory_bytes=int(memory[1]) << 20,
        is_cold=_COLD.search(reports[-1]) is not None,
    )
