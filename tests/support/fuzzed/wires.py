"""Readers of messages between peers of the warm tier: frames, and the handshake."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from contextlib import suppress

from stoker.errors import CredentialsError, WireError
from stoker_warm import _auth as handshake
from stoker_warm import _frames as wire
from stoker_warm._auth import NodeHandshake, ProxyHandshake, WarmSecret
from stoker_warm._frames import HEADER_BYTES, MAX_HEAD_BYTES, Frame, FrameReader, Kind, encode_frame
from support.fuzzed.mutations import mutated_bytes, mutated_json
from support.fuzzed.reader import Reader

__all__ = ["WIRES", "frames_of"]

GUARD = b"\xa5" * 16
SECRET = WarmSecret(bytes(32))
GREETING = {"instance": "0123456789abcdef", "term": 3, "hash": "é"}
BODY = bytes(range(256))


def frames_of(data: bytes, max_bytes: int) -> tuple[list[tuple[Frame, bytes]], WireError | None]:
    """Receive ``data`` in parts of at most ``most_bytes``; return the frames, with their bodies, and the outcome.

    Checks that no byte is written outside the given memory, and none after an error.
    """
    memories: list[bytearray] = []
    frames: list[tuple[Frame, bytes]] = []
    begun: list[tuple[Kind, int]] = []

    def begin(kind: Kind, body_bytes: int) -> memoryview | None:
        begun.append((kind, body_bytes))
        if body_bytes > len(data):  # it cannot be complete, so it needs no memory
            memories.append(bytearray())
            return None
        memories.append(bytearray(GUARD + bytes(body_bytes) + GUARD))
        return memoryview(memories[-1])[len(GUARD) : -len(GUARD)]

    reader, left = FrameReader(begin), memoryview(data)
    reader.max_head_bytes = MAX_HEAD_BYTES
    try:
        while left:
            buffer = reader.get_buffer()
            taken = min(len(buffer), len(left), max_bytes)
            assert taken > 0, "nowhere to receive to"
            buffer[:taken] = left[:taken]
            left = left[taken:]
            for frame in reader.receive(taken):
                assert (frame.kind, frame.body_bytes) == begun[-1]
                assert len(begun) == len(frames) + 1
                frames.append((frame, bytes(memories[-1][len(GUARD) : -len(GUARD)])))
    except WireError as error:
        before = list(map(bytes, memories))
        reader.get_buffer()[:1] = b"x"
        assert list(map(bytes, memories)) == before
        return frames, error
    finally:
        assert all(not each or (each.startswith(GUARD) and each.endswith(GUARD)) for each in memories)
    return frames, None


def _read_frames(data: bytes) -> str:
    whole, error = frames_of(data, len(data) or 1)
    for max_bytes in (1,) if len(data) < 150 else (13,):
        pieces, its_error = frames_of(data, max_bytes)
        assert (pieces, str(its_error)) == (whole, str(error)), "it depends on how the network cuts it"
    said = b"".join(encode_frame(f.kind, f.head, f.body_bytes) + body for f, body in whole)
    assert frames_of(said, 1 << 20) == (whole, None)
    if error is not None:
        raise error
    return "read" if whole else "unfinished"


def _conversations() -> list[bytes]:
    get = encode_frame(Kind.GET, {"shard": "x.10+2.7", "mac": "7"})
    found = encode_frame(Kind.FOUND, {"mac": "f" * 56, "late": 2**64}, len(BODY)) + BODY
    put = encode_frame(Kind.SET, {"shard": "x", "é": ["a", ""]}, 3) + b"abc"
    listed = encode_frame(Kind.LISTED, {"shards": [f"x.{n}" for n in range(30)], "more": 0})
    return [get + found + encode_frame(Kind.PING), put + encode_frame(Kind.DELETE), listed + get]


HEADERS = [
    struct.pack(">2sBBII", magic, version, kind, head_bytes, body_bytes)
    for magic, version, kind, head_bytes, body_bytes in (
        (b"WS", 3, 16, 0, 0), (b"SW", 0, 16, 0, 0), (b"SW", 3, 99, 0, 0), (b"SW", 3, 2, 2**16 + 1, 0),
        (b"SW", 3, 18, 2**32 - 1, 0), (b"SW", 3, 19, 0, 2**24 + 1), (b"SW", 3, 16, 0, 1), (b"SW", 3, 21, 2, 2**24),
    )
]  # fmt: skip


def _mutated_frames(data: bytes, pool: Sequence[bytes], rng: random.Random) -> bytes:
    """Change bytes, insert a false header, or change the head of the first frame with a correct length."""
    action = rng.randrange(4)
    if action == 0 or len(data) < HEADER_BYTES:
        return mutated_bytes(data, pool, rng)
    if action == 1:
        return rng.choice([b"", data, data[: rng.randrange(len(data))]]) + rng.choice(HEADERS) + data
    head_bytes = min(int(struct.unpack_from(">I", data, 4)[0]), len(data))
    text = mutated_json(data[HEADER_BYTES : HEADER_BYTES + head_bytes], [b"{}"], rng)
    if rng.random() < 0.1:
        text = rng.choice(
            [b'{"a":' + b"[" * 9 + b"]" * 9 + b"}", b'{"a":1,"a":1}', b'{"a":"\\ud800"}', b'{"a":1.0}', b"7"]
        )
    return data[:4] + struct.pack(">I", len(text)) + data[8:HEADER_BYTES] + text + data[HEADER_BYTES + head_bytes :]


# The handshake, as one JSON object: a proof for a known challenge, a challenge or a welcome.


def _proof() -> bytes:
    peer = NodeHandshake(SECRET, "warm-7", GREETING, create_nonce=lambda: b"p" * 32)
    message = peer.receive(Kind.CHALLENGE, {"nonce": (b"x" * 32).hex()})
    assert message is not None
    return wire._dumps(message[1]).encode()


def _read_handshake(data: bytes) -> str:
    head = wire._parse_head(data)
    proxy = ProxyHandshake(SECRET, create_nonce=lambda: b"x" * 32)
    peer = NodeHandshake(SECRET, "warm-8", {})
    with suppress(WireError, CredentialsError):
        peer.receive(Kind.CHALLENGE, head)
        peer.receive(Kind.WELCOME, head)
    assert peer.peer is None
    proxy.receive(Kind.PROOF, head)
    assert proxy.peer is not None
    assert proxy.peer == {"node": "warm-7", **GREETING}, "something else was proven"
    return "read"


WIRES = {
    "frames of the warm tier": Reader(
        read=_read_frames,
        seeds=_conversations,
        mutate=_mutated_frames,
        errors=(WireError,),
        kinds=("read", "unfinished"),
        refusing=(wire._parse_header, wire._check_lengths, wire._parse_head, wire._check_flat),
    ),
    "handshake of the warm tier": Reader(
        read=_read_handshake,
        seeds=lambda: [_proof()],
        mutate=mutated_json,
        errors=(WireError, CredentialsError),
        refusing=(ProxyHandshake.receive, handshake._parse_field),
    ),
}
