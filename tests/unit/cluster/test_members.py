"""Who owns an object: computed from its name and the members, in proportion to their memory, with few changes."""

from __future__ import annotations

from typing import Any

import pytest

from stoker._cache.index import name_of
from stoker._cluster.members import Member, Members
from stoker._shared.address import Address
from support.cases import for_each
from support.cluster import object_of

NAMES = [name_of(object_of(number, 10)[0]) for number in range(3000)]


def member(number: int, limit_bytes: int = 1 << 30) -> Member:
    return Member(label=f"{number * 7919:016x}", address=Address(f"10.0.0.{number}", 7000), limit_bytes=limit_bytes)


def owners_among(members: list[Member]) -> list[str]:
    known = Members()
    known.update(members)
    return [known.owners(name)[0].label for name in NAMES]


def test_the_order_in_which_members_are_known_does_not_matter() -> None:
    members = [member(number) for number in range(1, 6)]
    assert owners_among(members) == owners_among(members[::-1])


def test_objects_are_divided_in_proportion_to_memory() -> None:
    members = [member(1), member(2), member(3, 2 << 30)]
    owners = owners_among(members)
    for each, share in zip(members, (0.25, 0.25, 0.5), strict=True):
        assert owners.count(each.label) / len(NAMES) == pytest.approx(share, abs=0.03)


def test_a_new_member_takes_over_its_share_and_nothing_else_moves() -> None:
    before, new = [member(number) for number in range(1, 5)], member(9)
    pairs = zip(owners_among(before), owners_among([*before, new]), strict=True)
    changes = [pair for pair in pairs if pair[0] != pair[1]]
    assert {after for _, after in changes} == {new.label}
    assert len(changes) / len(NAMES) == pytest.approx(0.2, abs=0.03)


def test_what_a_lost_member_owned_goes_to_the_next_ones() -> None:
    known = Members()
    known.update([member(number) for number in range(1, 5)])
    for name in NAMES[:200]:
        first, second, third = known.owners(name)
        assert known.owners(name, frozenset({first.label}))[:2] == [second, third]
        assert first.label not in {each.label for each in known.owners(name, frozenset({first.label}))}


def test_the_last_description_of_a_machine_counts() -> None:
    known, old = Members(), member(1)
    new = Member(label=old.label, address=Address("10.0.0.1", 7001), limit_bytes=1 << 30)
    known.update([old, member(2), new])
    assert {str(each.address) for each in known} == {"10.0.0.1:7001", "10.0.0.2:7000"}


def test_a_description_survives_json() -> None:
    assert Member.decode(member(3).encode()) == member(3)


@for_each(
    "fields",
    [
        None,
        [],
        {},
        {"label": "0" * 16, "address": "10.0.0.1:7000"},
        {"label": "0" * 16, "address": "10.0.0.1", "bytes": 5},
        {"label": "0" * 16, "address": "10.0.0.1:0", "bytes": 5},
        {"label": "0" * 16, "address": 7, "bytes": 5},
        {"label": "x" * 16, "address": "10.0.0.1:7000", "bytes": 5},
        {"label": 7, "address": "10.0.0.1:7000", "bytes": 5},
        {"label": "0" * 16, "address": "10.0.0.1:7000", "bytes": True},
        {"label": "0" * 16, "address": "10.0.0.1:7000", "bytes": 0},
        {"label": "0" * 16, "address": "10.0.0.1:7000", "bytes": 1 << 70},
    ],
)
def test_what_does_not_describe_a_member_is_an_error(fields: Any) -> None:
    with pytest.raises(ValueError, match="does not describe a member"):
        Member.decode(fields)
