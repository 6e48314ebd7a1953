"""One HTTP/1.1 exchange without I/O: the bytes to send, and where each byte that arrives is to be put.

A range whose length is announced is received straight into the memory it is for. h11 parses everything else: heads,
refusals, whole objects, bodies in chunks.
"""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

import h11
from multidict import CIMultiDict

from stoker._stores.http import (
    MAX_ERROR_BYTES,
    Call,
    Destination,
    Reply,
    checked_whole,
    object_bytes,
    object_bytes_of_range,
    without_secrets,
)
from stoker.errors import ServerError, StokerError, TruncatedError

__all__ = ["Answer"]

_MAX_HEAD_BYTES = 64 << 10
_FIRST_BYTES = 16 << 10  # most heads are shorter, and what comes with them of a body is copied several times


class Answer:
    """What comes back for one call.

    Bytes are received into :meth:`buffer`, and each time :meth:`received` is told how many; both raise a StokerError
    where the answer is not one, or not of what was asked. After that, or once it is whole, it takes no more.

    Attributes:
        request: the bytes to send.
        begun: whether anything has arrived.
        reply: the answer, once it is whole.
        is_last: whether the connection cannot carry another exchange after this one.
    """

    def __init__(self, call: Call, destination: Destination | None = None) -> None:
        self._call = call
        self._destination = destination
        self._machine = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._headers: CIMultiDict[str] = CIMultiDict()
        self._status = 0
        self._body = bytearray()
        self._direct: memoryview | None = None
        self._done = 0
        self._is_over = False
        self.request = self._serialised()
        self.begun = False
        self.reply: Reply | None = None
        self.is_last = True

    def _serialised(self) -> bytes:
        parts = urlsplit(self._call.url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        headers = [("Host", _host(parts)), *self._call.headers.items()]
        if not any(name.lower() == "accept-encoding" for name, _ in headers):
            headers.append(("Accept-Encoding", "identity"))
        sent = self._machine.send(h11.Request(method=self._call.method, target=target, headers=headers))
        end = self._machine.send(h11.EndOfMessage())
        return (sent or b"") + (end or b"")

    @property
    def is_in_body(self) -> bool:
        """Whether the head has arrived."""
        return bool(self._status)

    def buffer(self, scratch: memoryview) -> memoryview:
        """Return where the next bytes go: what is left of the destination, or the beginning of ``scratch``."""
        if self._direct is not None:
            return self._direct[self._done :]
        return scratch if self.begun else scratch[:_FIRST_BYTES]

    def received(self, count: int, scratch: memoryview) -> bool:
        """Take note of ``count`` bytes in the buffer; return whether the answer is whole."""
        self.begun = True
        if self._direct is not None:
            self._done += count
            return self._direct_is_whole()
        return self._parse(bytes(scratch[:count]))

    def ended(self) -> bool:
        """Take note of the end of the connection; return whether the answer is whole with it."""
        if self._direct is not None or not self._status:
            return False
        self._is_over = True
        return self._parse(b"")

    def _parse(self, data: bytes) -> bool:
        try:
            self._machine.receive_data(data)
            while (event := self._machine.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Response):
                    if self._begin(event):
                        return self._direct_is_whole()
                elif isinstance(event, h11.Data):
                    self._take(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    return self._finish(is_last=not self._can_go_on())
                if self._refused and len(self._body) >= MAX_ERROR_BYTES:
                    return self._finish(is_last=True)
        except h11.RemoteProtocolError as error:
            raise self._malformed(error) from None
        return False

    def _can_go_on(self) -> bool:
        """Whether the connection is as it was before the exchange: open, and with nothing behind the answer."""
        leftover, _ = self._machine.trailing_data
        return not self._is_over and self._machine.their_state is h11.DONE and not leftover

    def _malformed(self, error: h11.RemoteProtocolError) -> StokerError:
        """Return our error for what h11 says; not its text, which may quote what a stranger sent."""
        if self._status and "closed connection" in str(error):
            got = self._done if self._destination is not None and not self._refused else len(self._body)
            return TruncatedError(f"{self._call.address}: the connection ended after {got} bytes of the body")
        return ServerError(f"{self._call.address}: the answer is not valid HTTP ({type(error).__name__})")

    @property
    def _refused(self) -> bool:
        return bool(self._status) and self._status not in (200, 206)

    def _begin(self, response: h11.Response) -> bool:
        """Take the head; return whether the body goes straight to its destination."""
        self._status = response.status_code
        self._headers.extend((name.decode("latin-1"), value.decode("latin-1")) for name, value in response.headers)
        destination = self._destination
        if destination is None or self._refused:
            return False
        object_bytes_of_range(self._call, self._status, self._headers, destination)
        destination.begin()
        if self._headers.get("Content-Length") != str(destination.into.nbytes) or "Transfer-Encoding" in self._headers:
            return False
        self._direct = destination.into
        wishes = ",".join(self._headers.getall("Connection", ())).lower()
        ahead, _ = self._machine.trailing_data
        self._done = min(len(ahead), self._direct.nbytes)
        self._direct[: self._done] = ahead[: self._done]
        self.is_last = response.http_version < b"1.1" or "close" in wishes or len(ahead) > self._done
        return True

    def _too_much(self) -> TruncatedError:
        assert self._destination is not None  # noqa: S101 - only what has one can be too much
        size_bytes = self._destination.into.nbytes
        return TruncatedError(f"{self._call.address}: the store sent more than the {size_bytes} bytes asked for")

    def _take(self, data: bytes | bytearray) -> None:
        destination = self._destination
        if destination is None or self._refused:
            self._body += data
            if not self._refused:
                checked_whole(len(self._body), self._call.address)
            return
        if self._done + len(data) > destination.into.nbytes:
            raise self._too_much()
        destination.into[self._done : self._done + len(data)] = data
        self._done += len(data)

    def _direct_is_whole(self) -> bool:
        assert self._direct is not None  # noqa: S101 - only called where it is
        if self._done < self._direct.nbytes:
            return False
        return self._finish(is_last=self.is_last)

    def _finish(self, *, is_last: bool) -> bool:
        destination, call = self._destination, self._call
        if self._refused:
            size_bytes, body = 0, without_secrets(bytes(self._body[:MAX_ERROR_BYTES]), call.headers)
        elif destination is None:
            size_bytes, body = object_bytes(call, self._headers, len(self._body)), bytes(self._body)
        else:
            wanted_bytes = destination.into.nbytes
            if self._done < wanted_bytes:
                raise TruncatedError(f"{call.address}: the body ended after {self._done} of {wanted_bytes} bytes")
            size_bytes, body = object_bytes_of_range(call, self._status, self._headers, destination), b""
        self.is_last = is_last
        self.reply = Reply(status=self._status, headers=self._headers, body=body, size_bytes=size_bytes)
        return True


def _host(parts: SplitResult) -> str:
    """Return the host as signers sign it: in small letters, without the port that the scheme implies."""
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return host if parts.port in (None, {"http": 80, "https": 443}[parts.scheme]) else f"{host}:{parts.port}"
