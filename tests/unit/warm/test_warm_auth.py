from __future__ import annotations

import copy
import pickle
import secrets
from typing import Any

import pytest

from stoker.errors import ConfigError, CredentialsError, WireError
from stoker_warm._auth import Handshake, Message, NodeHandshake, ProxyHandshake, WarmSecret
from stoker_warm._frames import Head, Kind
from support.cases import for_each

KEY = bytes(range(40))
SECRET = WarmSecret(KEY)
OTHER = WarmSecret(b"x" * 40)
GREETING = {"instance": "0123456789abcdef", "term": 3, "hash": "é", "list": ["a", ""]}
PRINT = "ab" * 32


def node(secret: WarmSecret = SECRET, greeting: Head = GREETING, **options: Any) -> NodeHandshake:
    return NodeHandshake(secret, "warm-7", greeting, **options)


def sent(side: Handshake, message: Message | None) -> Message | None:
    assert message is not None
    return side.receive(*message)


def shaken(proxy: ProxyHandshake, peer: NodeHandshake) -> None:
    """Carry the messages of a handshake from one side to the other."""
    peer.begin(peer._fingerprint)
    assert sent(peer, sent(proxy, sent(peer, proxy.begin()))) is None


def test_both_sides_know_each_other_in_the_end_and_not_before() -> None:
    proxy, peer = ProxyHandshake(SECRET), node()
    proof = sent(peer, proxy.begin())
    assert (proxy.peer, peer.peer) == (None, None)
    welcome = sent(proxy, proof)
    assert proxy.peer == {"node": "warm-7", **GREETING}
    assert peer.peer is None
    assert sent(peer, welcome) is None
    assert peer.peer == {}


def test_nonces_are_of_32_random_bytes_and_never_the_same() -> None:
    nonces = {message[1]["nonce"] for message in (ProxyHandshake(SECRET).begin() for _ in range(50)) if message}
    assert len(nonces) == 50
    assert {len(bytes.fromhex(nonce)) for nonce in nonces} == {32}


def test_a_wrong_secret_fails_at_the_proxy_which_says_what_to_check() -> None:
    proxy = ProxyHandshake(SECRET)
    with pytest.raises(CredentialsError, match="check that STOKER_WARM_SECRET is the same"):
        sent(proxy, sent(node(OTHER), proxy.begin()))
    assert proxy.peer is None


def test_a_wrong_secret_fails_at_the_peer_on_refusal_or_on_a_wrong_welcome() -> None:
    peer = node(OTHER)
    sent(peer, ProxyHandshake(SECRET).begin())
    with pytest.raises(CredentialsError, match="check that STOKER_WARM_SECRET is the same"):
        peer.receive(Kind.FAILED, {})
    for head in ({"mac": "00" * 32}, {"mac": SECRET.mac("stoker warm welcome")}):
        with pytest.raises(CredentialsError, match="check that STOKER_WARM_SECRET is the same"):
            peer.receive(Kind.WELCOME, head)
    assert peer.peer is None


def test_a_proof_is_good_for_one_challenge_only() -> None:
    first, peer = ProxyHandshake(SECRET), node()
    proof = sent(peer, first.begin())
    sent(first, proof)
    second = ProxyHandshake(SECRET)
    second.begin()
    with pytest.raises(CredentialsError):
        sent(second, proof)


def test_a_welcome_is_good_for_one_proof_only() -> None:
    proxy = ProxyHandshake(SECRET, create_nonce=lambda: bytes(32))
    welcome = sent(proxy, sent(node(), proxy.begin()))
    again = node()
    sent(again, ProxyHandshake(SECRET, create_nonce=lambda: bytes(32)).begin())
    with pytest.raises(CredentialsError):
        sent(again, welcome)


def test_a_proof_that_is_turned_round_is_no_welcome_nor_the_other_way() -> None:
    proxy, peer = ProxyHandshake(SECRET, create_nonce=lambda: bytes(32)), node(create_nonce=lambda: bytes(32))
    proof = sent(peer, proxy.begin())
    assert proof is not None
    with pytest.raises(CredentialsError):
        peer.receive(Kind.WELCOME, {"mac": proof[1]["mac"]})
    welcome = sent(proxy, proof)
    assert welcome is not None
    other = ProxyHandshake(SECRET, create_nonce=lambda: bytes(32))
    with pytest.raises(CredentialsError):
        other.receive(Kind.PROOF, {**proof[1], "mac": welcome[1]["mac"]})


@for_each(
    ("name", "value"),
    [
        ("node", "warm-8"),
        ("instance", "f" * 16),
        ("nonce", "00" * 32),
        ("term", 4),
        ("term", "3"),
        ("hash", "e"),
        ("list", ["a"]),
        ("list", []),
        ("another", 1),
        ("mac", "00" * 32),
    ],
)
def test_whatever_is_changed_on_the_way_makes_a_proof_wrong(name: str, value: object) -> None:
    proxy, peer = ProxyHandshake(SECRET), node()
    proof = sent(peer, proxy.begin())
    assert proof is not None
    assert proof[1].get(name) != value
    with pytest.raises(CredentialsError):
        proxy.receive(Kind.PROOF, {**proof[1], name: value})
    proxy.receive(*proof)


def test_the_version_is_part_of_what_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    proxy, peer = ProxyHandshake(SECRET), node()
    proof = sent(peer, proxy.begin())
    monkeypatch.setattr("stoker_warm._auth.PROTOCOL_VERSION", 4)
    with pytest.raises(CredentialsError):
        sent(proxy, proof)


def test_a_proof_that_was_passed_on_through_another_certificate_is_wrong() -> None:
    proxy = ProxyHandshake(SECRET, fingerprint=PRINT)
    with pytest.raises(CredentialsError, match="has received another certificate"):
        sent(proxy, sent(node(fingerprint="cd" * 32), proxy.begin()))
    shaken(ProxyHandshake(SECRET, fingerprint=PRINT), node(fingerprint=PRINT))


@pytest.mark.parametrize("seen", ["", "cd" * 32])
def test_a_peer_accepts_only_the_given_certificate(seen: str) -> None:
    with pytest.raises(CredentialsError, match="check its address and the fingerprint"):
        node(fingerprint=PRINT).begin(seen)
    node(fingerprint=PRINT).begin(PRINT)


def test_tls_where_none_was_expected_is_refused() -> None:
    with pytest.raises(CredentialsError):
        node().begin(PRINT)


@for_each(
    "head",
    [
        {},
        {"nonce": "short"},
        {"nonce": "AB" * 32},
        {"nonce": "00" * 32 + "\n"},
        {"node": ""},
        {"node": "x" * 65},
        {"node": "a/b"},
        {"node": 3},
        {"mac": ""},
        {"mac": None},
        {"mac": "é" * 64},
    ],
)
def test_a_proof_of_another_form_is_no_proof(head: dict[str, object]) -> None:
    proxy = ProxyHandshake(SECRET)
    proof = sent(node(), proxy.begin())
    assert proof is not None
    with pytest.raises(WireError):
        proxy.receive(Kind.PROOF, {**proof[1], **head} if head else {})
    assert proxy.peer is None


@for_each("kind", [kind for kind in Kind if kind is not Kind.PROOF])
def test_a_proxy_takes_nothing_but_a_proof_and_that_once(kind: Kind) -> None:
    proxy, peer = ProxyHandshake(SECRET), node()
    proof = sent(peer, proxy.begin())
    assert proof is not None
    with pytest.raises(WireError):
        proxy.receive(kind, proof[1])
    proxy.receive(*proof)
    with pytest.raises(WireError):
        proxy.receive(*proof)


@for_each("kind", [kind for kind in Kind if kind not in (Kind.CHALLENGE, Kind.FAILED)])
def test_a_peer_takes_nothing_before_a_challenge(kind: Kind) -> None:
    with pytest.raises(WireError):
        node().receive(kind, {"nonce": "00" * 32, "mac": "00" * 32})


def test_a_peer_answers_one_challenge_only() -> None:
    peer = node()
    sent(peer, ProxyHandshake(SECRET).begin())
    with pytest.raises(WireError):
        sent(peer, ProxyHandshake(SECRET).begin())


# The secret.


def test_a_secret_is_at_least_32_bytes() -> None:
    WarmSecret(bytes(32))
    with pytest.raises(ConfigError, match="must have at least 32 bytes, not 31"):
        WarmSecret(bytes(31))


def test_a_secret_survives_the_environment_with_and_without_padding() -> None:
    text = WarmSecret.generate().reveal()
    assert WarmSecret.parse(text).reveal() == WarmSecret.parse(text + "=").reveal() == text
    assert len(WarmSecret.generate().reveal()) == 43
    assert WarmSecret.parse("+/" * 22).reveal() == "-_" * 22


@pytest.mark.parametrize("text", ["abc", "!" * 44, "é" * 44, "a" * 45])
def test_a_text_that_is_no_secret_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(ConfigError, match=r"the warm tier's secret.*create one with `stoker warm secret`") as refused:
        WarmSecret.parse(text)
    assert text not in str(refused.value)


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_missing_secret_is_reported_with_the_command_that_creates_one(text: str) -> None:
    with pytest.raises(ConfigError, match=r"STOKER_WARM_SECRET is not set.*`stoker warm secret`"):
        WarmSecret.parse(text)


def test_a_secret_is_never_shown_sent_or_pickled() -> None:
    shown = [repr(SECRET), str(SECRET), f"{SECRET}"]
    proxy, peer = ProxyHandshake(SECRET), node()
    challenge = proxy.begin()
    proof = sent(peer, challenge)
    shown += [str(challenge), str(proof), str(sent(proxy, proof)), repr(proxy), repr(peer), repr(proxy.peer)]
    for wrong in (ProxyHandshake(OTHER), ProxyHandshake(SECRET, fingerprint=PRINT)):
        with pytest.raises(CredentialsError) as refused:
            sent(wrong, sent(node(), wrong.begin()))
        shown.append(str(refused.value))
    for text in shown:
        assert KEY.hex() not in text
        assert SECRET.reveal() not in text
        assert repr(KEY)[2:-1] not in text
    for copied in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="cannot be pickled"):
            copied(SECRET)


def test_macs_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    digest = secrets.compare_digest

    def compare(a: str, b: str) -> bool:
        compared.append((a, b))
        return digest(a, b)

    monkeypatch.setattr("stoker_warm._auth.hmac.compare_digest", compare)
    proxy, peer = ProxyHandshake(SECRET), node()
    shaken(proxy, peer)
    assert [len(one) for one, _ in compared] == [0, 64, 64], "the certificate, and both MACs"
