"""Leases of a cache process: one client fetches, the others wait, and whatever ends passes the lease on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from stoker._cluster.catalog import Catalog, Decision, Reply
from support.cases import for_each

SIZE = 0x1000


def name_of_object(number: int, size_bytes: int = SIZE) -> str:
    return f"{number:08x}{size_bytes:08x}{number:016x}"


A, B = name_of_object(1), name_of_object(2)


def test_the_first_client_fetches_and_all_others_wait_for_it() -> None:
    catalog = Catalog(1 << 20)
    assert catalog.ask("x", 1, A) == Reply("x", 1, Decision.LEASE)
    assert catalog.ask("y", 7, A) is None
    assert catalog.ask("z", 3, A) is None
    assert catalog.begin("x", A) == 0
    assert catalog.complete("x", A) == [Reply("y", 7, Decision.HIT, 0), Reply("z", 3, Decision.HIT, 0)]
    assert catalog.ask("x", 2, A) == Reply("x", 2, Decision.HIT, 0)
    assert catalog.hits == 3


def test_a_second_request_of_the_same_client_waits_for_its_own_fetch() -> None:
    catalog = Catalog(1 << 20)
    catalog.ask("x", 1, A)
    assert catalog.ask("x", 2, A) is None
    catalog.begin("x", A)
    assert catalog.complete("x", A) == [Reply("x", 2, Decision.HIT, 0)]


def test_objects_have_places_of_their_own_until_there_is_no_room() -> None:
    catalog = Catalog(2 * SIZE)
    offsets = []
    for number in (1, 2):
        catalog.ask("x", number, name_of_object(number))
        offsets.append(catalog.begin("x", name_of_object(number)))
        catalog.complete("x", name_of_object(number))
    assert offsets == [0, SIZE]
    assert catalog.ask("x", 3, name_of_object(3)) == Reply("x", 3, Decision.FULL)
    assert catalog.ask("x", 4, A) == Reply("x", 4, Decision.HIT, 0)


@pytest.mark.parametrize("how", ["release", "forget"])
def test_a_lease_that_ends_goes_to_the_one_that_has_waited_longest(how: str) -> None:
    catalog = Catalog(1 << 20)
    catalog.ask("x", 1, A)
    for client in ("y", "z"):
        catalog.ask(client, 1, A)
    replies = catalog.release("x", A) if how == "release" else catalog.forget("x")
    assert replies == [Reply("y", 1, Decision.LEASE)]
    assert catalog.begin("x", A) is None
    assert catalog.begin("y", A) == 0
    assert catalog.complete("y", A) == [Reply("z", 1, Decision.HIT, 0)]


def test_a_client_that_is_lost_while_it_gives_an_object_is_followed_by_another() -> None:
    catalog = Catalog(1 << 20)
    catalog.ask("x", 1, A)
    catalog.ask("y", 1, A)
    catalog.begin("x", A)
    assert catalog.release("x", A) == []  # its time limit does not end what arrives
    assert catalog.forget("x") == [Reply("y", 1, Decision.LEASE)]
    assert not catalog.is_arriving(A)


def test_a_cancelled_request_gets_no_reply() -> None:
    catalog = Catalog(1 << 20)
    catalog.ask("x", 1, A)
    catalog.ask("y", 5, A)
    catalog.cancel("y", 5, A)
    assert catalog.forget("x") == []
    assert catalog.ask("y", 6, A) == Reply("y", 6, Decision.LEASE)


def test_a_rejected_object_is_fetched_again_to_the_same_place() -> None:
    catalog = Catalog(1 << 20)
    catalog.ask("x", 1, A)
    catalog.begin("x", A)
    catalog.complete("x", A)
    catalog.reject(A)
    assert catalog.peek("y", 1, A) == Reply("y", 1, Decision.LACKING)
    assert catalog.ask("y", 2, A) == Reply("y", 2, Decision.LEASE)
    assert catalog.begin("y", A) == 0
    catalog.reject(B)  # it is not here


def test_a_peek_neither_waits_nor_gets_a_lease() -> None:
    catalog = Catalog(1 << 20)
    assert catalog.peek("x", 1, A) == Reply("x", 1, Decision.LACKING)
    catalog.ask("x", 2, A)
    assert catalog.peek("y", 1, A) == Reply("y", 1, Decision.LACKING)
    catalog.begin("x", A)
    catalog.complete("x", A)
    assert catalog.peek("y", 2, A) == Reply("y", 2, Decision.HIT, 0)


def test_a_peek_tells_whether_there_is_room() -> None:
    catalog = Catalog(4096)
    assert catalog.peek("x", 1, A) == Reply("x", 1, Decision.LACKING)
    catalog.ask("x", 2, A)
    assert catalog.peek("x", 3, A) == Reply("x", 3, Decision.LACKING)  # it has a place already
    assert catalog.peek("x", 4, B) == Reply("x", 4, Decision.FULL)


def test_without_memory_those_that_wait_fetch_themselves_and_nothing_more_is_added() -> None:
    catalog = Catalog(1 << 20)
    for client in ("x", "y"):
        catalog.ask(client, 1, A)
    catalog.begin("x", A)
    assert catalog.stop_adding(A) == [Reply("y", 1, Decision.FULL)]
    assert catalog.ask("x", 2, A) == Reply("x", 2, Decision.FULL)
    assert catalog.ask("x", 3, B) == Reply("x", 3, Decision.FULL)


class Clients:
    """Clients that ask, give, give up and die in any order, and what they know of each other.

    Args:
        seed: fixes the order.
        limit: number of objects that have a place.
        passing: number of objects that may pass.
    """

    def __init__(self, seed: int, limit: int, passing: int) -> None:
        self.random, self.catalog = Random(seed), Catalog(limit * SIZE, passing * SIZE)
        self.names = [name_of_object(number) for number in range(8)]
        self.alive = {f"client {number}" for number in range(5)}
        self.owners: dict[str, str] = {}
        self.waiting: dict[tuple[str, int], str] = {}
        self.answers = Counter[tuple[str, int]]()
        self.places: dict[str, int] = {}
        self.asked = 0

    def receive(self, replies: Sequence[Reply | None]) -> None:
        for reply in replies:
            if reply is None:
                continue
            assert isinstance(reply.client, str)
            assert reply.client in self.alive
            name = self.waiting.pop((reply.client, reply.request))
            self.answers[reply.client, reply.request] += 1
            if reply.decision is Decision.LEASE:
                assert self.owners.setdefault(name, reply.client) == reply.client
            elif isinstance(reply.place, bytearray):
                assert reply.decision is Decision.HIT
                assert reply.place.startswith(name.encode())
            elif reply.decision is Decision.HIT:
                assert self.places[name] == reply.place
            else:
                assert name not in self.places

    def ask(self, client: str) -> None:
        name, self.asked = self.random.choice(self.names), self.asked + 1
        self.waiting[client, self.asked] = name
        self.receive([self.catalog.ask(client, self.asked, name, is_shared=True)])

    def give(self, client: str) -> None:
        for name in self.owned_by(client):
            place = self.catalog.begin(client, name)
            assert place is not None
            if isinstance(place, bytearray):
                place[: len(name)] = name.encode()
            else:
                assert self.places.setdefault(name, place) == place
            assert len(set(self.places.values())) == len(self.places)
            del self.owners[name]
            self.receive(self.catalog.complete(client, name))

    def give_up(self, client: str) -> None:
        for name in self.owned_by(client):
            del self.owners[name]
            self.receive(self.catalog.release(client, name))

    def cancel(self, client: str) -> None:
        for request in [request for other, request in self.waiting if other == client][:1]:
            self.catalog.cancel(client, request, self.waiting.pop((client, request)))

    def die(self, client: str) -> None:
        self.alive.discard(client)
        for name in self.owned_by(client):
            del self.owners[name]
        self.waiting = {each: name for each, name in self.waiting.items() if each[0] != client}
        self.receive(self.catalog.forget(client))

    def owned_by(self, client: str) -> list[str]:
        return [name for name, owner in self.owners.items() if owner == client]


@for_each(("limit", "passing"), [(6, 0), (3, 2), (0, 3)])
@for_each("seed", range(200))
def test_whatever_clients_do_one_owns_an_object_and_every_request_is_answered_once(
    seed: int, limit: int, passing: int
) -> None:
    clients = Clients(seed, limit, passing)
    deeds = [clients.ask] * 60 + [clients.give] * 12 + [clients.give_up] * 8 + [clients.cancel] * 8 + [clients.die]
    for _ in range(300):
        if clients.alive:
            clients.random.choice(deeds)(clients.random.choice(sorted(clients.alive)))
    while clients.owners:
        clients.give(next(iter(clients.owners.values())))
    assert not clients.waiting
    assert set(clients.answers.values()) <= {1}
    assert clients.catalog.used_bytes <= limit * SIZE
    passing_names = clients.catalog._passing
    assert sum(passing_names.values()) <= passing * SIZE  # a client gives one at a time
    assert all(clients.catalog._objects[name].is_here for name in passing_names)


def gave(catalog: Catalog, client: str, name: str) -> bytearray:
    """Give an object that passes; return its memory."""
    place = catalog.begin(client, name)
    assert isinstance(place, bytearray)
    catalog.complete(client, name)
    return place


def test_beyond_the_limit_an_object_that_several_need_passes() -> None:
    catalog = Catalog(0, 2 * SIZE)
    assert catalog.ask("x", 1, A) == Reply("x", 1, Decision.FULL)  # nobody else needs it
    assert catalog.ask("x", 2, A, is_shared=True) == Reply("x", 2, Decision.LEASE)
    assert catalog.ask("y", 1, A, is_shared=True) is None
    place = catalog.begin("x", A)
    assert isinstance(place, bytearray)
    assert len(place) == SIZE
    assert catalog.complete("x", A) == [Reply("y", 1, Decision.HIT, place)]
    assert catalog.ask("z", 1, A) == Reply("z", 1, Decision.HIT, place)
    assert catalog.peek("z", 2, A) == Reply("z", 2, Decision.FULL)  # it does not stay
    catalog.reject(A)
    assert catalog.ask("z", 3, A, is_shared=True) == Reply("z", 3, Decision.LEASE)


def test_objects_that_pass_make_room_for_newer_ones_but_not_while_they_arrive() -> None:
    catalog = Catalog(0, 2 * SIZE)
    c = name_of_object(3)
    for name in (A, B, c):  # leases take no room
        assert catalog.ask("x", 1, name, is_shared=True) == Reply("x", 1, Decision.LEASE)
    first, second = gave(catalog, "x", A), catalog.begin("x", B)
    third = gave(catalog, "x", c)
    assert catalog.ask("y", 2, c) == Reply("y", 2, Decision.HIT, third)
    assert catalog.ask("y", 3, A) == Reply("y", 3, Decision.FULL)  # it was the oldest that was here
    catalog.complete("x", B)
    assert catalog.ask("y", 4, B) == Reply("y", 4, Decision.HIT, second or 0)
    assert len(first) == SIZE


def test_the_room_of_an_object_that_nobody_gave_is_free_again() -> None:
    catalog = Catalog(0, SIZE)
    catalog.ask("x", 1, A, is_shared=True)
    assert catalog.release("x", A) == []
    assert catalog.ask("y", 1, B, is_shared=True) == Reply("y", 1, Decision.LEASE)
    catalog.forget("y")
    assert catalog.ask("z", 1, A, is_shared=True) == Reply("z", 1, Decision.LEASE)
