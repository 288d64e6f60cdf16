"""The chart carries the checkout's CRDs, and its values say what they are. What helm makes of it: tests/cluster/test_chart.py."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from trimtab_operator.cluster.metrics import OperatorMetrics

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "trimtab"
Json = dict[str, Any]


@pytest.fixture(scope="module")
def schema() -> Json:
    found: Json = json.loads((CHART / "values.schema.json").read_text())
    return found


@pytest.fixture(scope="module")
def values() -> Json:
    found: Json = yaml.safe_load((CHART / "values.yaml").read_text())
    return found


def test_chart_carries_the_crds_byte_for_byte() -> None:
    ours = {path.name: path.read_bytes() for path in (ROOT / "crds").glob("*.yaml")}
    theirs = {path.name: path.read_bytes() for path in (CHART / "files").glob("*.yaml")}
    assert ours
    assert theirs == ours, "run: make format"


def _fixed(schema: Json, values: Json, path: str = "") -> Iterator[tuple[str, set[str], set[str], object]]:
    """Each object of the schema with named fields: path, fields in the schema, fields in values.yaml, additionalProperties."""
    definitions = schema.get("definitions", {})

    def walk(node: Json, value: Any, path: str) -> Iterator[tuple[str, set[str], set[str], object]]:
        if "$ref" in node:
            node = definitions[node["$ref"].rpartition("/")[2]]
        if "properties" not in node:
            return
        yield path, set(node["properties"]) - {"global"}, set(value), node.get("additionalProperties")
        for name, below in node["properties"].items():
            if name in value:
                yield from walk(below, value[name], f"{path}.{name}")

    yield from walk(schema, values, path)


def test_every_value_is_in_the_schema_and_no_other_is_allowed(schema: Json, values: Json) -> None:
    objects = list(_fixed(schema, values))
    assert len(objects) > 10
    for path, allowed, given, additional in objects:
        assert allowed == given, path
        assert additional is False, path


def test_the_defaults_are_valid(schema: Json, values: Json) -> None:
    jsonschema.Draft7Validator.check_schema(schema)
    assert list(jsonschema.Draft7Validator(schema).iter_errors(values)) == []


def test_every_value_says_why_one_would_change_it() -> None:
    before = ""
    bare = []
    for line in (CHART / "values.yaml").read_text().splitlines():
        if re.match(r" *[A-Za-z]+:", line) and not before.strip().startswith("#"):
            bare.append(line)
        before = line
    assert bare == []


def test_templates_are_the_same_text_for_the_same_values() -> None:
    changing = re.compile(
        r"\b(lookup|rand\w*|uuidv4|now|date\w*|gen[A-Z]\w*|shuffle|htpasswd|bcrypt|derivePassword)\b"
    )
    for path in sorted((CHART / "templates").iterdir()):
        text = re.sub(r"{{-?\s*/\*.*?\*/\s*-?}}", "", path.read_text(), flags=re.DOTALL)
        code = " ".join(re.findall(r"{{(.*?)}}", text, flags=re.DOTALL))
        assert changing.findall(re.sub(r'"[^"]*"', "", code)) == [], path.name


def test_alerts_ask_for_metrics_that_the_operator_has() -> None:
    asked = set(re.findall(r"trimtab_operator_[a-z_]+", (CHART / "templates" / "_alerts.tpl").read_text()))
    there = re.findall(r"^# TYPE (\S+) \S+", OperatorMetrics().render().decode(), flags=re.MULTILINE)
    assert asked
    assert asked <= set(there)


def test_every_alert_has_a_section_that_says_what_to_do() -> None:
    alerts = re.findall(r"- alert: (\w+)", (CHART / "templates" / "_alerts.tpl").read_text())
    headings = re.findall(r"^#+ (\w+)$", (ROOT / "docs" / "helm.md").read_text(), flags=re.MULTILINE)
    assert set(alerts) <= set(headings)
    assert len(alerts) == len(set(alerts)) > 3
