"""The ordered tests on readings of known cause, and their dead bands."""

from typing import Any

import pytest

from support.study import make_config, make_reading
from trimtab_tuner.diagnosis import State, diagnose, settle
from trimtab_tuner.metrics.reading import Reading

CONFIG = make_config(max_num_seqs=64)
# A minute of an engine that is busy but not idle: 900 decode-only steps of 30 ms, a few with prompts.
BASE: dict[str, Any] = {
    "steps": {"decode": (900.0, 27.0), "mixed": (100.0, 8.0)},
    "share_over_half_budget": 0.1,
    "schedule_s": 0.2,
    "queue_mean_s": 0.05,
    "prefill_mean_s": 0.4,
    "decode_mean_s": 3.0,
    "itl_p50_s": 0.03,
    "itl_p99_s": 0.04,
    "itl_mean_s": 0.03,
    "kv_p95": 0.3,
    "running_mean": 5.0,
    "waiting_capacity_mean": 0.0,
    "waiting_capacity_share": 0.0,
    "waiting_deferred_mean": 0.0,
}


def reading(**changes: Any) -> Reading:
    return make_reading(**{**BASE, **changes})


PREFILL_STALLS = {
    "violated_itl": 30,
    "steps": {"decode": (300.0, 9.0), "mixed": (40.0, 45.0)},
    "share_over_half_budget": 0.6,
    "itl_p99_s": 1.5,
}


@pytest.mark.parametrize(
    ("state", "changes"),
    [
        ("idle", {"steps": {"decode": (300.0, 9.0), "mixed": (10.0, 1.0)}}),
        ("memory-bound", {"violated_ttft": 9, "kv_p95": 0.98, "preemptions": 4.0}),
        ("memory-bound", {"violated_ttft": 9, "kv_p95": 0.98, "waiting_capacity_mean": 2.0}),
        (
            "scheduling-bound",
            {"violated_ttft": 9, "waiting_capacity_share": 0.7, "waiting_capacity_mean": 3.0},
        ),
        ("scheduling-bound", {"violated_ttft": 9, "queue_mean_s": 1.0}),
        ("scheduling-bound", {"violated_itl": 9, "schedule_s": 7.0}),
        ("scheduling-bound", {"violated_ttft": 9, "running_mean": 63.0}),
        (
            "scheduling-bound",
            {"violated_ttft": 9, "waiting_capacity_mean": 0.5, "waiting_deferred_mean": 0.6},
        ),
        (
            "overloaded",
            {
                "violated_ttft": 40,
                "violated_itl": 40,
                "queue_mean_s": 4.0,
                "share_over_half_budget": 0.9,
                "steps": {"decode": (200.0, 8.0), "mixed": (300.0, 51.0)},
            },
        ),
        ("prefill-bound", PREFILL_STALLS),
        (
            "prefill-bound",
            {
                **PREFILL_STALLS,
                "violated_itl": 0,
                "violated_ttft": 20,
                "prefill_mean_s": 2.0,
                "itl_p99_s": 0.04,
            },
        ),
        (
            "decode-bound",
            {
                "violated_itl": 20,
                "steps": {"decode": (550.0, 52.0), "mixed": (20.0, 2.5)},
                "itl_p50_s": 0.094,
                "itl_p99_s": 0.12,
                "itl_mean_s": 0.095,
            },
        ),
        ("mixed", {"violated_itl": 5, "itl_p99_s": 0.07}),
    ],
)
def test_each_cause_gets_its_name(state: str, changes: dict[str, Any]) -> None:
    found = diagnose(reading(**changes), CONFIG)
    assert found.state == state, found.because
    assert found.because
    assert found.n == 100


def test_the_numbers_that_led_there_are_kept() -> None:
    found = diagnose(reading(**PREFILL_STALLS), CONFIG)
    # 40 mixed steps would have taken 1.2 s without prompts: (45 − 1.2) / 54.
    assert found.numbers["phi"] == pytest.approx(43.8 / 54.0)
    assert found.numbers["spread"] == pytest.approx(50.0)
    assert found.numbers["busy"] == pytest.approx(0.9)
    assert "81%" in found.because
    assert found.to_json()["advice"]


def test_interference_between_the_bands_is_not_called_prefill() -> None:
    assert diagnose(reading(**{**PREFILL_STALLS, "itl_p99_s": 0.08}), CONFIG).state == "mixed"


def test_missing_numbers_never_match_a_test() -> None:
    bare = make_reading(violated_itl=10)
    assert diagnose(bare, CONFIG).state == "mixed"
    assert diagnose(make_reading(), CONFIG).state == "unknown"


def test_a_state_must_hold_three_of_five_windows() -> None:
    steady: list[State] = ["mixed", "prefill-bound", "prefill-bound", "idle", "prefill-bound"]
    assert settle(steady) == "prefill-bound"
    assert settle(steady[:3]) is None
    idle: list[State] = ["idle"]
    mixed: list[State] = ["mixed"]
    assert settle(idle * 9 + mixed * 5) == "mixed"
