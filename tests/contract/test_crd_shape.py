"""What every CRD of ours must be: structural, described, bounded, and readable to kstatus and kubectl."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import pytest

from support.crd_fields import every_field, every_rule, spec_schema
from trimtab_operator import cel, crds, names
from trimtab_operator.api import RunSpec, RunStatus
from trimtab_operator.api.parse import wire_name
from trimtab_operator.api.service import ServiceSpec
from trimtab_operator.api.status import ServiceStatus
from trimtab_operator.plan.engine_flags import OWNED_FLAGS

KINDS = [names.SERVICE_KIND, names.RUN_KIND]


def all_fields(kind: str) -> list[tuple[str, dict[str, Any]]]:
    return list(every_field(crds.openapi(kind)))


@pytest.mark.parametrize("kind", KINDS)
def test_definition_names_itself_consistently(kind: str) -> None:
    definition = crds.definition(kind)
    spec = definition["spec"]
    assert definition["metadata"]["name"] == f"{spec['names']['plural']}.{spec['group']}"
    assert spec["group"] == names.GROUP
    assert spec["scope"] == "Namespaced"
    assert [v["name"] for v in spec["versions"]] == [names.VERSION]
    assert spec["names"]["shortNames"] == [{"InferenceService": "infsvc", "TuningRun": "trun"}[kind]]
    assert "status" in spec["versions"][0]["subresources"]


def test_scale_subresource_can_be_driven_by_an_autoscaler() -> None:
    version = crds.definition(names.SERVICE_KIND)["spec"]["versions"][0]
    assert version["subresources"]["scale"] == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_printer_columns_point_at_fields_that_exist(kind: str) -> None:
    known = {path for path, _ in all_fields(kind)}
    for column in crds.definition(kind)["spec"]["versions"][0]["additionalPrinterColumns"]:
        path = column["jsonPath"].removeprefix(".")
        if path.startswith("metadata."):
            continue
        path = re.sub(r"\[\?\(.*\)\]", "[]", path)
        assert path in known, column


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_typed_and_described(kind: str) -> None:
    for path, field in all_fields(kind):
        if path == "metadata":
            # The API server describes it itself and refuses a CRD that says more.
            assert field == {"type": "object"}
            continue
        assert field.get("type"), path
        assert len(field.get("description", "")) > 12, path
        if field["type"] == "array":
            assert field["items"].get("type"), path
            assert field["items"].get("description") or field["items"].get("properties"), path


@pytest.mark.parametrize("kind", KINDS)
def test_every_size_is_bounded_so_that_rules_stay_cheap(kind: str) -> None:
    for path, field in every_field(spec_schema(kind)):
        for entry, where in ((field, path), (field.get("items", {}), f"{path}[]")):
            if entry.get("type") == "string":
                assert "enum" in entry or "maxLength" in entry, where
            if entry.get("type") == "array":
                assert "maxItems" in entry, where
            if entry.get("type") == "integer":
                assert "enum" in entry or {"minimum", "maximum"} <= set(entry), where
            if "additionalProperties" in entry:
                assert "maxProperties" in entry, where
                assert "properties" not in entry, where


@pytest.mark.parametrize("kind", KINDS)
def test_patterns_are_anchored_at_both_ends(kind: str) -> None:
    for path, field in all_fields(kind):
        if "pattern" in field:
            assert field["pattern"].startswith("^"), path
            assert field["pattern"].endswith("$"), path


@pytest.mark.parametrize("kind", KINDS)
def test_conditions_are_a_list_map_by_type(kind: str) -> None:
    conditions = dict(all_fields(kind))["status.conditions"]
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]


@pytest.mark.parametrize("kind", KINDS)
def test_rules_hold_for_the_bare_defaults_of_their_objects(kind: str) -> None:
    # The API server judges `default: {}` by the object's own rules before nested defaults are there.
    judged = 0
    for path, field in all_fields(kind):
        for entry in field.get("x-kubernetes-validations", ()) if "default" in field else ():
            assert cel.holds(entry["rule"], field["default"], field["default"]), path
            judged += 1
    assert judged > 0


@pytest.mark.parametrize("kind", KINDS)
def test_rules_keep_to_the_shared_part_of_cel_and_have_fixed_messages(kind: str) -> None:
    allowed = {"has", "all", "exists_one", "matches", "size"}
    found = list(every_rule(kind))
    assert found
    for place, rule, message in found:
        code = re.sub(r"'[^']*'", "''", rule)  # without text literals
        assert set(re.findall(r"([A-Za-z_]+)\(", code)) <= allowed, rule
        assert message, place
    for _, field in all_fields(kind):
        for entry in field.get("x-kubernetes-validations", ()):
            assert set(entry) == {"rule", "message"}


def shape_of(cls: type, schema: dict[str, Any], path: str) -> None:
    """The dataclass has exactly the fields of the schema, all the way down."""
    hints = get_type_hints(cls)
    ours = {wire_name(f.name, f.metadata): hints[f.name] for f in fields(cls)}
    assert set(ours) == set(schema["properties"]), path
    for name, hint in ours.items():
        child = schema["properties"][name]
        options = [hint, *get_args(hint)]
        nested = next((o for o in options if isinstance(o, type) and is_dataclass(o)), None)
        if nested is not None:
            shape_of(nested, child.get("items", child), f"{path}.{name}")
        else:
            assert not child.get("properties"), f"{path}.{name}"


def test_spec_dataclasses_have_exactly_the_fields_of_the_crd() -> None:
    shape_of(ServiceSpec, spec_schema(names.SERVICE_KIND), "spec")


def test_status_dataclasses_have_exactly_the_fields_of_the_crd() -> None:
    shape_of(ServiceStatus, crds.openapi(names.SERVICE_KIND)["properties"]["status"], "status")


def test_run_dataclasses_have_exactly_the_fields_of_the_crd() -> None:
    shape_of(RunSpec, spec_schema(names.RUN_KIND), "spec")
    shape_of(RunStatus, crds.openapi(names.RUN_KIND)["properties"]["status"], "status")


def test_the_rule_on_extra_arguments_lists_the_flags_that_we_set() -> None:
    rule = next(
        r for place, r, _ in every_rule(names.SERVICE_KIND) if "extraArgs" in r and place == "spec.engine"
    )
    listed = re.search(r"\^--\(([^)]*)\)", rule)
    assert listed
    assert tuple(listed[1].split("|")) == OWNED_FLAGS


def test_both_kinds_describe_parameters_alike() -> None:
    def bare(schema: dict[str, Any]) -> dict[str, Any]:
        text = repr(schema)
        return {"text": re.sub(r"'description': (\"[^\"]*\"|'[^']*')", "", text)}

    service = spec_schema(names.SERVICE_KIND)["properties"]["tuning"]["properties"]["parameters"]
    run = spec_schema(names.RUN_KIND)["properties"]["parameters"]
    assert bare(service["items"]) == bare(run["items"])
