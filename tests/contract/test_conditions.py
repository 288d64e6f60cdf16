"""Conditions and reasons: the words in the code, in the CRD's description and in the documentation are one list."""

from __future__ import annotations

import re
from pathlib import Path

from support.crd_fields import every_field
from support.pods import T0
from support.services import BUDGET_PARAMETER, service
from trimtab_operator import crds, names
from trimtab_operator.api.status import Resolved
from trimtab_operator.plan import cluster
from trimtab_operator.plan.pods import rfc3339

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "operator.md").read_text()
SECTION = PAGE.partition("## Conditions and reasons")[2].partition("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")] for line in SECTION.splitlines() if line[:2] == "| "
]
CONDITIONS = {row[0].split()[0] for row in ROWS[1:]}


def reasons() -> set[str]:
    """Every constant of `names` that is a reason: CamelCase, and neither a kind nor only the name of a condition."""
    words = {value for value in vars(names).values() if isinstance(value, str)}
    camel = {word for word in words if re.fullmatch(r"[A-Z][A-Za-z]+", word)}
    return camel - {names.SERVICE_KIND, names.RUN_KIND} - (CONDITIONS - {names.MODEL_IS_LOADED})


def test_the_page_the_crd_and_the_plan_have_the_same_conditions() -> None:
    described = dict(every_field(crds.openapi(names.SERVICE_KIND)))["status.conditions"]["description"]
    assert set(re.findall(r"[A-Z][A-Za-z]+", described)) == CONDITIONS
    drift = {"drift": {"enabled": True}, "parameters": [BUDGET_PARAMETER]}
    seen = cluster.Observed(service(tuning=drift))
    decision = cluster.decide(seen, cluster.Settings(Resolved(image="i")), T0, rfc3339(T0))
    status = cluster.conclude(seen, decision, T0, rfc3339(T0)).status
    found = {condition.type for condition in status.conditions}
    assert found | {names.MONITORING_READY} == CONDITIONS, "the latter only where monitors are wanted"


def test_every_reason_of_the_code_is_on_the_page_and_no_other() -> None:
    written = {word for row in ROWS[1:] for word in re.findall(r"[A-Z][A-Za-z]+", row[2])}
    prose = SECTION.rpartition("|")[2]
    written |= set(re.findall(r"\b[A-Z][a-z]+[A-Z][A-Za-z]+\b", prose)) - {"TuningRun"}
    written -= {"Stalled"}  # "and every reason of Stalled"
    assert reasons() - written == set(), "not on the page"
    assert written - reasons() == set(), "not in the code"
