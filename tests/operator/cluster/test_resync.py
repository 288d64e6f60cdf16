"""The resync against a real API server: every service gets a look, and only a watch that is dead is taken for dead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.clock import Clock
from support.services import resource
from trimtab_operator import names
from trimtab_operator.cluster import kinds, tokens
from trimtab_operator.cluster.engines import Engines
from trimtab_operator.cluster.kube import Kube
from trimtab_operator.cluster.observe import Key, Observer, RunIndex
from trimtab_operator.cluster.places import Places
from trimtab_operator.cluster.resync import WATCH_GRACE_S, Resync

pytestmark = pytest.mark.cluster
Json = dict[str, Any]


def service(kube: Kube, namespace: str, name: str = "chat") -> Json:
    return kube.create(resource() | {"metadata": {"name": name, "namespace": namespace}})


def resync(kube: Kube, namespace: str, clock: Clock) -> tuple[Resync, RunIndex, list[Key]]:
    index, asked = RunIndex(), []
    made = Resync(
        kube, Places([namespace], now=clock), index, lambda key, delay: asked.append(key), 60, now=clock
    )
    return made, index, asked


def test_every_service_gets_a_look_and_every_run_is_known(kube: Kube, namespace: str) -> None:
    service(kube, namespace)
    kube.create({"apiVersion": names.API_VERSION, "kind": names.RUN_KIND, "metadata": {"name": "r1", "namespace": namespace},
                 "spec": {"service": "nobody"}})  # fmt: skip
    made, index, asked = resync(kube, namespace, Clock())
    made.once()
    assert set(asked) == {Key(namespace, "chat"), Key(namespace, "nobody")}
    assert index.names(Key(namespace, "nobody")) == ["r1"]


def test_a_run_that_got_the_name_of_another_services_run_is_not_taken_for_it(
    kube: Kube, namespace: str
) -> None:
    run = {"apiVersion": names.API_VERSION, "kind": names.RUN_KIND, "metadata": {"name": "r1", "namespace": namespace},
           "spec": {"service": "other"}}  # fmt: skip
    kube.create(run)
    index = RunIndex()
    index.put({**run, "metadata": {**run["metadata"], "uid": "gone"}, "spec": {"service": "chat"}})  # type: ignore[dict-item]
    observer = Observer(kube, Engines(tokens.Signer.new()), index)
    assert observer.runs(Key(namespace, "chat")) == ()


def test_a_service_that_went_before_the_watch_spoke_of_it_gets_a_last_look(
    kube: Kube, namespace: str
) -> None:
    uid = service(kube, namespace)["metadata"]["uid"]
    made, _, asked = resync(kube, namespace, Clock())
    made.once()
    kube.delete(kinds.SERVICE, namespace, "chat", uid)
    asked.clear()
    made.once()
    assert asked == [Key(namespace, "chat")], (
        "or what its look has read would be owed by the watches for ever"
    )
    made.once()
    assert asked == [Key(namespace, "chat")]


def test_a_service_deleted_before_the_watch_began_is_asked_for_and_no_longer_owed(
    kube: Kube, namespace: str
) -> None:
    clock, key = Clock(), Key(namespace, "chat")
    uid = service(kube, namespace)["metadata"]["uid"]
    made, _, asked = resync(kube, namespace, clock)
    made.once()
    asked.clear()
    clock.now_s += WATCH_GRACE_S / 2 + 1
    made.ask_again()
    assert asked == [], "it is there, so the watch does owe it"
    kube.delete(kinds.SERVICE, namespace, "chat", uid)
    made.ask_again()
    assert asked == [key]
    clock.now_s += WATCH_GRACE_S
    assert made.dead_watch() is None


def test_a_watch_that_owes_a_change_for_long_is_dead_and_a_late_one_is_not(
    kube: Kube, namespace: str
) -> None:
    clock, key = Clock(), Key(namespace, "chat")
    first = service(kube, namespace)["metadata"]["resourceVersion"]
    made, _, _ = resync(kube, namespace, clock)
    made.delivered(key, first)
    made.once()
    clock.now_s += WATCH_GRACE_S * 2
    assert made.dead_watch() is None, "nothing has changed"
    changed = kube.merge(kinds.SERVICE, namespace, "chat", {"spec": {"replicas": 2}})["metadata"][
        "resourceVersion"
    ]
    made.once()
    assert made.dead_watch() is None, "it may still come"
    clock.now_s += WATCH_GRACE_S + 1
    assert made.dead_watch() is not None
    made.delivered(key, changed)
    assert made.dead_watch() is None


class Meanwhile:
    """A Kube after each of whose lists of `kind` something happens before the list is taken in."""

    def __init__(self, kube: Kube, kind: kinds.Kind, then: Callable[[], object]) -> None:
        self._kube, self._kind, self._then = kube, kind, then

    def list(self, kind: kinds.Kind, namespace: str | None) -> list[Json]:
        found = self._kube.list(kind, namespace)
        if kind is self._kind:
            self._then()
        return found


def versioned(changed: Json) -> tuple[Key, str]:
    metadata = changed["metadata"]
    return Key(metadata["namespace"], metadata["name"]), metadata["resourceVersion"]


def test_what_the_watch_delivers_while_a_list_is_on_its_way_is_not_owed(kube: Kube, namespace: str) -> None:
    clock, edits = Clock(), iter(range(2, 20))
    service(kube, namespace)

    def edit() -> None:
        patch = {"spec": {"replicas": next(edits)}}
        made.delivered(*versioned(kube.merge(kinds.SERVICE, namespace, "chat", patch)))

    made, _, _ = resync(Meanwhile(kube, kinds.SERVICE, edit), namespace, clock)  # type: ignore[arg-type]
    for _ in range(3):
        made.once()
        clock.now_s += WATCH_GRACE_S + 1
        assert made.dead_watch() is None


def test_a_service_that_is_made_while_a_list_is_on_its_way_is_not_taken_for_gone(
    kube: Kube, namespace: str
) -> None:
    clock, fresh = Clock(), iter(["chat"])

    def make() -> None:
        for name in fresh:
            made.delivered(*versioned(service(kube, namespace, name)))

    made, _, asked = resync(Meanwhile(kube, kinds.SERVICE, make), namespace, clock)  # type: ignore[arg-type]
    made.once()
    assert (made.known(), asked) == ([Key(namespace, "chat")], [])
    made.once()
    clock.now_s += WATCH_GRACE_S + 1
    assert made.dead_watch() is None


def test_what_the_watch_says_of_runs_while_a_list_is_on_its_way_stays(kube: Kube, namespace: str) -> None:
    key = Key(namespace, "chat")
    service(kube, namespace)

    def run(name: str) -> Json:
        metadata = {"name": name, "namespace": namespace}
        kind = {"apiVersion": names.API_VERSION, "kind": names.RUN_KIND}
        return kube.create({**kind, "metadata": metadata, "spec": {"service": "chat"}})

    old = run("old")
    turns = iter([True])

    def change() -> None:
        for _ in turns:
            index.put(run("new"))
            kube.delete(kinds.RUN, namespace, "old", old["metadata"]["uid"])
            index.drop({**old, "metadata": old["metadata"] | {"resourceVersion": "999999999"}})

    made, index, _ = resync(Meanwhile(kube, kinds.RUN, change), namespace, Clock())  # type: ignore[arg-type]
    for _ in range(3):
        made.once()
        assert index.names(key) == ["new"]
        assert [run.name for run in index.contenders()[key]] == ["new"]


def test_a_former_holder_of_a_name_that_is_spoken_of_last_makes_nothing_owed(
    kube: Kube, namespace: str
) -> None:
    clock, key = Clock(), Key(namespace, "chat")
    former = versioned(service(kube, namespace))
    found = kube.get(kinds.SERVICE, namespace, "chat")
    assert found is not None
    kube.delete(kinds.SERVICE, namespace, "chat", found["metadata"]["uid"])
    made, _, _ = resync(kube, namespace, clock)
    made.delivered(*versioned(service(kube, namespace)))
    made.delivered(key, former[1])
    made.once()
    clock.now_s += WATCH_GRACE_S + 1
    assert made.dead_watch() is None


def test_a_watch_that_is_ahead_of_a_list_owes_nothing(kube: Kube, namespace: str) -> None:
    clock, key = Clock(), Key(namespace, "chat")
    version = service(kube, namespace)["metadata"]["resourceVersion"]
    made, _, _ = resync(kube, namespace, clock)
    made.delivered(key, str(int(version) + 1))  # changed while the list was under way
    made.once()
    clock.now_s += WATCH_GRACE_S + 1
    assert made.dead_watch() is None
