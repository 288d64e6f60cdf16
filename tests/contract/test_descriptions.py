"""Every field says in words what it is: meaning, default, range, unit, and when a change takes effect. So `kubectl explain` does.

The words are held equal to what the schema and the plan do, so that neither can move alone.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from support.crd_fields import every_field, leaves, spec_schema
from trimtab_operator import crds, names
from trimtab_operator.plan.template import effect_of

Json = dict[str, Any]
KINDS = (names.SERVICE_KIND, names.RUN_KIND)
SPEC = [(kind, path, field) for kind in KINDS for path, field in every_field(spec_schema(kind))]
IDS = [f"{kind}-{path}" for kind, path, _ in SPEC]
UNITS = "tokens|requests|engines|replicas|GPUs|percent|a fraction|trials|windows|pods|runs"

field_of_spec = pytest.mark.parametrize(("kind", "path", "field"), SPEC, ids=IDS)


@field_of_spec
def test_description_begins_with_the_fields_name_and_says_what_it_means(
    kind: str, path: str, field: Json
) -> None:
    words = re.split(r"(?:Default|Absent|No default|Change:)", field["description"])[0].split()
    assert words[0] == path.rpartition(".")[2].removesuffix("[]")
    assert len(words) >= 3
    if "items" in field:
        assert len(field["items"]["description"].split()) >= 2


@field_of_spec
def test_description_says_what_holds_when_the_field_is_absent(kind: str, path: str, field: Json) -> None:
    text = field["description"]
    default = field.get("default")
    if default is None or default == {}:
        assert re.search(r"Absent means \w+|No default[.,]", text), text
    else:
        want = str(default).lower() if isinstance(default, bool) else str(default)
        said = re.search(r"Default (\S+?)[.,;]?( |$)", text)
        assert said, text
        assert said[1] == want


@field_of_spec
def test_description_tells_the_range_and_its_unit(kind: str, path: str, field: Json) -> None:
    text, pattern = field["description"], field.get("pattern", "")
    for choice in field.get("enum") or field.get("items", {}).get("enum") or ():
        assert re.search(rf"(?<![\w-]){re.escape(str(choice))}(?![\w-])", text), choice
    match field["type"]:
        case "integer" | "number" if "enum" in field:
            assert re.search(rf"\b({UNITS})\b", text), text
        case "integer" | "number":
            said = re.search(rf"ange {field['minimum']} to {field['maximum']}\b,? ?(\w+ ?\w+)?", text)
            assert said, text
            assert re.match(rf"({UNITS})\b", said[1] or "") or "TCP port" in text, text
        case "boolean":
            assert "default" in field or "true or false" in text, text
        case "array" if field.get("minItems"):
            assert f"{field['minItems']} to {field['maxItems']} of them" in text
        case "array":
            assert f"At most {field['maxItems']}" in text
        case "object" if "additionalProperties" in field:
            assert f"At most {field['maxProperties']}" in text
        case "string" if "(ms|s|m|h)" in pattern:
            assert re.search(r"ange (0 \(no aging\)|\d+(ms|s|m)) to \d+(s|m|h)\b", text), text
        case "string" if "Ki|Mi|Gi" in pattern:
            assert "bytes as a quantity" in text.replace(",", "")
        case "string" if "@(hourly" in pattern:
            assert "cron line of five fields" in text
        case "string" if pattern.endswith("%$"):
            assert "range 0% to 99%" in text
        case "string" if "enum" not in field:
            assert f"at most {field['maxLength']} characters" in text.lower(), text


def effects(kind: str, path: str) -> set[str]:
    """What the leaves below (or at) a field say."""
    below = (f"{path}.", f"{path}[].")
    texts = [
        leaf["description"]
        for where, leaf in leaves(kind).items()
        if where == path or where.startswith(below)
    ]
    return {re.findall(r"Change: (.*)\.$", text)[0] for text in texts}


@field_of_spec
def test_description_ends_with_when_a_change_takes_effect(kind: str, path: str, field: Json) -> None:
    said = re.search(r" Change: ([^:]*)\.$", field["description"])
    assert said, field["description"]
    want = effects(kind, path)
    assert said[1] == (want.pop() if len(want) == 1 else "as each field says")
    if kind == names.RUN_KIND:
        assert said[1] == "refused, since spec is read once"
    elif said[1] != "as each field says":
        assert said[1].removesuffix(" (it cannot change)") == effect_of(path.replace("[]", ""))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_the_status_is_described_by_its_own_name(kind: str) -> None:
    for path, field in every_field(crds.openapi(kind)["properties"]["status"]):
        text = field["description"]
        assert text.split()[0].rstrip(",") == path.rpartition(".")[2], path
        assert len(text.split()) >= 2, path
        if "items" in field:
            assert field["items"]["description"].startswith("One "), path


@pytest.mark.parametrize("kind", KINDS)
def test_printer_columns_read_like_a_notebook(kind: str) -> None:
    columns = crds.definition(kind)["spec"]["versions"][0]["additionalPrinterColumns"]
    want = {
        names.SERVICE_KIND: [
            "Model", "Ready", "Available", "Reason", "Replicas", "Policy", "BatchTokens", "SLO", "URL", "Age",
        ],
        names.RUN_KIND: ["Service", "Phase", "Reason", "Trials", "Incumbent", "Candidate", "P99 ITL", "Verdict", "Age"],
    }  # fmt: skip
    assert [column["name"] for column in columns] == want[kind]
