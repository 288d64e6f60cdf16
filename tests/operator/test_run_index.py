"""Which runs there are: newer wins, whatever the order in which a watch and lists tell it, and nothing is kept of what is gone."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from trimtab_operator import names
from trimtab_operator.cluster.observe import Key, RunIndex

Json = dict[str, Any]
KEY = Key("team", "chat")
ACTIONS = ("make a", "change a", "delete a", "make b", "delete b", "tell", "tell", "ask", "answer")


def run(name: str, version: int) -> Json:
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.RUN_KIND,
        "metadata": {
            "name": name,
            "namespace": "team",
            "uid": f"{name}-{version}",
            "resourceVersion": str(version),
            "creationTimestamp": "2026-01-01T00:00:00Z",
        },
        "spec": {"service": "chat"},
    }


@given(st.lists(st.sampled_from(ACTIONS), max_size=30))
def test_whoever_heard_everything_knows_what_there_is_whatever_list_came_late(actions: list[str]) -> None:
    index, version = RunIndex(), 1
    exists: dict[str, int] = {}
    untold: list[tuple[str, int, bool]] = []
    asked: tuple[list[Json], int] | None = None

    def tell() -> None:
        if untold:
            name, at, deleted = untold.pop(0)
            (index.drop if deleted else index.put)(run(name, at))

    for action in actions:
        word, _, name = action.partition(" ")
        version += 1
        if word == "ask":
            asked = [run(name, at) for name, at in exists.items()], index.mark()
        elif word == "answer" and asked is not None:
            index.replace(*asked)
            asked = None
        elif word == "tell":
            tell()
        elif word == "delete" and name in exists:
            del exists[name]
            untold.append((name, version, True))
        elif word == "make" or (word == "change" and name in exists):
            exists[name] = version
            untold.append((name, version, False))
    if asked is not None:
        index.replace(*asked)
    while untold:
        tell()
    assert index.names(KEY) == sorted(exists)
    assert {one.uid for found in index.contenders().values() for one in found} == {
        f"{name}-{at}" for name, at in exists.items()
    }


def test_a_former_run_of_a_name_whose_end_is_told_last_takes_the_new_one_along_no_more() -> None:
    index = RunIndex()
    index.put(run("a", 3))
    index.put(run("a", 7))
    index.drop(run("a", 5))
    assert index.names(KEY) == ["a"]


def test_a_run_that_went_unseen_and_a_service_that_has_none_any_more_are_forgotten_at_the_next_list() -> None:
    index = RunIndex()
    index.put(run("a", 3))
    index.put(run("b", 4))
    index.drop(run("b", 5))
    index.replace([], index.mark())
    assert index.contenders() == {}
