"""v1alpha1 changes by addition only: the CRDs are held against those of the last release, which lie beside this file.

A release copies `crds/*.yaml` into `released/`. Until then, whatever a user could write with the last release must stay allowed
and mean the same. A deliberate break is written into `ACCEPTED`, with its reason, and into the release's notes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.crd_compat import breaks
from trimtab_operator import crds, names

Json = dict[str, Any]
RELEASED = Path(__file__).parent / "released"
KINDS = (names.SERVICE_KIND, names.RUN_KIND)
#: line of `breaks` → why it may be.
ACCEPTED: dict[str, str] = {}


def released(kind: str) -> Json:
    found: Json = yaml.safe_load((RELEASED / crds.FILES[kind]).read_text())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_the_last_release_allowed_is_gone_or_tighter(kind: str) -> None:
    assert [line for line in breaks(released(kind), crds.definition(kind)) if line not in ACCEPTED] == []


def test_every_accepted_break_still_exists() -> None:
    found = {line for kind in KINDS for line in breaks(released(kind), crds.definition(kind))}
    assert set(ACCEPTED) <= found


def spec_of(definition: Json) -> Json:
    schema: Json = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    found: Json = schema["properties"]["spec"]["properties"]
    return found


def engine(definition: Json) -> Json:
    found: Json = spec_of(definition)["engine"]
    return found


CHANGES: list[tuple[str, str, Callable[[Json], object]]] = [
    ("a field goes", "spec.replicas: is gone", lambda d: spec_of(d).pop("replicas")),
    (
        "a nested field goes",
        "spec.engine.ceilings.maxNumSeqs: is gone",
        lambda d: engine(d)["properties"]["ceilings"]["properties"].pop("maxNumSeqs"),
    ),
    ("a maximum falls", "spec.replicas: maximum 256 became 8", lambda d: spec_of(d)["replicas"].update(maximum=8)),
    ("a minimum rises", "spec.replicas: minimum 0 became 1", lambda d: spec_of(d)["replicas"].update(minimum=1)),
    (
        "a bound appears",
        "spec.engine.enablePrefixCaching: maxLength None became 3",
        lambda d: engine(d)["properties"]["enablePrefixCaching"].update(maxLength=3),
    ),
    (
        "a choice goes",
        "spec.engine.runtime: enum lost ['vllm']",
        lambda d: engine(d)["properties"]["runtime"].update(enum=["trimtab"]),
    ),
    ("a field becomes required", "spec.engine: image became required", lambda d: engine(d).update(required=["image"])),
    (
        "a default changes",
        "spec.replicas: default 1 became 2",
        lambda d: spec_of(d)["replicas"].update(default=2),
    ),
    (
        "a type changes",
        "spec.replicas: type 'integer' became 'string'",
        lambda d: spec_of(d)["replicas"].update(type="string"),
    ),
    (
        "a pattern changes",
        "spec.startupTimeout: pattern",
        lambda d: spec_of(d)["startupTimeout"].update(pattern="^[0-9]+s$"),
    ),
    (
        "a rule appears",
        "spec.engine: new rule: no",
        lambda d: engine(d)["x-kubernetes-validations"].append({"rule": "false", "message": "no"}),
    ),
    (
        "an entry of a list is tighter",
        "spec.engine.extraArgs[]: maxLength 256 became 16",
        lambda d: engine(d)["properties"]["extraArgs"]["items"].update(maxLength=16),
    ),
    (
        "a value of a map is tighter",
        "spec.service.annotations{}: maxLength 4096 became 16",
        lambda d: spec_of(d)["service"]["properties"]["annotations"]["additionalProperties"].update(maxLength=16),
    ),
    (
        "a template is no longer free",
        "spec.podTemplate: unknown fields are no longer kept",
        lambda d: spec_of(d)["podTemplate"].pop("x-kubernetes-preserve-unknown-fields"),
    ),
    ("the short name goes", "spec.names.shortNames", lambda d: d["spec"]["names"].update(shortNames=[])),
    (
        "scaling goes",
        "subresources.scale",
        lambda d: d["spec"]["versions"][0]["subresources"].pop("scale"),
    ),
    (
        "a printer column moves",
        "printer column Model",
        lambda d: d["spec"]["versions"][0]["additionalPrinterColumns"][0].update(jsonPath=".x"),
    ),
    ("the version goes", "v1alpha1: is no longer served", lambda d: d["spec"]["versions"][0].update(served=False)),
]  # fmt: skip


@pytest.mark.parametrize(("what", "line", "change"), CHANGES, ids=[what for what, _, _ in CHANGES])
def test_a_break_is_found_and_names_its_path(what: str, line: str, change: Callable[[Json], object]) -> None:
    old = crds.definition(names.SERVICE_KIND)
    new = copy.deepcopy(old)
    change(new)
    found = breaks(old, new)
    assert len(found) == 1, found
    assert line in found[0]


def test_additions_and_loosened_bounds_break_nothing() -> None:
    old = crds.definition(names.SERVICE_KIND)
    new = copy.deepcopy(old)
    spec_of(new)["colour"] = {"type": "string", "default": "blue", "maxLength": 8}
    spec_of(new)["replicas"].update(maximum=1024)
    spec_of(new)["rollout"]["properties"]["strategy"]["enum"].append("BlueGreen")
    engine(new)["properties"]["image"].pop("maxLength")
    engine(new)["x-kubernetes-validations"].pop()
    new["spec"]["names"]["shortNames"].append("tsvc")
    new["spec"]["versions"].append({**new["spec"]["versions"][0], "name": "v1beta1"})
    assert breaks(old, new) == []
