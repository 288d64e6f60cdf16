"""Who wins: the spec, or a recommendation that still rests on it."""

from __future__ import annotations

from typing import Any

import pytest

from support.services import BUDGET_PARAMETER, service
from trimtab_operator.api import Recommendation
from trimtab_operator.errors import InvalidResource
from trimtab_operator.plan.live import effective, live_document, next_generation, recommend, tuning_state

POLICY_PARAMETER = {"name": "schedulingPolicy", "choices": ["fcfs", "priority"]}
TUNED: dict[str, Any] = {"tuning": {"mode": "Apply", "parameters": [BUDGET_PARAMETER, POLICY_PARAMETER]}}
TUNING = "serving.trimtab.dev/tuning"


def found(**config: object) -> Recommendation:
    return recommend(service(**TUNED).spec, config or {"max_num_batched_tokens": 256}, run="chat-1")


def test_mode_apply_lays_the_recommendation_over_spec() -> None:
    chosen = effective(service(**TUNED).spec, found())
    assert (chosen.source, chosen.config["max_num_batched_tokens"]) == ("Recommendation", 256)
    assert chosen.config["max_num_seqs"] == 64
    assert "chat-1" in chosen.why


@pytest.mark.parametrize("mode", ["Off", "Recommend", "Canary"])
def test_other_modes_leave_spec_in_force(mode: str) -> None:
    spec = service(**{**TUNED, "tuning.mode": mode} | {"tuning": {**TUNED["tuning"], "mode": mode}}).spec
    assert effective(spec, found()).source == "Spec"


@pytest.mark.parametrize(
    ("edit", "path"),
    [
        ({"engine.maxNumBatchedTokens": 1024}, "spec.engine.maxNumBatchedTokens"),
        ({"engine.schedulingPolicy": "priority"}, "spec.engine.schedulingPolicy"),
        ({"engine.ceilings.maxNumBatchedTokens": 4096}, "spec.engine.ceilings"),
        (
            {"tuning.parameters": [{**BUDGET_PARAMETER, "max": 512}, POLICY_PARAMETER]},
            "spec.tuning.parameters",
        ),
    ],
)
def test_a_persons_edit_of_a_value_or_bound_voids_it_and_is_named(edit: dict[str, Any], path: str) -> None:
    spec = service(**{"tuning": dict(TUNED["tuning"]), **edit}).spec
    chosen = effective(spec, found())
    assert chosen.source == "Spec"
    assert chosen.superseded == (path,)


def test_an_edit_of_something_else_leaves_it_standing() -> None:
    spec = service(**TUNED, **{"slo.itl": "70ms", "replicas": 3}).spec
    chosen = effective(spec, found())
    assert chosen.source == "Recommendation"
    assert chosen.config["slo"]["classes"][0]["itl_s"] == 0.07


def test_going_back_to_the_old_value_brings_it_back() -> None:
    assert effective(service(**TUNED).spec, found()).source == "Recommendation"


def test_reverted_returns_to_spec_and_paused_holds() -> None:
    spec = service(**TUNED).spec
    assert effective(spec, found(), {TUNING: "reverted"}).source == "Spec"
    assert effective(spec, found(), {TUNING: "paused"}).source == "Recommendation"


@pytest.mark.parametrize(
    ("value", "want"),
    [(None, "active"), ("active", "active"), ("paused", "paused"), ("reverted", "reverted"), ("x", "paused")],
)
def test_annotation_words(value: str | None, want: str) -> None:
    assert tuning_state({} if value is None else {TUNING: value}) == want


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"max_num_batched_tokens": 32}, "config.max_num_batched_tokens"),
        ({"max_num_batched_tokens": 4097}, "config.max_num_batched_tokens"),
        ({"max_num_batched_tokens": "256"}, "config.max_num_batched_tokens"),
        ({"scheduling_policy": "lifo"}, "config.scheduling_policy"),
        ({"max_num_seqs": 8}, "config.max_num_seqs"),
        ({"budget": 8}, "config.budget"),
    ],
)
def test_recommendation_out_of_bounds_is_refused_with_its_path(config: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidResource) as caught:
        recommend(service(**TUNED).spec, config)
    assert [finding.path for finding in caught.value.errors] == [path]


def test_recommendation_that_would_starve_decodes_is_refused_as_a_whole() -> None:
    spec = service(**{"engine.maxNumSeqs": 128, **TUNED}).spec
    with pytest.raises(InvalidResource, match="at least max_num_seqs"):
        recommend(spec, {"max_num_batched_tokens": 64})


def test_recommendation_takes_a_whole_config_and_keeps_what_differs() -> None:
    spec = service(**TUNED).spec
    whole = {**live_document(spec, 1)["config"], "max_num_batched_tokens": 300}
    assert recommend(spec, whole).values == {"maxNumBatchedTokens": 300}


def test_recommendation_survives_its_json_form() -> None:
    assert Recommendation.from_json(found().to_json()) == found()
    with pytest.raises(InvalidResource, match="recommendation"):
        Recommendation.from_json({"values": 3})


def test_generation_moves_only_when_the_document_does() -> None:
    plain = service(**TUNED)
    first = live_document(plain.spec, next_generation(None, plain, None))
    assert first["generation"] == 1
    assert next_generation(first, plain, None) == 1
    assert next_generation(first, service(**TUNED, **{"slo.itl": "1s"}), None) == 2
    assert next_generation(first, plain, found()) == 2
    same_values = Recommendation({}, found().based_on)
    assert next_generation(first, plain, same_values) == 2, "the source changed"
