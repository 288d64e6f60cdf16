"""Whatever is done to a resource, the answer is a parsed service or findings with paths: never another exception."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import yaml

from support.services import BUDGET_PARAMETER, resource
from trimtab_operator import schema
from trimtab_operator.errors import InvalidResource

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
        },
    )
)
# Values that no scalar field of ours takes: of the wrong type, out of every range, or far too long.
POISON: list[Any] = [
    None, [], {}, [[]], {"x": 1}, -1, 2**40, 1.5, -0.1, "", " ", "x" * 5000, "ÿ\n", "1s\n", "-5s", "1e9s", "9999999h", True,
    ["x", 1], {"": None}, "$(rm -rf /)", "1Ei2",
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place below `value`."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


def spoil(seed: int) -> dict[str, Any]:
    """FULL with one to three things wrong."""
    rng = random.Random(seed)
    built: dict[str, Any] = copy.deepcopy(FULL)
    for _ in range(rng.randint(1, 3)):
        *way, last = rng.choice(places(built))
        target: Any = built
        for step in way:
            target = target[step]
        match rng.randrange(4):
            case 0 if isinstance(target, dict):
                target[f"{last}x"] = target.pop(last)
            case 1 if isinstance(target, dict):
                del target[last]
            case 2 if isinstance(target, list):
                target.append(copy.deepcopy(target[last]))
            case _:
                target[last] = copy.deepcopy(rng.choice(POISON))
    return built


def verdict(seed: int) -> InvalidResource | None:
    text = yaml.safe_dump(spoil(seed))
    try:
        built = schema.load_service(text)
    except InvalidResource as error:
        return error
    assert built.spec.model is not None or built.spec.target_ref is not None
    return None


def test_300_spoiled_services_end_in_findings_with_paths() -> None:
    refused: list[InvalidResource] = []
    seed = 0
    while len(refused) < 300:
        assert seed < 900, f"only {len(refused)} of {seed} were refused"
        error = verdict(seed)
        if error is not None:
            refused.append(error)
        seed += 1
    for error in refused:
        assert error.errors
        for finding in error.errors:
            assert finding.path
            assert finding.allowed
            assert len(str(finding)) < 5000
    paths = {finding.path for error in refused for finding in error.errors}
    assert len(paths) > 60, "the spoiled places are many"


@pytest.mark.parametrize("poison", POISON, ids=lambda p: repr(p)[:20])
def test_poison_as_the_whole_of_each_section_is_refused_or_understood(poison: Any) -> None:
    for section in FULL["spec"]:
        built = copy.deepcopy(FULL)
        built["spec"][section] = poison
        assert all(path.startswith("spec") for path in refusals(built)), section


def refusals(built: dict[str, Any]) -> list[str]:
    """Paths of all findings; empty when the resource is valid."""
    try:
        schema.parse_service(built)
    except InvalidResource as error:
        return [finding.path for finding in error.errors]
    return []
