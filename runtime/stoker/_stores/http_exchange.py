"""The state of one HTTP/1.1 exchange on a direct connection, without I/O.

A range of known length whose head arrives at once, as nearly all do, is received straight into its destination. h11
parses everything else: unusual heads, error responses, whole objects, chunked bodies.
"""

from __future__ import annotations

import re

import h11
from multidict import CIMultiDict

from stoker._stores.http import Destination, HttpRequest, HttpResponse, ResponseReceiver
from stoker.errors import ServerError, StokerError, TruncatedError

_MAX_HEAD_BYTES = 64 << 10
_FIRST_BYTES = 16 << 10  # most heads are shorter, and body bytes that arrive with a head are copied twice
_RANGE_HEAD = re.compile(
    rb"HTTP/1\.1 (200|206) [\t -~]*\r\n((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[\t -~]*\r\n)+)\r\n", re.ASCII
)
"""The strict form of the head of a range: HTTP/1.1, no folded lines, printable ASCII only."""


class DirectExchange(ResponseReceiver):
    """The sans-I/O state of one exchange on a direct connection.

    The transport receives bytes into :meth:`buffer`, and reports their number to :meth:`receive_count`. Both raise a
    StokerError if the response is invalid or does not match the request; after that, or once the response is complete,
    neither may be called again.

    Attributes:
        request_bytes: Bytes to send.
        has_begun: Whether any bytes have arrived.
        response: The response, once it is complete.
        is_last: Whether the connection must be closed after this exchange.
    """

    def __init__(self, request: HttpRequest, destination: Destination | None = None) -> None:
        super().__init__(request, destination)
        self._machine: h11.Connection | None = None
        self._direct: memoryview | None = None
        self._is_over = False
        self.request_bytes = request.serialise()
        self.has_begun = False
        self.response: HttpResponse | None = None
        self.is_last = True

    @property
    def is_in_body(self) -> bool:
        """Whether the head has arrived."""
        return bool(self._status)

    def buffer(self, scratch: memoryview) -> memoryview:
        """Return the memory for the next bytes: the rest of the destination, or the beginning of ``scratch``."""
        if self._direct is not None:
            return self._direct[self._received_bytes :]
        return scratch if self.has_begun else scratch[:_FIRST_BYTES]

    def receive_count(self, count: int, scratch: memoryview) -> bool:
        """Process ``count`` bytes in the buffer; return whether the response is complete."""
        if self._direct is not None:
            self._received_bytes += count
            return self._direct_is_whole(self._direct)
        is_first, self.has_begun = not self.has_begun, True
        if is_first and (into := self._begin_range(scratch, count)) is not None:
            return self._direct_is_whole(into)
        return self._parse(bytes(scratch[:count]))

    def receive_eof(self) -> bool:
        """Process the end of the connection; return whether it completes the response."""
        if self._direct is not None or not self._status:
            return False
        self._is_over = True
        return self._parse(b"")

    def _begin_range(self, scratch: memoryview, count: int) -> memoryview | None:
        """Process the first bytes if they have the head of a range of known length; return its destination."""
        match = None if self._destination is None else _RANGE_HEAD.match(scratch, 0, count)
        if match is None:
            return None
        lines = match[2].decode("ascii").split("\r\n")[:-1]
        headers = CIMultiDict((name, value.strip(" \t")) for name, _, value in (line.partition(":") for line in lines))
        if (into := self._sized_destination(headers)) is not None:
            self.begin(int(match[1]), headers)
            self._receive_directly(into, headers, scratch[match.end() : count])
        return into

    def _sized_destination(self, headers: CIMultiDict[str]) -> memoryview | None:
        """Return the destination if the body has exactly its bytes, and is not chunked."""
        into = None if self._destination is None else self._destination.into
        if into is None or "Transfer-Encoding" in headers:
            return None
        return into if headers.getall("Content-Length", ()) == [str(into.nbytes)] else None

    def _receive_directly(self, into: memoryview, headers: CIMultiDict[str], ahead: bytes | memoryview) -> None:
        """Receive the rest of the body straight into the destination; ``ahead`` are the bytes behind the head."""
        self._direct, self._received_bytes = into, min(len(ahead), into.nbytes)
        into[: self._received_bytes] = ahead[: self._received_bytes]
        wishes = ",".join(headers.getall("Connection", ())).lower()
        self.is_last = "close" in wishes or len(ahead) > self._received_bytes

    def _parse(self, data: bytes) -> bool:
        machine = self._machine = self._machine or self._create_machine()
        try:
            machine.receive_data(data)
            while (event := machine.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Response):
                    if (into := self._begin_response(machine, event)) is not None:
                        return self._direct_is_whole(into)
                elif isinstance(event, h11.Data):
                    self.receive(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    return self._finish_response(is_last=not self._is_reusable(machine))
                if self.is_enough:
                    return self._finish_response(is_last=True)
        except h11.RemoteProtocolError as error:
            raise self._protocol_error(error) from None
        return False

    def _create_machine(self) -> h11.Connection:
        """Return a parser that has seen the request, on which the form of the response depends."""
        machine = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
        host = [("Host", "x")]  # what was sent does not matter, only the method
        machine.send(h11.Request(method=self._call.method, target="/", headers=host))
        machine.send(h11.EndOfMessage())
        return machine

    def _is_reusable(self, machine: h11.Connection) -> bool:
        """Whether the connection can be used again: it is open, and nothing followed the response."""
        leftover, _ = machine.trailing_data
        return not self._is_over and machine.their_state is h11.DONE and not leftover

    def _protocol_error(self, error: h11.RemoteProtocolError) -> StokerError:
        """Return the error for invalid HTTP, without h11's message, which may quote the response."""
        if self._status and "closed connection" in str(error):
            got = self._received_bytes if self._destination is not None and not self._is_error else len(self._body)
            return TruncatedError(f"{self._call.address}: the connection ended after {got} bytes of the body")
        return ServerError(f"{self._call.address}: the response is not valid HTTP ({type(error).__name__})")

    def _begin_response(self, machine: h11.Connection, response: h11.Response) -> memoryview | None:
        """Process the head; return the destination if the body can be received straight into it."""
        headers = CIMultiDict((name.decode("latin-1"), value.decode("latin-1")) for name, value in response.headers)
        self.begin(response.status_code, headers)
        into = None if self._is_error else self._sized_destination(headers)
        if into is not None:
            self._receive_directly(into, headers, machine.trailing_data[0])
            self.is_last |= response.http_version < b"1.1"
        return into

    def _direct_is_whole(self, into: memoryview) -> bool:
        return self._received_bytes >= into.nbytes and self._finish_response(is_last=self.is_last)

    def _finish_response(self, *, is_last: bool) -> bool:
        self.response, self.is_last = self.finish(), is_last
        return True
