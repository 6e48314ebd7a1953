from __future__ import annotations

import struct
from typing import Any

import pytest

from stoker.errors import WireError
from stoker_warm._frames import (
    HEADER_BYTES,
    MAX_HEAD_BYTES,
    MAX_SHARD_BYTES,
    NOTICE_KINDS,
    REPLY_KINDS,
    Frame,
    FrameReader,
    Head,
    Kind,
    OutgoingFrame,
    encode_frame,
)
from support.cases import for_each

GUARD = b"\xa5" * 32
PING = encode_frame(Kind.PING)


class Receiver:
    """Feeds a reader as a transport does, and keeps bodies in guarded memory."""

    def __init__(self, *, wants_bodies: bool = True, is_known: bool = True) -> None:
        self.reader = FrameReader(self.begin)
        if is_known:
            self.reader.max_head_bytes = MAX_HEAD_BYTES
        self.wants_bodies = wants_bodies
        self.memories: list[bytearray] = []
        self.begun: list[tuple[Kind, int]] = []
        self.frames: list[Frame] = []

    def begin(self, kind: Kind, body_bytes: int) -> memoryview | None:
        self.begun.append((kind, body_bytes))
        if not self.wants_bodies:
            return None
        self.memories.append(bytearray(GUARD + bytes(body_bytes) + GUARD))
        return memoryview(self.memories[-1])[len(GUARD) : len(GUARD) + body_bytes]

    def receive(self, data: bytes, max_bytes: int = 1 << 30) -> None:
        """Receive all of it, in parts of a maximum size."""
        while data:
            buffer = self.reader.get_buffer()
            taken = min(len(buffer), max_bytes, len(data))
            assert taken
            buffer[:taken] = data[:taken]
            data = data[taken:]
            self.frames.extend(self.reader.receive(taken))

    def bodies(self) -> list[bytes]:
        assert all(memory.startswith(GUARD) and memory.endswith(GUARD) for memory in self.memories)
        return [bytes(memory[len(GUARD) : -len(GUARD)]) for memory in self.memories]


def header(kind: int, head_bytes: int = 0, body_bytes: int = 0, *, magic: bytes = b"SW", version: int = 3) -> bytes:
    return struct.pack(">2sBBII", magic, version, kind, head_bytes, body_bytes)


def with_head(text: bytes) -> bytes:
    return header(Kind.GET, len(text)) + text


def test_a_frame_is_twelve_bytes_then_the_head_as_json() -> None:
    frame = encode_frame(Kind.GET, {"shard": "x"}, 0)
    assert frame == bytes.fromhex("53570312 0000000d 00000000") + b'{"shard":"x"}'
    assert HEADER_BYTES == 12


@pytest.mark.parametrize("max_bytes", [1, 7, 1 << 30])
def test_frames_come_out_as_they_went_in_however_they_are_cut(max_bytes: int) -> None:
    receiver = Receiver()
    body = bytes(range(256)) * 3
    heads: list[dict[str, Any]] = [{}, {"a": ["", "é"], "b": -(1 << 64), "c": []}, {"long": "x" * 40_000}]
    data = b"".join(encode_frame(Kind.SET, head, len(body)) + body for n, head in enumerate(heads)) + PING
    receiver.receive(data, max_bytes)
    assert [frame.head for frame in receiver.frames] == [*heads, {}]
    assert [frame.kind for frame in receiver.frames] == [Kind.SET] * 3 + [Kind.PING]
    assert receiver.bodies() == [body, body, body, b""]


def test_a_body_of_no_bytes_is_a_whole_frame_with_its_head() -> None:
    receiver = Receiver()
    receiver.receive(encode_frame(Kind.FOUND, {"mac": "0"}, 0))
    assert receiver.frames == [Frame(Kind.FOUND, {"mac": "0"}, 0)]


def test_the_rest_of_a_body_is_received_straight_into_the_memory_that_was_named() -> None:
    receiver = Receiver()
    receiver.receive(encode_frame(Kind.FOUND, {}, 100_000) + b"ab")
    buffer = receiver.reader.get_buffer()
    assert len(buffer) == 100_000 - 2
    assert buffer.obj is receiver.memories[0]


def test_a_head_that_is_under_way_does_not_reserve_more_than_it_needs() -> None:
    receiver = Receiver()
    receiver.receive(header(Kind.GET, MAX_HEAD_BYTES))
    assert len(receiver.reader.get_buffer()) == MAX_HEAD_BYTES


def test_each_frame_is_given_out_before_the_next_one_begins() -> None:
    receiver = Receiver()
    buffer = receiver.reader.get_buffer()
    data = encode_frame(Kind.PONG) + encode_frame(Kind.GET)
    buffer[: len(data)] = data
    frames = receiver.reader.receive(len(data))
    next(frames)
    assert [kind for kind, *_ in receiver.begun] == [Kind.PONG]
    assert [frame.kind for frame in frames] == [Kind.GET]


def test_an_unwanted_body_is_discarded_and_the_next_frame_is_read() -> None:
    receiver = Receiver(wants_bodies=False)
    receiver.receive(encode_frame(Kind.FOUND, {}, 3_000_000) + bytes(3_000_000) + PING)
    assert [(frame.kind, frame.body_bytes) for frame in receiver.frames] == [(Kind.FOUND, 3_000_000), (Kind.PING, 0)]


def test_a_discarded_body_leaves_its_memory_alone_from_then_on() -> None:
    receiver = Receiver()
    receiver.receive(encode_frame(Kind.FOUND, {}, 100_000) + b"b" * 40_000)
    before = receiver.bodies()
    receiver.reader.discard_body()
    receiver.receive(b"c" * 60_000 + PING)
    assert receiver.bodies()[0] == before[0] == b"b" * 40_000 + bytes(60_000)
    assert [frame.kind for frame in receiver.frames] == [Kind.FOUND, Kind.PING]


def test_discarding_where_no_body_is_under_way_changes_nothing() -> None:
    receiver = Receiver()
    receiver.reader.discard_body()
    receiver.receive(encode_frame(Kind.FOUND, {}, 40_000) + b"b" * 40_000 + PING[:5])
    receiver.reader.discard_body()
    receiver.receive(PING[5:])
    assert receiver.bodies() == [b"b" * 40_000, b""]
    assert [frame.kind for frame in receiver.frames] == [Kind.FOUND, Kind.PING]


def test_a_closed_reader_throws_away_what_comes_and_gives_out_nothing() -> None:
    receiver = Receiver()
    receiver.receive(encode_frame(Kind.FOUND, {}, 10) + b"12345")
    receiver.reader.close()
    receiver.receive(b"67890" + PING)
    assert receiver.bodies() == [b"12345" + bytes(5)]
    assert receiver.frames == []


@for_each(
    ("data", "says"),
    [
        (b"GET / HTTP/1.1\r\n", "uses another protocol"),
        (b"\x16\x03\x01\x02\x00" + bytes(7), "uses another protocol"),
        (header(Kind.PING, version=2), "version 2 arrived, not 3"),
        (header(0), "kind 0"),
        (header(255), "kind 255"),
        (header(Kind.GET, MAX_HEAD_BYTES + 1), "at most 65536"),
        (header(Kind.GET, 0xFFFFFFFF), "at most 65536"),
        (header(Kind.FOUND, 0, MAX_SHARD_BYTES + 1), "at most 16777216"),
        (header(Kind.SET, 0, MAX_SHARD_BYTES + 1), "at most 16777216"),
        (header(Kind.PING, 0, 1), "at most 0"),
        (with_head(b"[]"), "must be a JSON object, not list"),
        (with_head(b"3"), "must be a JSON object, not int"),
        (with_head(b"{"), "not valid JSON"),
        (with_head(b" "), "not valid JSON"),
        (with_head(b"{}{}"), "not valid JSON"),
        (with_head(b'{"a":NaN}'), "field 'a' of a head is not a string, an integer or a list of strings"),
        (with_head(b'{"a":-Infinity}'), "not a string, an integer"),
        (with_head(b'{"a":1e999}'), "not a string, an integer"),
        (with_head(b'{"a":1.0}'), "not a string, an integer"),
        (with_head(b'{"a":true}'), "not a string, an integer"),
        (with_head(b'{"a":null}'), "not a string, an integer"),
        (with_head(b'{"a":{}}'), "not a string, an integer"),
        (with_head(b'{"a":[1]}'), "not a string, an integer"),
        (with_head(b'{"a":["",[]]}'), "not a string, an integer"),
        (with_head(b'{"a":' + b"9" * 5000 + b"}"), "not valid JSON"),
        (with_head(b'{"a":"\xff"}'), "not valid JSON"),
        (with_head("{}".encode("utf-16")), "not valid JSON"),
        (with_head(b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}"), "a head"),
        (with_head(b'{"a":' * 10_000 + b"1" + b"}" * 10_000), "a head"),
    ],
)
def test_what_is_not_the_protocol_is_refused_and_nothing_more_is_taken(data: bytes, says: str) -> None:
    receiver = Receiver()
    with pytest.raises(WireError, match=says):
        receiver.receive(PING + data)
    assert [frame.kind for frame in receiver.frames] == [Kind.PING]
    with pytest.raises(WireError, match=says):
        receiver.receive(PING)
    assert len(receiver.frames) == 1


@pytest.mark.parametrize("kind", [Kind.PROOF, Kind.GET, Kind.FAILED])
def test_of_a_peer_that_is_not_known_no_head_above_4_kib_is_received(kind: Kind) -> None:
    receiver = Receiver(is_known=False)
    receiver.receive(header(kind, 4096))
    assert len(receiver.reader.get_buffer()) <= 16 << 10
    receiver = Receiver(is_known=False)
    with pytest.raises(WireError, match="4097 bytes; at most 4096"):
        receiver.receive(header(kind, 4097))


def test_lengths_are_refused_before_the_head_is_there_or_anything_begins() -> None:
    receiver = Receiver()
    with pytest.raises(WireError):
        receiver.receive(header(Kind.FOUND, 10, MAX_SHARD_BYTES + 1))
    assert receiver.begun == []


def test_what_begin_refuses_ends_the_reader_too() -> None:
    def begin(kind: Kind, body_bytes: int) -> memoryview | None:
        raise WireError("not asked for")

    reader = FrameReader(begin)
    reader.get_buffer()[: len(PING)] = PING
    for _ in range(2):
        with pytest.raises(WireError, match="not asked for"):
            list(reader.receive(len(PING)))


@pytest.mark.parametrize(
    ("kind", "head", "body_bytes"),
    [
        (Kind.PING, {}, 1),
        (Kind.SET, {}, MAX_SHARD_BYTES + 1),
        (Kind.GET, {"a": "x" * MAX_HEAD_BYTES}, 0),
        (Kind.GET, {"a": float("nan")}, 0),
        (Kind.GET, {"a": b"bytes"}, 0),
        (Kind.GET, {"a": 0.5}, 0),
        (Kind.GET, {"a": {}}, 0),
        (Kind.GET, {"a": ["b", 1]}, 0),
    ],
)
def test_a_frame_that_the_peer_would_refuse_is_not_made(kind: Kind, head: Head, body_bytes: int) -> None:
    with pytest.raises(WireError):
        encode_frame(kind, head, body_bytes)


def test_notices_are_neither_requests_nor_answers() -> None:
    assert not NOTICE_KINDS & (set(REPLY_KINDS) | set().union(*REPLY_KINDS.values()))


def test_every_request_may_be_answered_by_failed_and_no_answer_is_a_request() -> None:
    assert all(Kind.FAILED in answers for answers in REPLY_KINDS.values())
    assert not set().union(*REPLY_KINDS.values()) & set(REPLY_KINDS)


# What is to be sent.


def all_of(frame: OutgoingFrame, piece_bytes: int = 1 << 20) -> list[bytes]:
    pieces = []
    while not frame.is_complete:
        pieces.append(bytes(frame.next_chunk(piece_bytes)))
    return pieces


def test_a_small_body_is_sent_in_one_piece_with_its_head() -> None:
    frame = OutgoingFrame(Kind.SET, {}, [b"one", b"", b"two"])
    assert not frame.has_begun
    assert all_of(frame) == [encode_frame(Kind.SET, {}, 6) + b"onetwo"]
    assert frame.has_begun


def test_a_large_body_is_sent_as_views_of_its_memory_in_pieces() -> None:
    data = memoryview(bytes(range(250)) * 1000)
    frame = OutgoingFrame(Kind.SET, {}, [data, data[:10]])
    frame.next_chunk(100_000)
    piece = frame.next_chunk(100_000)
    assert isinstance(piece, memoryview)
    assert piece.obj is data.obj
    assert not frame.is_complete
    assert [len(piece), *map(len, all_of(frame, 100_000))] == [100_000, 100_000, 50_000, 10]
    assert frame.is_complete


def test_a_part_that_is_an_array_counts_its_bytes() -> None:
    words = memoryview(bytearray(80_000)).cast("Q")
    frame = OutgoingFrame(Kind.SET, {}, [words])
    assert sum(map(len, all_of(frame))) == len(encode_frame(Kind.SET)) + 80_000


def test_a_head_is_never_cut_into_pieces() -> None:
    frame = OutgoingFrame(Kind.SET, {"a": "b" * 1000}, [bytes(100_000)])
    assert frame.next_chunk(100) == encode_frame(Kind.SET, {"a": "b" * 1000}, 100_000)
