"""Functions on AWS Lambda, invoked and waited for."""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.exceptions import BotoCoreError, NoRegionError

from stoker._stores.aws_credentials import AwsCredentials
from stoker._stores.http import HttpRequest, HttpResponse, mask_secrets
from stoker.abc import Answer
from stoker.errors import ConfigError, ConnectionLostError, DeadlineError, StokerError
from stoker.fanout import error_of_function
from stoker_functions._executors.transport import HttpExecutor, parse_result, platform_error

_WAIT_FOR_REPORT = {"X-Amz-Invocation-Type": "RequestResponse", "X-Amz-Log-Type": "Tail"}
_LOST_ERRORS = ("Runtime.ExitError", "Sandbox.Failure")
_TIMED_OUT = "Sandbox.Timedout"
_BILLED = re.compile(r'(?:Billed Duration: |"billedDurationMs":\s*)([0-9]{1,9})')
_MEMORY = re.compile(r'(?:Memory Size: |"memorySizeMB":\s*)([0-9]{1,9})')
_COLD = re.compile(r"Init Duration: |Restore Duration: |\"(?:init|restore)DurationMs\"")
_REPORT = re.compile(r"^REPORT RequestId: .*$|^.*\"platform\.report\".*$", re.MULTILINE)


class LambdaExecutor(HttpExecutor):
    """Calls ``{prefix}-{function}`` by synchronous ``Invoke``; botocore reads the configuration and signs.

    Region, endpoint and credentials come from the options, else from the standard AWS environment and files.

    Raises:
        ConfigError: the AWS configuration is not valid.
    """

    name = "lambda"
    platform = "lambda"
    vendor = "Lambda"
    max_event_bytes = 6 << 20
    timeout_seconds = 930.0  # a function has at most 900
    max_calls = 1000  # the initial limit of an account is at most this
    heeds = frozenset({"prefix", "region", "endpoint_url"})

    async def __aenter__(self) -> LambdaExecutor:
        self._credentials = AwsCredentials(profile=None, other_remedies="")
        try:
            context = self._credentials.session.create_client(
                "lambda",
                region_name=self._options.region or os.environ.get("AWS_REGION"),  # which botocore does not read
                endpoint_url=self._options.endpoint_url,
            )
            async with context as client:  # it knows where Lambda is
                self._region, self._root = client.meta.region_name, client.meta.endpoint_url
        except NoRegionError:
            raise ConfigError(
                "the functions' AWS region is not known; set AWS_REGION or --function-region, or region= in a warm "
                "tier's URL"
            ) from None
        except (BotoCoreError, ValueError) as error:  # ValueError for an endpoint that is not a URL
            raise ConfigError(f"the AWS configuration is not valid: {error}") from None
        self._connect(self._root)
        return self

    async def _signed(self, function: str, data: bytes) -> HttpRequest:
        address = f"{self._root.rstrip('/')}/2015-03-31/functions/{quote(self._name(function), safe='')}"
        headers = {"Content-Type": "application/json", **_WAIT_FOR_REPORT}
        url = f"{address}/invocations"
        request = AWSRequest(method="POST", url=url, headers=headers, data=data)
        SigV4Auth((await self._credentials.current()).keys, "lambda", self._region).add_auth(request)
        headers = dict(request.headers.items())
        return HttpRequest(method="POST", url=url, headers=headers, address=address, data=data)

    def _answer(self, function: str, call: HttpRequest, reply: HttpResponse, seconds: float) -> Answer:
        if reply.is_error:
            code, document = reply.headers.get("x-amzn-ErrorType", ""), reply.document
            text = str(document.get("Message") or document.get("message") or "")
            raise platform_error(call.address, reply, code=code.partition(":")[0], text=text)
        name = self._name(function)
        result = parse_result(name, mask_secrets(reply.body, call.headers))
        if "X-Amz-Function-Error" in reply.headers:
            raise _function_error(name, result)
        answer = Answer(result=result, billed_seconds=seconds, memory_bytes=0, is_cold=None)
        return add_bill(answer, reply.headers.get("X-Amz-Log-Result", ""))


def _function_error(name: str, document: Mapping[str, Any]) -> StokerError:
    """Return the error of a function, or the error of the platform that ended it."""
    error_type = str(document.get("errorType") or "")
    message = str(document.get("errorMessage") or "no message")
    if error_type == _TIMED_OUT or (not error_type and "Task timed out after" in message):
        return DeadlineError(f"{name} ran out of time ({message}); it is called again")
    if error_type in _LOST_ERRORS:
        return ConnectionLostError(f"the instance that ran {name} ended ({message}); it is called again")
    return error_of_function(name, error_type or "Unhandled", message)


def add_bill(answer: Answer, log_result: str) -> Answer:
    """Return an answer with the billed time, memory and cold start from the end of an invocation's log.

    The report in the log is a line of text or, for functions that log in JSON, an object. The platform does not
    guarantee one; without it, the answer is unchanged.

    Args:
        answer: answer of the invocation.
        log_result: end of the log, in base64, as ``Invoke`` returns it.
    """
    try:
        log = base64.b64decode(log_result, validate=True).decode("utf-8", "replace")
    except (binascii.Error, ValueError):
        return answer
    report = next(reversed(_REPORT.findall(log)), "")
    seconds, memory = _BILLED.search(report), _MEMORY.search(report)
    if seconds is None or memory is None:
        return answer
    is_cold = _COLD.search(report) is not None
    return replace(answer, billed_seconds=int(seconds[1]) / 1000, memory_bytes=int(memory[1]) << 20, is_cold=is_cold)
