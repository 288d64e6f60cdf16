"""What was last seen of a service: newer wins, whatever the source, and what was deleted does not come back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.clock import Clock
from trimtab_operator import names
from trimtab_operator.cluster.store import WATCH_GRACE_S, Key, Mark, Store

Json = dict[str, Any]
KEY = Key("team", "chat")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Store:
    """One that has read everything of the service: nothing."""
    made = Store(clock)
    made.fill(KEY, made.begin(KEY), [])
    return made


def item(
    version: int, name: str = "chat", kind: str = "ConfigMap", *, mine: bool = True, **content: Any
) -> Json:
    labels = {names.LABEL_SERVICE: "chat"} if mine else {}
    metadata = {
        "name": name,
        "resourceVersion": str(version),
        "labels": labels,
        "managedFields": [{"manager": "x"}],
    }
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, **content}


def versions(store: Store) -> dict[str, int]:
    return {name: int(o["metadata"]["resourceVersion"]) for (_, name), o in (store.all(KEY) or {}).items()}


def delivered(store: Store, shown: Json, *, deleted: bool = False) -> bool:
    return store.delivered(KEY, shown["kind"], shown, deleted=deleted)


def test_a_service_that_nobody_has_looked_at_has_to_be_read(store: Store) -> None:
    other = Key("team", "other")
    assert store.delivered(other, "ConfigMap", item(3), deleted=False)
    assert store.all(other) is None
    mark = store.begin(other)
    assert store.all(other) is None
    store.fill(other, mark, [item(3)])
    assert store.all(other) is not None
    store.distrust(other)
    assert store.all(other) is None
    store.forget(KEY)
    assert store.all(KEY) is None


def test_a_schedule_that_a_watch_showed_before_the_first_look_is_known_to_it(store: Store) -> None:
    other, schedule = Key("team", "other"), [("CronJob", "other-nightly"), ("Role", "other-nightly")]
    assert not store.has(other, schedule)
    assert store.delivered(other, "CronJob", item(3, "other-nightly", "CronJob"), deleted=False)
    assert store.has(other, schedule), "no look would ask for it without a schedule in spec"
    assert store.all(other) is None, "everything else has to be read"
    mark = store.begin(other)
    store.fill(other, mark, [item(3, "other-nightly", "CronJob")])
    assert store.delivered(other, "CronJob", item(4, "other-nightly", "CronJob"), deleted=True)
    assert not store.has(other, schedule)
    third = Key("team", "third")
    assert store.delivered(third, "CronJob", item(3, "somebodys", "CronJob"), deleted=False)
    assert store.delivered(third, "CronJob", item(3, "third-nightly", "CronJob"), deleted=True)
    assert not store.has(third, [("CronJob", "somebodys"), ("CronJob", "third-nightly")])


def test_an_older_state_never_replaces_a_newer_one(store: Store) -> None:
    mark = store.begin(KEY)
    assert delivered(store, item(10))
    assert not delivered(store, item(9))
    store.read(KEY, mark, ("ConfigMap", "chat"), item(8))
    store.wrote(KEY, item(7))
    store.fill(KEY, mark, [item(6)])
    assert versions(store) == {"chat": 10}
    store.wrote(KEY, item(11))
    assert versions(store) == {"chat": 11}


def test_what_we_wrote_or_read_ourselves_is_no_news(store: Store) -> None:
    store.wrote(KEY, item(5))
    assert not delivered(store, item(5))
    assert delivered(store, item(6))
    mark = store.begin(KEY)
    store.read(KEY, mark, ("ConfigMap", "chat"), item(7))
    assert not delivered(store, item(7))


def test_an_answer_from_before_a_deletion_brings_nothing_back(store: Store) -> None:
    delivered(store, item(5))
    mark = store.begin(KEY)
    assert delivered(store, item(8), deleted=True)
    store.read(KEY, mark, ("ConfigMap", "chat"), item(5))
    store.wrote(KEY, item(7))
    store.fill(KEY, mark, [item(5)])
    assert versions(store) == {}
    assert delivered(store, item(9)), "made anew under the same name"
    assert versions(store) == {"chat": 9}


def test_what_a_list_lacks_is_gone_unless_it_came_after_the_list_was_asked_for(store: Store) -> None:
    delivered(store, item(5, "old", "Pod"))
    mark = store.begin(KEY)
    delivered(store, item(9, "new", "Pod"))
    store.fill(KEY, mark, [item(6, "listed", "Pod")])
    assert versions(store) == {"new": 9, "listed": 6}
    mark = store.mark()
    store.read(KEY, mark, ("Pod", "new"), None)
    assert versions(store) == {"listed": 6}


def test_objects_come_back_whole_but_for_managed_fields(store: Store) -> None:
    delivered(store, item(5, data={"live.json": "{}"}))
    [(name, found)] = (store.all(KEY) or {}).items()
    assert name == ("ConfigMap", "chat")
    expected = item(5, data={"live.json": "{}"})
    del expected["metadata"]["managedFields"]
    assert found == expected


def test_only_the_very_state_of_our_status_write_counts_as_our_own(store: Store) -> None:
    assert not store.is_own(KEY, "5")
    store.wrote_status(KEY, "5")
    assert store.is_own(KEY, "5")
    assert not store.is_own(KEY, "6")
    store.forget(KEY)
    assert not store.is_own(KEY, "5")


def test_a_watch_that_owes_an_object_for_long_is_dead_and_a_late_one_is_not(
    store: Store, clock: Clock
) -> None:
    store.wrote(KEY, item(5))
    store.wrote(KEY, item(6, "theirs", mine=False))  # without our label no watch shows it
    assert store.dead_watch() is None
    clock.now_s += WATCH_GRACE_S + 1
    assert "ConfigMap team/chat at resource version 5" in (store.dead_watch() or "")
    assert store.dead_watch(failed_s=clock.now_s - WATCH_GRACE_S / 2) is None, "the API server was away"
    delivered(store, item(4))
    assert store.dead_watch() is not None, "an older state does not show that it lives"
    delivered(store, item(5))
    assert store.dead_watch() is None
    store.wrote(KEY, item(9))
    clock.now_s += WATCH_GRACE_S + 1
    delivered(store, item(10), deleted=True)
    assert store.dead_watch() is None


def test_what_was_deleted_before_the_watch_began_is_read_again_and_no_longer_owed(
    store: Store, clock: Clock
) -> None:
    store.fill(KEY, store.begin(KEY), [item(5)])
    assert store.overdue() == []
    clock.now_s += WATCH_GRACE_S / 2 + 1
    assert store.overdue() == [KEY]
    assert store.all(KEY) is None, "the next look reads everything"
    store.fill(KEY, store.begin(KEY), [])  # it is gone, and no watch will ever say so
    clock.now_s += WATCH_GRACE_S
    assert store.dead_watch() is None
    assert store.overdue() == []


def test_asking_again_does_not_hide_a_watch_that_is_dead(store: Store, clock: Clock) -> None:
    store.fill(KEY, store.begin(KEY), [item(5)])
    clock.now_s += WATCH_GRACE_S / 2 + 1
    assert store.overdue() == [KEY]
    store.fill(KEY, store.begin(KEY), [item(5)])
    clock.now_s += WATCH_GRACE_S / 2
    assert "ConfigMap team/chat" in str(store.dead_watch())


def test_a_watch_owes_what_a_shadow_consists_of_as_well(store: Store, clock: Clock) -> None:
    made = item(5, "try-shadow", "Deployment")
    made["metadata"]["labels"] = names.shadow_labels("chat", "try")
    store.wrote(KEY, made)
    clock.now_s += WATCH_GRACE_S + 1
    assert "Deployment team/try-shadow" in str(store.dead_watch())


def test_after_a_watch_began_anew_every_service_is_read_again(store: Store) -> None:
    other = Key("team", "other")
    during = store.begin(other)
    delivered(store, item(5, "ghost", "Pod"))
    store.distrust_all()
    store.fill(other, during, [])
    assert store.all(KEY) is None
    assert store.all(other) is None, "it was read before"
    store.fill(KEY, store.begin(KEY), [])
    assert store.all(KEY) == {}


class World:
    """What exists, how it came about, and one watch on it that lists once and then tells everything in order, late."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.version = 10
        self.exists: dict[str, int] = {}
        self.log: list[tuple[str, int, bool]] = []  # name, version, deleted
        self.told: int | None = None  # how much of the log; None before the watch's list
        self.asked: tuple[Mark, list[Json]] | None = None  # a look's list under way

    def change(self, name: str) -> Json:
        self.version += 1
        self.exists[name] = self.version
        self.log.append((name, self.version, False))
        return item(self.version, name)

    def delete(self, name: str) -> None:
        if name in self.exists:
            del self.exists[name]
            self.version += 1
            self.log.append((name, self.version, True))

    def tell(self) -> None:
        if self.told is None:
            self.told = len(self.log)
            for name, version in self.exists.items():
                self.store.distrust_all()
                delivered(self.store, item(version, name))
        elif self.told < len(self.log):
            name, version, deleted = self.log[self.told]
            self.told += 1
            delivered(self.store, item(version, name), deleted=deleted)

    def ask(self) -> None:
        self.asked = self.store.begin(KEY), [item(version, name) for name, version in self.exists.items()]

    def answer(self) -> None:
        if self.asked is not None:
            self.store.fill(KEY, *self.asked)
            self.asked = None


ACTIONS = (
    "tell",
    "tell",
    "ask",
    "answer",
    "write a",
    "change a",
    "change b",
    "delete a",
    "delete b",
    "forget",
)


@given(st.lists(st.sampled_from(ACTIONS), max_size=30))
def test_a_watch_that_told_everything_owes_nothing_whenever_it_began(actions: list[str]) -> None:
    clock = Clock()
    world = World(store := Store(clock))
    for action in actions:
        word, _, name = action.partition(" ")
        if word == "write":
            store.wrote(KEY, world.change(name))
        elif word in ("change", "delete"):
            getattr(world, word)(name)
        elif word == "forget":
            world.asked = None  # looks at one service follow each other
            store.forget(KEY)
        else:
            getattr(world, word)()
    world.answer()
    while world.told is None or world.told < len(world.log):
        world.tell()
    clock.now_s += WATCH_GRACE_S / 2 + 1
    for _ in store.overdue():
        world.ask()
        world.answer()
    clock.now_s += WATCH_GRACE_S
    assert store.dead_watch() is None
    # It can die as well, and that shows.
    world.ask()
    world.answer()
    world.change("a")
    world.ask()
    store.distrust(KEY)
    world.answer()
    clock.now_s += WATCH_GRACE_S + 1
    assert store.dead_watch() is not None


def test_an_operator_that_followed_until_now_knows_what_the_watch_has_shown(
    store: Store, clock: Clock
) -> None:
    other = Key("team", "other")
    old = item(3) | {"metadata": item(3)["metadata"] | {"labels": {names.LABEL_SERVICE: "other"}}}
    store.delivered(other, "ConfigMap", old, deleted=False)
    store.fill(other, store.begin(other), [old])
    clock.now_s += WATCH_GRACE_S + 1
    assert store.dead_watch() is None
    store.forget(other)
    store.fill(other, store.begin(other), [old])  # made anew under that name, with what was left of it
    clock.now_s += WATCH_GRACE_S + 1
    assert store.dead_watch() is None


def test_the_end_of_a_former_object_that_is_told_last_leaves_the_new_one_shown(
    store: Store, clock: Clock
) -> None:
    other = Key("team", "other")

    def of(version: int) -> Json:
        made = item(version)
        return made | {"metadata": made["metadata"] | {"labels": {names.LABEL_SERVICE: "other"}}}

    store.delivered(other, "ConfigMap", of(3), deleted=False)
    store.delivered(other, "ConfigMap", of(7), deleted=False)
    store.delivered(other, "ConfigMap", of(5), deleted=True)
    store.delivered(other, "ConfigMap", of(4), deleted=False)
    store.fill(other, store.begin(other), [of(7)])
    clock.now_s += WATCH_GRACE_S + 1
    assert store.dead_watch() is None
