"""Reading and judging resources: defaults, strictness, and errors with path, value and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from support.services import BUDGET_PARAMETER, resource, run_resource, service
from trimtab_operator import documents, schema, support
from trimtab_operator.errors import InvalidResource, MalformedYaml, Unsupported

TEXT = """\
apiVersion: serving.trimtab.dev/v1alpha1
kind: InferenceService
metadata: {name: chat}
spec:
  model: {uri: "file:///models/tiny"}
"""
EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.yaml"))


def findings(built: dict[str, Any]) -> dict[str, str]:
    """Path → what is allowed, of a resource that must be refused."""
    with pytest.raises(InvalidResource) as caught:
        schema.parse_service(built)
    return {finding.path: finding.allowed for finding in caught.value.errors}


def test_defaults_are_filled_in_all_the_way_down() -> None:
    built = schema.load_service(TEXT)
    assert built.spec.engine.ceilings.max_num_batched_tokens == 8192
    assert built.spec.tuning.limits.canary_pods == 1
    assert built.raw["spec"]["slo"]["ttft"] == "1s"


def test_defaulting_leaves_the_given_resource_alone() -> None:
    given = resource()
    schema.validate(given)
    assert given == resource()


def test_defaulting_twice_changes_nothing() -> None:
    once = schema.validate(resource())
    assert schema.validate(once) == once


def test_an_explicit_null_means_absent_as_at_the_api_server() -> None:
    nulls: dict[str, Any] = {
        "engine.maxModelLen": None,
        "engine.maxNumSeqs": None,
        "slo": None,
        "replicas": None,
    }
    assert service(**nulls, **{"service.annotations": {"a": None}}).spec == service().spec


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_every_shipped_example_is_valid(path: Path) -> None:
    assert schema.load_service(path).name == path.stem


def test_the_example_of_a_run_is_valid_and_names_the_demo_example() -> None:
    [path] = (EXAMPLES[0].parent / "runs").glob("*.yaml")
    run = schema.parse_run(yaml.safe_load(path.read_text()))
    assert (run.name, run.spec.service) == (path.stem, "chat")
    assert run.spec.workload.slice_s == 120


def test_the_demo_example_can_be_served_on_this_machine_and_may_be_tuned() -> None:
    chat = schema.load_service(next(p for p in EXAMPLES if p.stem == "chat"))
    support.check(chat, "local")
    assert chat.spec.tuning.mode == "Apply"
    assert chat.spec.engine.max_num_batched_tokens == chat.spec.engine.ceilings.max_num_batched_tokens == 2048


TUNED = {"tuning.parameters": [BUDGET_PARAMETER]}


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"engine.maxNumSeqs": 0}, "spec.engine.maxNumSeqs", "an integer from 1 to 1048576"),
        ({"engine.maxNumSeqs": "8"}, "spec.engine.maxNumSeqs", "an integer from 1 to 1048576"),
        ({"engine.maxNumSeqs": True}, "spec.engine.maxNumSeqs", "an integer"),
        ({"engine.maxNumSeqs": 1.5}, "spec.engine.maxNumSeqs", "an integer"),
        ({"model.uri": None}, "spec.model.uri", "required"),
        (
            {"engine.schedulingPolicy": "lifo"},
            "spec.engine.schedulingPolicy",
            "one of fcfs, priority, sla-aware",
        ),
        ({"engine.kvBlockSize": 17}, "spec.engine.kvBlockSize", "one of 8, 16, 32, 64, 128"),
        ({"engine.kvCacheMemory": "4 GB"}, "spec.engine.kvCacheMemory", "a quantity of bytes such as 512Mi"),
        (
            {"engine.gpuMemoryUtilization": 1},
            "spec.engine.gpuMemoryUtilization",
            "a number from 0.05 to 0.99",
        ),
        ({"slo.ttft": "800"}, "spec.slo.ttft", "a duration such as 800ms"),
        ({"slo.ttft": 1}, "spec.slo.ttft", "a duration such as 800ms"),
        ({"slo.ttft": "0ms"}, "spec.slo.ttft", "a duration from 1ms to 1h"),
        ({"slo.ttft": "61m"}, "spec.slo.ttft", "a duration from 1ms to 1h"),
        ({"slo.ttft": "1s\n"}, "spec.slo.ttft", "a duration such as 800ms"),
        ({"slo.objective": 100}, "spec.slo.objective", "a number from 50 to 99.999"),
        ({"tuning.mode": False}, "spec.tuning.mode", 'write "Off"'),
        ({"model.uri": "s3://bucket/x"}, "spec.model.uri", "hf://organisation/name"),
        ({"replicas": -1}, "spec.replicas", "an integer from 0 to 256"),
        ({"replica": 2}, "spec.replica", "unknown field; known are"),
        ({"engine.ceiling": {}}, "spec.engine.ceiling", "unknown field; known are"),
        ({"slo.classes": [{"name": "a"}, {"name": "a"}]}, "spec.slo.classes[1].name", "no other entry has"),
        ({"slo.classes": [{"ttft": "1s"}]}, "spec.slo.classes[0].name", "required"),
        ({"slo.classes": [{"name": "a", "itl": "2h"}]}, "spec.slo.classes[0].itl", "from 1ms to 1h"),
        ({"service.annotations": {"a": 1}}, "spec.service.annotations.a", "a text"),
        ({"engine.extraArgs": ["x"] * 33}, "spec.engine.extraArgs", "a list of 0 to 32 entries"),
        ({"podTemplate.spec.containers": [{}]}, "spec.podTemplate.spec.containers[0].name", "a name"),
        ({"podTemplate.spec.containers": "x"}, "spec.podTemplate.spec.containers", "a list"),
        (
            {"podTemplate.spec.containers": [{"name": "engine", "image": "x"}]},
            "spec.podTemplate.spec.containers[0].image",
            "use spec.engine.image",
        ),
        (
            {"tuning.limits.notDuring": [{"schedule": "0 8 * * 7", "duration": "1h"}]},
            "spec.tuning.limits.notDuring[0].schedule",
            "day of the week: 0 to 6",
        ),
        (
            {"tuning.limits.notDuring": [{"schedule": "@daily", "duration": "1h", "timeZone": "Berlin"}]},
            "spec.tuning.limits.notDuring[0].timeZone",
            "a zone such as Europe/Berlin",
        ),
        (
            {**TUNED, "tuning.nightly.schedule": "0 0 30 2 *"},
            "spec.tuning.nightly.schedule",
            "none has this one",
        ),
        (
            {**TUNED, "tuning.nightly": {"schedule": "@daily", "timeZone": "Local"}},
            "spec.tuning.nightly.timeZone",
            "a zone such as Europe/Berlin",
        ),
    ],
)
def test_wrong_value_is_answered_with_path_and_what_is_allowed(
    changes: dict[str, Any], path: str, words: str
) -> None:
    found = findings(resource(**changes))
    assert path in found
    assert words in found[path]


def test_all_findings_come_at_once() -> None:
    found = findings(resource(**{"engine.maxNumSeqs": 0, "slo.itl": "x", "nonsense": 1}))
    assert set(found) == {"spec.engine.maxNumSeqs", "spec.slo.itl", "spec.nonsense"}


def test_message_shows_path_value_and_range_on_one_line_each() -> None:
    with pytest.raises(InvalidResource) as caught:
        service(**{"engine.maxNumBatchedTokens": 9000})
    assert str(caught.value).splitlines()[1].strip() == (
        "spec.engine: maxNumBatchedTokens must not exceed ceilings.maxNumBatchedTokens; "
        "given {'maxNumBatchedTokens': 9000, 'ceilings.maxNumBatchedTokens': 8192}"
    )


@pytest.mark.parametrize(
    ("built", "path"),
    [
        ({**resource(), "apiVersion": "serving.kserve.io/v1beta1"}, "apiVersion"),
        ({**resource(), "kind": "Deployment"}, "kind"),
        ({**resource(), "kind": ["InferenceService"]}, "kind"),
        (run_resource(), "kind"),
        ({**resource(), "metadata": None}, "metadata"),
        ({**resource(), "metadata": {"name": "Chat"}}, "metadata.name"),
        ({**resource(), "metadata": {"name": "chat", "annotations": {"a": 1}}}, "metadata.annotations.a"),
        ({**resource(), "metadata": {"name": "chat", "generation": "x"}}, "metadata.generation"),
        ({k: v for k, v in resource().items() if k != "spec"}, "spec"),
        ({**resource(), "spec": []}, "spec"),
        ({**resource(), "extra": 1}, "extra"),
    ],
)
def test_what_is_no_inference_service_of_ours_is_refused(built: dict[str, Any], path: str) -> None:
    assert path in findings(built)


def test_an_update_is_judged_against_what_was_there() -> None:
    old = service()
    moved = resource()
    moved["spec"] = {"targetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"}}
    assert schema.parse_service(moved).spec.target_ref is not None
    with pytest.raises(InvalidResource, match="cannot change between model and targetRef"):
        schema.parse_service(moved, old)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        (TEXT + "  replicas: [1,\n", 7, "expected"),
        (TEXT + "  replicas: 1\n  replicas: 2\n", 7, "stands here twice"),
        (TEXT + "\treplicas: 1\n", 6, "cannot start any token"),
        (TEXT + " x: 1\n", 6, "expected"),
        ("a: &x\nb: *y\n", 2, "undefined alias"),
        ("? [a]\n: 1\n", 1, "a key must be a text"),
        ("a: !!python/object:os.system x\n", 1, "could not determine a constructor"),
    ],
)
def test_broken_yaml_is_answered_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(MalformedYaml) as caught:
        schema.load_service(text)
    assert caught.value.line == line
    assert words in str(caught.value)
    assert f"line {line}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds 0 resources"),
        (TEXT + "---\n" + TEXT, "holds 2 resources"),
        ("- a\n", "is not a resource"),
        ("1: 2\n", "must be a text"),
        ("a: .nan\n", "not a number that JSON knows"),
        ("a: 18446744073709551616\n", "64 bits"),
        ("a: 0x" + "f" * 5000 + "\n", "64 bits"),
        ("a: &a [*a]\n", "nested deeper"),
        ("a: " + "[" * 80 + "]" * 80, "nested deeper"),
        ("a: " + "[" * 5000 + "]" * 5000, "cannot be read"),
        ("a: !!set {x}\n", "type set is not allowed"),
    ],
)
def test_text_that_is_no_single_json_object_is_refused(text: str, words: str) -> None:
    with pytest.raises(MalformedYaml, match=words):
        schema.load_service(text)


def test_aliases_cannot_blow_a_small_text_up() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(MalformedYaml, match="more than"):
        documents.parse("\n".join(lines), "the document")


def test_dates_and_aliases_become_plain_values() -> None:
    read = documents.parse("a: 2026-01-02\nb: &x {c: 1}\nd: *x\n", "the document")
    assert read == {"a": "2026-01-02", "b": {"c": 1}, "d": {"c": 1}}
    assert read["b"] is not read["d"]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(MalformedYaml, match=r"none\.yaml.*No such file"):
        schema.load_service(tmp_path / "none.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"a: \xff\n")
    with pytest.raises(MalformedYaml, match="not UTF-8 at byte 3"):
        schema.load_service(binary)


def test_a_wrong_field_in_a_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "chat.yaml"
    path.write_text(yaml.safe_dump(resource(**{"engine.maxNumSeqs": 0})))
    with pytest.raises(InvalidResource, match=r"chat\.yaml is invalid"):
        schema.load_service(path)


@pytest.mark.parametrize(
    ("changes", "mode", "path"),
    [
        ({"engine.runtime": "vllm"}, "local", "spec.engine.runtime"),
        ({"engine.runtime": "vllm"}, "cluster", "spec.engine.runtime"),
        ({"model.uri": "pvc://claim/x"}, "local", "spec.model.uri"),
    ],
)
def test_what_cannot_be_served_yet_is_valid_and_said_clearly(
    changes: dict[str, Any], mode: support.Mode, path: str
) -> None:
    built = service(**changes)
    with pytest.raises(Unsupported) as caught:
        support.check(built, mode)
    assert [finding.path for finding in caught.value.errors] == [path]


def test_a_claim_is_served_in_a_cluster_and_a_hub_everywhere() -> None:
    support.check(service(**{"model.uri": "pvc://claim/x"}), "cluster")
    for mode in ("cluster", "local"):
        support.check(service(**{"model.uri": "hf://a/b"}), mode)


def test_a_target_of_ones_own_is_said_not_to_be_served_yet() -> None:
    built = resource()
    built["spec"] = {"targetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"}}
    with pytest.raises(Unsupported, match=r"spec\.targetRef"):
        support.check(schema.parse_service(built), "local")
