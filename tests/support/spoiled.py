"""Resources with something wrong, made by hypothesis: a full valid one, spoiled in one to three places.

Used where whatever a person writes must end in an answer: by the tests of `schema`, and on a real API server with the operator.
"""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from support.services import BUDGET_PARAMETER, resource, run_resource
from trimtab_operator import schema

Json = dict[str, Any]
_DURATION = re.compile(r"\d+(ms|s|m|h)")

FULL = schema.validate(
    resource(
        tuning={
            "mode": "Apply",
            "parameters": [BUDGET_PARAMETER, {"name": "schedulingPolicy", "choices": ["fcfs"]}],
            "nightly": {"schedule": "@daily"},
        },
        **{
            "slo.classes": [{"name": "batch", "ttft": "9s"}],
            "engine.extraArgs": ["--seed=1"],
            "podTemplate.spec.containers": [{"name": "engine", "env": [{"name": "A", "value": "1"}]}],
            "security.apiKeySecretRef": {"name": "keys"},
            "model.cache": {"claimName": "c"},
            "suspend": True,  # whatever is valid after all starts no engine
        },
    )
)
FULL_RUN = schema.validate(
    run_resource(
        parameters=[BUDGET_PARAMETER, {"name": "schedulingPolicy", "choices": ["fcfs"]}],
        workload={"type": "Trace", "traceRef": {"name": "t"}},
    )
)
#: Values that no scalar field of ours takes: of the wrong type, out of every range, or far too long.
POISON: tuple[Any, ...] = (
    None, [], {}, [[]], {"x": 1}, -1, 2**40, 1.5, -0.1, "", " ", "x" * 5000, "ÿ\n", "1s\n", "-5s", "1e9s", "9999999h", True,
    ["x", 1], {"": None}, "$(rm -rf /)", "1Ei2", "0s", "25h",
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place below `value`."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


@st.composite
def spoiled(draw: st.DrawFn, full: Json) -> Json:
    """`full` with one to three things wrong; now and then it is valid all the same."""
    built = copy.deepcopy(full)
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from(places(built)))
        target: Any = built
        for step in way:
            target = target[step]
        action = draw(st.sampled_from(["rename", "delete", "poison", "poison", "scalar"]))
        if action == "rename" and isinstance(target, dict):
            target[f"{last}x"] = target.pop(last)
        elif action == "delete" and isinstance(target, dict) and len(target) > 1:
            del target[last]
        elif action == "rename":
            target.append(copy.deepcopy(target[last])) if isinstance(target, list) else None
        elif action == "scalar":
            target[last] = draw(st.one_of(st.integers(-(2**53), 2**53), st.text(max_size=20), st.booleans()))
        else:
            target[last] = copy.deepcopy(draw(st.sampled_from(POISON)))
    return built


def distinct(strategy: st.SearchStrategy[Json], count: int) -> list[Json]:
    """`count` different examples, by the profile in force (the same ones each time in CI)."""
    found: dict[str, Json] = {}

    @settings(
        max_examples=3 * count,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(example: Json) -> None:
        if len(found) < count:
            found.setdefault(json.dumps(example, sort_keys=True), example)

    collect()
    assert len(found) == count, f"only {len(found)} different ones"
    return list(found.values())


def too_long(full: Json) -> list[Json]:
    """`full` with one duration each beyond every range: the API server knows no durations, so that the operator must tell of it."""
    found = []
    for *way, last in places(full):
        built = copy.deepcopy(full)
        target: Any = built
        for step in way:
            target = target[step]
        if isinstance(target[last], str) and _DURATION.fullmatch(target[last]):
            target[last] = "999h"
            found.append(built)
    return found
