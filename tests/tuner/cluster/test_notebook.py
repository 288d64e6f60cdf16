"""What a worker writes: within the resource's limits, and so that the next worker can go on."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from support.study import make_config, make_reading
from support.study_runs import Silent
from support.windows import histogram_window
from trimtab_operator import crds, names
from trimtab_tuner.cluster import notebook, objects, results, worker
from trimtab_tuner.cluster.kube import Kube
from trimtab_tuner.cluster.notebook import Notebook, TrialRow, by_field
from trimtab_tuner.cluster.work_view import WorkView
from trimtab_tuner.decide import compare
from trimtab_tuner.diagnosis import diagnose
from trimtab_tuner.evaluate import Measurement
from trimtab_tuner.metrics.reading import Block
from trimtab_tuner.run import RunResult
from trimtab_tuner.trial import Decision, Role, Trial

Json = dict[str, Any]
CONFIG = make_config(max_num_batched_tokens=256)


def status_schema() -> Json:
    found: Json = crds.definition(names.RUN_KIND)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    status: Json = found["properties"]["status"]
    return status


def resumed(*trials: Json) -> Notebook:
    run = objects.run_of(
        {"metadata": {"name": "try", "uid": "r"}, "spec": {"service": "chat"}, "status": {"trials": list(trials)}}
    )  # fmt: skip
    kube: Any = Kube  # nothing is asked here
    return Notebook.resume(kube, "team", run)


def trial(role: Role, decision: Decision, number: int = 0, **changes: Any) -> Trial:
    reading = make_reading(n=200, violated_ttft=20, generation_tokens=1200.0)
    blocks = tuple(Block(2, 20) for _ in range(10))
    snapshots = histogram_window([0.01] * 95 + [0.2] * 5).snapshots
    measured = Measurement("measured", CONFIG, 3, 0.0, 60.0, reading, blocks, "", None, snapshots)
    return Trial(number, role, dataclasses.replace(measured, **changes), None, decision)


def test_a_worker_goes_on_where_the_one_before_it_stood() -> None:
    measured = {"number": 0, "state": "Complete", "config": by_field(CONFIG), "requests": 50, "violated": 5}
    cut_off = {"number": 1, "state": "Running", "config": {"maxNumBatchedTokens": 64}}
    confirming = {**measured, "number": 2, "state": "Running"}
    found = resumed(cut_off, measured, confirming)
    assert [(row.number, row.state, row.message) for row in found.trials] == [
        (0, "Complete", ""),
        (1, "Failed", notebook.REPLACED),
        (2, "Complete", notebook.REPLACED),
    ]
    assert found.next_number() == 3
    # Numbers that no worker of this run gives, and after which the next would be refused.
    others = [{**measured, "number": number} for number in (-1, 20, 2**31 - 1)]
    assert resumed(measured, *others).next_number() == 1
    incumbent = make_config()
    known = [worker.known(row, incumbent) for row in found.trials]
    assert [(k.config, k.objective, k.complete) for k in known] == [
        (CONFIG, 0.1, True),
        (incumbent, None, False),
        (CONFIG, 0.1, True),
    ]


@pytest.mark.parametrize(
    "row",
    [
        {"number": "0", "state": "Complete", "config": {}},
        {"number": 0, "state": "Complete"},
        {"number": 0, "state": "Complete", "config": {"maxNumSeqs": 4}, "requests": "many", "violated": 1},
        {"number": 0, "state": "Complete", "config": {"maxNumSeqs": 4}, "requests": 50, "violated": -1},
        {"number": 0, "state": "Complete", "config": {"maxNumSeqs": 4}, "requests": 50, "violated": 51},
        {"number": 0, "state": "Pruned", "config": {"maxNumSeqs": 4}, "requests": 50, "violated": 1},
    ],
)
def test_what_makes_no_sense_or_was_cut_short_counts_and_says_nothing(row: Json) -> None:
    known = [worker.known(found, make_config()) for found in resumed(row).trials]
    assert not any(k.complete for k in known)


def test_a_trial_that_a_halt_cut_short_leaves_its_number_to_the_next_try() -> None:
    found = resumed({"number": 0, "state": "Complete", "config": {}, "requests": 50, "violated": 1})
    target: Any = SimpleNamespace(trial=None)
    view = WorkView(found, target, Silent())
    cut: Json = {"status": "unknown", "halted": True}
    for _ in range(2):
        view.begins("explore", CONFIG)
        assert target.trial == 1
        assert [(row.number, row.state) for row in found.trials] == [(0, "Complete"), (1, "Running")]
        view.changed.clear()
        view.end(trial("explore", "unknown", **cut))
        assert view.changed.is_set()
        assert [row.number for row in found.trials] == [0]
    view.begins("explore", CONFIG)
    view.end(trial("explore", "improves"))
    view.begins("confirm", CONFIG)
    view.end(trial("confirm", "unknown", **cut))
    assert [(row.number, row.state) for row in found.trials] == [(0, "Complete"), (1, "Complete")]


def test_everything_that_is_written_fits_into_the_resource() -> None:
    long = "wörter " * 10_000
    row = TrialRow(199, by_field(CONFIG), "Pruned", 2**40, 2**40, long)
    blocks = [Block(2, 20) for _ in range(10)]
    comparison = compare(blocks, [Block(0, 20)] * 10, min_requests=40)
    reading = make_reading(n=200, violated_ttft=20)
    found = RunResult(
        "Recommended", long, make_config(), CONFIG, (), diagnose(reading, CONFIG), None, comparison, None
    )
    arms = results.Arms()
    arms.add(trial("incumbent", "incumbent"))
    arms.add(trial("confirm", "measured"))
    result = results.result(found, "Applied", arms)
    status = {
        "trials": [row.to_json()],
        "result": result,
        "candidate": {"trial": 1, "config": by_field(CONFIG), "until": objects.rfc3339(0)},
    }
    jsonschema.validate(status, status_schema())
    assert row.to_json()["message"].endswith("…")
    assert row.to_json()["requests"] == 2**31 - 1
    assert result["config"]["maxNumBatchedTokens"] == 256


def test_numbers_come_with_n_and_intervals_and_are_those_of_the_confirmation() -> None:
    arms = results.Arms()
    arms.add(trial("incumbent", "incumbent"))
    arms.add(trial("explore", "improves"))
    assert arms.after() == {}, "exploring accepts nothing"
    assert arms.before()["requests"] == 200
    for _ in range(2):
        arms.add(trial("confirm", "incumbent"))
        arms.add(trial("confirm", "measured"))
    arms.add(trial("confirm", "unknown", status="unknown"))
    before, after = arms.before(), arms.after()
    for numbers in (before, after):
        assert (numbers["requests"], numbers["violated"], numbers["windows"]) == (400, 40, 2)
        assert (
            numbers["violatedFractionLow"] <= numbers["violatedFraction"] <= numbers["violatedFractionHigh"]
        )
        assert numbers["p99ItlSecondsLow"] <= numbers["p99ItlSeconds"] <= numbers["p99ItlSecondsHigh"]
        assert 0.1 < numbers["p99ItlSeconds"] <= 0.25
        assert numbers["p50ItlSeconds"] <= 0.025
        assert numbers["tokensPerSecond"] == 20.0


def test_what_was_kept_names_no_winner() -> None:
    kept = RunResult("Kept", "no gain", make_config(), make_config(), (), None, None, None, None)
    assert results.result(kept, results.VERDICTS[kept.outcome], results.Arms()) == {
        "verdict": "KeptIncumbent",
        "message": "no gain",
        "before": {},
    }
