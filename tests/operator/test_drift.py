"""Drift: what the API server adds or rewrites is none; what we want and is not there, or no longer want, is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.services import service
from trimtab_operator.api.status import Resolved
from trimtab_operator.plan.drift import digest, drift, stamped
from trimtab_operator.plan.manifests import Context, manifests

Json = dict[str, Any]
CONTEXT = Context(Resolved(image="engine:1"), admin_public_key="KEY")
DEPLOYMENT = manifests(service(**{"podTemplate.spec.containers": [
    {"name": "engine", "resources": {"limits": {"cpu": "1000m", "memory": "1024Mi"}}, "env": [{"name": "A", "value": "1"}]}
]}), CONTEXT)[-1]  # fmt: skip

scalars = st.booleans() | st.integers(-5, 5) | st.text("abc", max_size=3)
trees = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("kl", max_size=2), inner, max_size=3), max_leaves=12
)  # fmt: skip


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if isinstance(value, dict) and value:
        return [found for key, item in value.items() for found in leaves(item, (*path, key))]
    if isinstance(value, list) and value:
        return [found for i, item in enumerate(value) for found in leaves(item, (*path, i))]
    return [path]


def change(value: Json, path: tuple[Any, ...], to: object) -> Json:
    changed = copy.deepcopy(value)
    target: Any = changed
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = to
    return changed


@given(trees)
def test_nothing_drifts_from_itself(tree: Any) -> None:
    assert drift(tree, copy.deepcopy(tree)) == ()


@given(
    st.dictionaries(
        st.text("kl", max_size=2), st.dictionaries(st.text("mn"), scalars, min_size=1), min_size=1
    ),
    st.dictionaries(st.text("xyz", min_size=3, max_size=4), scalars),
)
def test_fields_of_others_are_no_drift(ours: Json, others: Json) -> None:
    assert drift(ours, {**{key: {**value, **others} for key, value in ours.items()}, **others}) == ()


def test_an_object_that_is_to_be_empty_must_be_empty() -> None:
    # A NetworkPolicy's `podSelector: {}` means everybody.
    assert drift({"podSelector": {}}, {"podSelector": {"matchLabels": {"a": "b"}}}) == ("podSelector",)


@pytest.mark.parametrize(
    ("ours", "live", "path"),
    [
        pytest.param({"spec": {"selector": {"a": "b"}}}, {"spec": {"selector": {"a": "b", "c": "d"}}}, "spec.selector.c", id="service"),
        pytest.param({"selector": {"matchLabels": {"a": "b"}}},
                     {"selector": {"matchLabels": {"a": "b"}, "matchExpressions": [{"key": "c", "operator": "Exists"}]}},
                     "selector.matchExpressions", id="budget"),
        pytest.param({"ingress": [{"ports": [{"port": "http", "protocol": "TCP"}]}]},
                     {"ingress": [{"ports": [{"port": "http", "protocol": "TCP"}], "from": [{"podSelector": {}}]}]},
                     "ingress[0].from", id="policy"),
        pytest.param({"nodeSelector": {"a": "b"}}, {"nodeSelector": {"a": "b", "c": "d"}}, "nodeSelector.c", id="nodes"),
    ],
)  # fmt: skip
def test_a_key_that_narrows_a_selector_is_drift_and_no_foreign_field(
    ours: Json, live: Json, path: str
) -> None:
    assert drift(ours, live) == (path,)
    assert drift(ours, ours) == ()


def test_every_changed_leaf_of_a_deployment_is_found() -> None:
    for path in leaves(DEPLOYMENT):
        changed = change(DEPLOYMENT, path, "something else")
        assert drift(DEPLOYMENT, changed), path


def test_every_missing_leaf_of_a_deployment_is_found_unless_it_says_nothing() -> None:
    for path in leaves(DEPLOYMENT):
        gone: Any = DEPLOYMENT
        for step in path:
            gone = gone[step]
        if gone in (False, 0, "", [], {}):
            continue
        missing = copy.deepcopy(DEPLOYMENT)
        target: Any = missing
        for step in path[:-1]:
            target = target[step]
        del target[path[-1]]
        assert drift(DEPLOYMENT, missing), path


@pytest.mark.parametrize(
    ("wanted", "live"),
    [
        pytest.param({"limits": {"cpu": "1000m"}}, {"limits": {"cpu": "1"}}, id="thousandths"),
        pytest.param({"limits": {"memory": "1024Mi"}}, {"limits": {"memory": "1Gi"}}, id="binary suffix"),
        pytest.param({"requests": {"nvidia.com/gpu": 1}}, {"requests": {"nvidia.com/gpu": "1"}}, id="number"),
        pytest.param(
            {"emptyDir": {"sizeLimit": "1073741824"}}, {"emptyDir": {"sizeLimit": "1Gi"}}, id="bytes"
        ),
        pytest.param({"a": None, "b": {}, "c": [], "d": ""}, {}, id="empty values are dropped"),
        pytest.param({"readOnly": False}, {}, id="false is dropped"),
        pytest.param(
            {"ports": [{"name": "http", "port": 80}]},
            {"ports": [{"name": "extra", "port": 1}, {"name": "http", "port": 80, "nodePort": 30001}]},
            id="entries are found by key, in any place",
        ),
    ],
)
def test_the_same_in_other_words_is_no_drift(wanted: Json, live: Json) -> None:
    assert drift(wanted, live) == ()


@pytest.mark.parametrize(
    ("wanted", "live", "path"),
    [
        pytest.param({"limits": {"cpu": "1"}}, {"limits": {"cpu": "2"}}, "limits.cpu", id="quantity"),
        pytest.param({"image": "1"}, {"image": "1000m"}, "image", id="no quantity outside of quantities"),
        pytest.param({"replicas": 0}, {"replicas": 3}, "replicas", id="zero against three"),
        pytest.param({"args": ["a", "b"]}, {"args": ["b", "a"]}, "args[0]", id="order of a plain list"),
        pytest.param({"args": ["a"]}, {"args": ["a", "b"]}, "args", id="longer plain list"),
        pytest.param({"env": [{"name": "A", "value": "1"}]}, {"env": []}, "env[A]", id="missing entry"),
        pytest.param({"on": True}, {"on": 1}, "on", id="a number is no boolean"),
    ],
)
def test_drift_names_the_path(wanted: Json, live: Json, path: str) -> None:
    assert drift(wanted, live)[0] == path


def test_what_we_no_longer_say_is_found_by_the_digest() -> None:
    before = {"kind": "Service", "metadata": {"name": "a", "annotations": {"x": "1"}}, "spec": {}}
    after = {"kind": "Service", "metadata": {"name": "a"}, "spec": {}}
    assert drift(stamped(after), stamped(before)) != ()
    assert drift(stamped(before), stamped(copy.deepcopy(before))) == ()
    assert digest(before) == digest(copy.deepcopy(before))
