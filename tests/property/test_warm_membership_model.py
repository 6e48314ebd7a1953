"""The life of a node against a world in which instances really hold, lose and copy things."""

from __future__ import annotations

from copy import deepcopy

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stoker_warm._node_state import NodeContents, NodeState, NodeStateMachine
from stoker_warm._shard import StoreVersion

WHO = st.integers(0, 5)


class Instance:
    """A process: what it holds, and how often that has changed."""

    def __init__(self, contents: frozenset[int] = frozenset(), term: int = 0) -> None:
        self.contents, self.term = contents, term

    @property
    def digest(self) -> StoreVersion:
        return StoreVersion(self.term, hash(self.contents) if self.term else 0)


class LifeMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.membership = NodeStateMachine(fresh_seconds=2.0)
        self.instances: dict[str, Instance] = {}
        self.believed: frozenset[int] = frozenset()
        self.things = self.started = 0
        self.suspect: str | None = None
        self.strikes = 0
        self.now = 0.0

    def pick(self, who: int) -> str | None:
        """Return an instance, the known one half of the time."""
        if who >= 3 and self.membership.instance is not None:
            return self.membership.instance
        return sorted(self.instances)[who % len(self.instances)] if self.instances else None

    def start(self, instance: Instance) -> str:
        """Start an instance; the platform takes back one that is not known when there are three."""
        if len(self.instances) == 3:
            del self.instances[min(set(self.instances) - {self.membership.instance})]
        self.started += 1
        name = f"{self.started:016x}"
        self.instances[name] = instance
        return name

    def greet(self, name: str) -> NodeContents | None:
        instance, state, was_connected = self.instances[name], self.membership.state, self.membership.is_connected
        contents = self.membership.on_greeting(name, instance.digest, self.now)
        if contents is None:
            assert state in (NodeState.AWAKE, NodeState.MAYBE)
            assert name != self.membership.instance
        elif contents is NodeContents.DOUBTFUL:
            assert (state, self.membership.state, was_connected) == (NodeState.SLEEPING, NodeState.SLEEPING, True)
            assert name != self.membership.instance
            assert not instance.contents
            assert not self.membership.is_connected, "it is not doubted twice"
        else:
            assert self.membership.can_send(self.now)
            assert self.membership.expected_version == instance.digest
            if contents is NodeContents.EXPECTED:
                assert self.believed == instance.contents
            else:
                self.believed = frozenset()
            if not instance.contents and not instance.term:
                assert contents is not NodeContents.UNKNOWN
        return contents

    def gave_up(self, is_given_up: bool) -> None:
        if is_given_up:
            assert self.membership.state is NodeState.GONE
            self.believed = frozenset()

    @rule()
    def a_fresh_instance_greets(self) -> None:
        self.greet(self.start(Instance()))

    @rule(who=WHO)
    def a_back_up_greets(self, who: int) -> None:
        if (name := self.pick(who)) is not None:
            source = self.instances[name]
            self.greet(self.start(Instance(source.contents, source.term)))

    @rule(who=WHO)
    def an_instance_greets_again(self, who: int) -> None:
        if (name := self.pick(who)) is not None:
            self.greet(name)

    @rule(who=WHO, is_told=st.booleans())
    def an_instance_is_given_something(self, who: int, is_told: bool) -> None:
        name = self.pick(who)
        is_known = name == self.membership.instance and self.membership.is_connected
        if name is None or (is_told and not is_known):
            return
        self.things += 1
        instance = self.instances[name]
        instance.contents, instance.term = instance.contents | {self.things}, instance.term + 1
        if is_told:
            self.membership.on_change(name, instance.digest)
            self.believed |= {self.things}
        elif is_known:
            self.membership.has_shard_list = False

    @precondition(lambda self: self.membership.is_connected and self.believed)
    @rule()
    def the_known_instance_lets_something_go_and_says_so(self) -> None:
        instance = self.instances[self.membership.instance or ""]
        thing = min(self.believed)
        instance.contents, instance.term = instance.contents - {thing}, instance.term + 1
        self.membership.on_change(self.membership.instance or "", instance.digest)
        self.believed -= {thing}

    @rule(who=WHO)
    def an_instance_lists_what_it_has(self, who: int) -> None:
        name = self.pick(who)
        if name is not None and name == self.membership.instance and self.membership.is_connected:
            held = self.instances[name].contents
            self.believed = self.believed & held if self.membership.is_distrusted else held
            self.membership.on_change(name, self.instances[name].digest)
            self.membership.has_shard_list = True

    @rule(who=WHO, word=st.sampled_from(["on_message", "on_leaving", "on_disconnected"]))
    def an_instance_speaks_or_breaks_off(self, who: int, word: str) -> None:
        if (name := self.pick(who)) is not None:
            is_known = self.membership.is_connected and name == self.membership.instance
            is_taken = (
                self.membership.on_disconnected(name)
                if word == "on_disconnected"
                else getattr(self.membership, word)(name, self.now)
            )
            assert is_taken == is_known

    @rule()
    def the_node_is_called(self) -> None:
        calls = self.membership.calls
        self.membership.on_call_started()
        assert self.membership.calls == calls + 1
        assert not self.membership.must_invoke

    @precondition(lambda self: self.membership.calls)
    @rule(how=st.sampled_from(["on_call_returned", "on_call_failed", "on_call_throttled"]))
    def a_call_ends(self, how: str) -> None:
        self.gave_up(bool(getattr(self.membership, how)()))

    @rule()
    def a_deadline_passes(self) -> None:
        self.gave_up(self.membership.on_timeout())
        assert self.membership.state is not NodeState.AWAKE

    @rule(is_delivered=st.booleans())
    def a_shard_is_delivered_or_not(self, is_delivered: bool) -> None:
        if is_delivered:
            self.membership.on_shard_answer()
        else:
            self.gave_up(self.membership.on_shard_timeout())

    @rule(who=WHO)
    def an_instance_answers_with_a_wrong_shard(self, who: int) -> None:
        name = self.pick(who)
        if name is None:
            return
        is_known = name == self.membership.instance
        if is_known:
            self.strikes = self.strikes + 1 if name == self.suspect else 1
            self.suspect = name
        is_given_up = self.membership.on_wrong_shard(name)
        assert is_given_up == (is_known and self.strikes >= 3)
        self.gave_up(is_given_up)

    @invariant()
    def only_the_instance_with_three_strikes_is_distrusted(self) -> None:
        is_liar = self.membership.instance is not None and self.membership.instance == self.suspect
        assert self.membership.is_distrusted == (is_liar and self.strikes >= 3)

    @rule(seconds=st.floats(0, 5))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def only_a_connected_instance_is_awake_and_a_node_that_is_gone_holds_nothing(self) -> None:
        life = self.membership
        assert life.is_connected or life.state is not NodeState.AWAKE
        assert life.instance is not None or not life.is_connected
        if life.state is NodeState.GONE:
            assert (life.instance, life.is_connected, life.expected_version) == (None, False, StoreVersion())
        assert life.failed_attempts < 3 or life.state is NodeState.GONE

    @invariant()
    def there_is_at_most_one_thing_to_do(self) -> None:
        todo = [self.membership.can_send(self.now), self.membership.must_invoke]
        assert sum(todo) <= 1
        assert not todo[0] or self.membership.state is NodeState.AWAKE

    @invariant()
    def nothing_is_believed_that_the_known_instance_does_not_hold(self) -> None:
        if self.membership.instance is None:
            assert not self.believed
        else:
            assert self.believed <= self.instances[self.membership.instance].contents

    @invariant()
    def a_fresh_instance_is_taken_after_two_calls_at_most_if_all_others_are_dead(self) -> None:
        life = deepcopy(self.membership)
        if life.is_connected:
            life.on_disconnected(str(life.instance))
        for _ in range(2):
            while life.calls:
                life.on_call_returned()
            assert life.must_invoke or life.state is NodeState.GONE
            life.on_call_started()
            if life.on_greeting("f" * 16, StoreVersion(), self.now) is not None:
                break
        assert life.can_send(self.now)

    @invariant()
    def a_fresh_instance_is_taken_after_three_calls_at_most_if_the_others_died_in_silence(self) -> None:
        life, calls = deepcopy(self.membership), 0
        while life.state in (NodeState.AWAKE, NodeState.MAYBE):
            if life.calls:
                life.on_call_returned()
            else:
                life.on_call_started()
        while (
            life.state is not NodeState.GONE
            and life.on_greeting(f"f{calls:015x}", StoreVersion(), self.now) is not NodeContents.NONE
        ):
            if life.expected_version == StoreVersion():
                break
            life.on_call_started()
            calls += 1
            assert calls <= 1, "a loss costs one call more at most"

    @invariant()
    def one_stray_call_loses_nothing_of_an_instance_that_sleeps(self) -> None:
        life = deepcopy(self.membership)
        if life.state is NodeState.SLEEPING and life.is_connected and self.instances[str(life.instance)].contents:
            known, expected, is_listed = str(life.instance), life.expected_version, life.has_shard_list
            life.on_call_started()
            assert life.on_greeting("f" * 16, StoreVersion(), self.now) is NodeContents.DOUBTFUL or not expected.hash
            life.on_call_started()
            contents = life.on_greeting(known, self.instances[known].digest, self.now)
            if expected.hash and is_listed and expected == self.instances[known].digest:
                assert contents is NodeContents.EXPECTED


TestLifeAgainstWorld = LifeMachine.TestCase
TestLifeAgainstWorld.settings = settings(max_examples=150, stateful_step_count=40)
