"""What the API server refused, told by the paths of the service that its owner wrote."""

from __future__ import annotations

from typing import Any

from trimtab_operator.plan.refused import findings

WHAT = "PATCH /apis/apps/v1/namespaces/team/deployments/chat-engine"
DEPLOYMENT: dict[str, Any] = {
    "kind": "Deployment",
    "spec": {"template": {"spec": {"containers": [{"name": "engine"}, {"name": "engin"}]}}},
}


def told(causes: list[tuple[str, str]], message: str = "", what: str = WHAT) -> list[str]:
    return [str(finding) for finding in findings(what, causes, message, [{"kind": "Service"}, DEPLOYMENT])]


def test_a_misspelt_container_is_told_by_its_name_and_by_what_it_lacks() -> None:
    [text] = told([("spec.template.spec.containers[1].image", "Required value")])
    assert text == (
        "spec.podTemplate.spec.containers[engin].image: Required value; every container but `engine`, whose image is ours, "
        "needs one"
    )


def test_a_field_that_pods_do_not_have_is_told_by_its_path_in_the_service() -> None:
    typed = "failed to create typed patch object (team/chat-engine; apps/v1, Kind=Deployment): "
    assert told([], f"{typed}.spec.template.spec.contaners: field not declared in schema") == [
        "spec.podTemplate.spec.contaners: field not declared in schema"
    ]
    path = 'spec.template.spec.containers[name="engine"].imagee'
    assert told([], f"{typed}errors:\n  .{path}: field not declared in schema\n  .spec.x: no") == [
        'spec.podTemplate.spec.containers[name="engine"].imagee: field not declared in schema',
        "deployments/chat-engine spec.x: no",
    ]


def test_what_is_not_the_pod_template_names_the_object() -> None:
    service = "PATCH /api/v1/namespaces/team/services/chat"
    causes = [("spec.ports[0].nodePort", "Invalid value: 7: not in the valid range")]
    assert told(causes, what=service) == [
        "services/chat spec.ports[0].nodePort: Invalid value: 7: not in the valid range"
    ]
    assert told([], "no") == ["deployments/chat-engine: no"]
    assert told([("", "no")], "all of it") == ["deployments/chat-engine: all of it"]


def test_a_number_without_a_container_stays_a_number() -> None:
    assert told([("spec.template.spec.initContainers[3].name", "Required value")]) == [
        "spec.podTemplate.spec.initContainers[3].name: Required value"
    ]
