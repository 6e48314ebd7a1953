"""The wire of the warm tier gives out what was sent however the network cuts it, and refuses the rest, whole."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import CredentialsError, WireError
from stoker_warm._auth import NodeHandshake, ProxyHandshake, WarmSecret
from stoker_warm._frames import Frame, FrameReader, Head, Kind, OutgoingFrame
from support.fuzzed.wires import frames_of

WITH_BODY = (Kind.SET, Kind.FOUND)
WORDS = st.text(max_size=20)
VALUES = WORDS | st.integers(-(1 << 64), 1 << 64) | st.lists(WORDS, max_size=5)
HEADS: st.SearchStrategy[dict[str, Any]] = st.dictionaries(WORDS, VALUES, max_size=5)
BODIES = st.lists(st.binary(max_size=40) | st.sampled_from([0, 1, 16_384, 16_385, 30_000]).map(bytes), max_size=3)
MESSAGES = st.tuples(st.sampled_from(WITH_BODY), HEADS, BODIES)


def sent(messages: list[tuple[Kind, dict[str, Any], list[bytes]]], piece_bytes: int) -> bytes:
    pieces = []
    for message in messages:
        frame = OutgoingFrame(*message)
        while not frame.is_complete:
            pieces.append(bytes(frame.next_chunk(piece_bytes)))
    return b"".join(pieces)


def expected(messages: list[tuple[Kind, dict[str, Any], list[bytes]]]) -> list[tuple[Frame, bytes]]:
    return [(Frame(kind, head, len(b"".join(body))), b"".join(body)) for kind, head, body in messages]


@given(st.lists(MESSAGES, max_size=6), st.integers(1, 40_000), st.integers(1, 50_000))
def test_what_is_sent_arrives(
    messages: list[tuple[Kind, dict[str, Any], list[bytes]]], piece_bytes: int, max_bytes: int
) -> None:
    assert frames_of(sent(messages, piece_bytes), max(7, max_bytes)) == (expected(messages), None)


@given(st.lists(MESSAGES, min_size=1, max_size=4), st.data())
def test_what_is_cut_off_gives_the_frames_before_and_no_error(
    messages: list[tuple[Kind, dict[str, Any], list[bytes]]], data: st.DataObject
) -> None:
    whole = sent(messages, 10_000)
    frames, error = frames_of(whole[: data.draw(st.integers(0, len(whole) - 1))], 1 << 20)
    assert error is None
    assert frames == expected(messages)[: len(frames)]


@given(st.lists(MESSAGES, min_size=1, max_size=4), st.data())
def test_a_flipped_bit_changes_no_frame_before_it(
    messages: list[tuple[Kind, dict[str, Any], list[bytes]]], data: st.DataObject
) -> None:
    whole = bytearray(sent(messages, 10_000))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= 1 << data.draw(st.integers(0, 7))
    frames, _ = frames_of(bytes(whole), 1 << 20)
    before = [number for number in range(len(messages)) if len(sent(messages[: number + 1], 10_000)) <= place]
    assert frames[: len(before)] == expected(messages)[: len(before)]


@given(st.binary(max_size=200), st.binary(max_size=100))
def test_whatever_is_received_is_read_or_refused(prefix: bytes, garbage: bytes) -> None:
    for data in (prefix, garbage, b"SW\x03" + prefix, sent([(Kind.SET, {}, [prefix])], 100) + garbage):
        frames_of(data, 1)
        frames_of(data, 1 << 20)


@given(st.integers(1, 100_000), st.lists(st.integers(1, 60_000), max_size=5), st.data())
def test_nothing_is_written_to_a_body_after_it_is_discarded(
    body_bytes: int, cuts: list[int], data: st.DataObject
) -> None:
    memory = bytearray(body_bytes)

    def begin(kind: Kind, body_bytes: int) -> memoryview | None:
        return memoryview(memory) if kind is Kind.FOUND else None

    reader = FrameReader(begin)
    wire = sent([(Kind.FOUND, {}, [b"\xff" * body_bytes]), (Kind.PING, {}, [])], 1 << 20)
    redirected = data.draw(st.integers(0, len(wire)))
    kinds: list[Kind] = []
    places = sorted({min(cut, len(wire)) for cut in cuts} | {0, redirected, len(wire)})
    after = None
    for start, end in pairwise(places):
        if start == redirected:
            reader.discard_body()
            after = bytes(memory) if reader._remaining_bytes > 0 and reader._frame is not None else None
        while start < end:
            buffer = reader.get_buffer()
            taken = min(len(buffer), end - start)
            buffer[:taken] = wire[start : start + taken]
            start += taken
            kinds += [frame.kind for frame in reader.receive(taken)]
    assert kinds == [Kind.FOUND, Kind.PING]
    assert after is None or memory == after


@given(HEADS, HEADS, st.binary(min_size=32, max_size=40), st.binary(min_size=32, max_size=40))
def test_only_who_knows_the_secret_is_let_in(proof: Head, extra: Head, ours: bytes, theirs: bytes) -> None:
    proxy = ProxyHandshake(WarmSecret(ours))
    peer = NodeHandshake(WarmSecret(theirs), "n", {})
    challenge = proxy.begin()
    assert challenge is not None
    message = peer.receive(*challenge)
    assert message is not None
    with suppress(WireError, CredentialsError):
        proxy.receive(message[0], {**message[1], **{key: each for key, each in extra.items() if key != "mac"}})
    assert (proxy.peer is not None) <= (ours == theirs)
    other = ProxyHandshake(WarmSecret(ours))
    with suppress(WireError, CredentialsError):
        other.receive(Kind.PROOF, proof)
    assert other.peer is None
