"""Each CEL rule of both CRDs, with a resource that it lets pass and one that it refuses, told by its own message."""

from __future__ import annotations

import pytest

from support.crd_fields import every_rule
from support.rule_cases import CASES, Case
from support.services import run_resource
from trimtab_operator import schema
from trimtab_operator.errors import InvalidResource

FLAT = [(kind, case) for kind, cases in CASES.items() for case in cases]


@pytest.mark.parametrize(("kind", "case"), FLAT, ids=[f"{kind}-{case.message}" for kind, case in FLAT])
def test_rule_lets_the_good_pass_and_names_itself_to_the_bad(kind: str, case: Case) -> None:
    old = None if case.old is None else schema.validate(case.old)
    schema.validate(case.good, old, kind)
    with pytest.raises(InvalidResource) as caught:
        schema.validate(case.bad, old, kind)
    assert [f.allowed for f in caught.value.errors if f.allowed.startswith(case.message)], caught.value
    assert all(finding.path for finding in caught.value.errors)


@pytest.mark.parametrize("kind", CASES)
def test_no_rule_is_without_an_example(kind: str) -> None:
    messages = {message for _, _, message in every_rule(kind)}
    without = {m for m in messages if not any(m.startswith(case.message) for case in CASES[kind])}
    assert without == set()
    for case in CASES[kind]:
        assert sum(m.startswith(case.message) for m in messages) == 1, case.message


def test_transition_rules_do_not_speak_about_a_new_resource() -> None:
    schema.validate(run_resource(maxTrials=3))
