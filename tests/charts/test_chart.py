"""The chart carries the checkout's CRDs, and its values say what they are."""

import json
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "trimtab"


def test_chart_carries_the_crds_byte_for_byte() -> None:
    ours = {path.name: path.read_bytes() for path in (ROOT / "crds").glob("*.yaml")}
    theirs = {path.name: path.read_bytes() for path in (CHART / "files").glob("*.yaml")}
    assert ours
    assert theirs == ours, "run: make format"


def test_every_value_is_in_the_schema_and_no_other_is_allowed() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    crds = schema["properties"]["crds"]
    assert set(values) == set(schema["properties"]) - {"global"}
    assert set(values["crds"]) == set(crds["properties"])
    assert schema["additionalProperties"] is crds["additionalProperties"] is False
