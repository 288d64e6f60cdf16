"""Trials that a quiet time or a person's pause cuts short: tried again, not counted, and bounded by the time limit all the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from support.engine_server import EngineServer
from support.study_runs import Simulated, cliff, tune
from trimtab_engine.core.live import LiveConfig
from trimtab_tuner.evaluate import Measurement
from trimtab_tuner.metrics.reading import Unknown
from trimtab_tuner.run import MAX_LOST_PAIRS, RunResult

WHY = "spec.tuning.limits.notDuring[0] is in force"
LONG_S = 1e9


def cutting(which: Callable[[int], bool], clock: list[float] | None = None) -> Callable[[Simulated], None]:
    """Measurements of candidates that are cut short, by their number from 0; each takes 100 s of `clock`."""
    count = itertools.count()

    def prepare(evaluator: Simulated) -> None:
        measure = evaluator.evaluate

        async def evaluate(config: LiveConfig | None, **options: Any) -> Measurement:
            if clock is not None:
                clock[0] += 100.0
            if config is None or not which(next(count)):
                return await measure(config, **options)
            evaluator.asked.append(config)
            return Measurement("unknown", config, 0, 0.0, 1.0, Unknown(WHY), (), WHY, halted=True)

        evaluator.evaluate = evaluate  # type: ignore[method-assign]

    return prepare


def first_is_good(config: LiveConfig) -> float:
    """Whatever is not the incumbent hardly violates."""
    return 0.9 if config.max_num_batched_tokens == 2048 else 0.02


def candidates(result: RunResult) -> list[LiveConfig]:
    return [trial.config for trial in result.trials if trial.role == "explore"]


def test_what_is_cut_short_is_tried_again_and_does_not_count(engine: EngineServer) -> None:
    plain, _ = tune(engine.admin_url, lambda _: 0.4, time_limit_s=LONG_S)
    cut, _ = tune(
        engine.admin_url, lambda _: 0.4, time_limit_s=LONG_S, prepare=cutting(lambda n: n in (0, 1, 3))
    )
    want = candidates(plain)
    assert len(want) == 4, "as many as may be tried"
    assert candidates(cut) == [want[0], want[0], want[0], want[1], want[1], *want[2:]]
    assert (cut.outcome, cut.after) == (plain.outcome, plain.after)


def test_a_run_that_is_cut_again_and_again_ends_by_its_time_limit(engine: EngineServer) -> None:
    clock = [0.0]
    result, evaluator = tune(
        engine.admin_url, cliff, time_limit_s=2000.0, prepare=cutting(lambda _: True, clock), now=lambda: clock[0]
    )  # fmt: skip
    assert clock[0] <= 2000.0
    assert 10 <= len(evaluator.asked) <= 20, "many more than maxTrials, and no more than there is time for"
    assert len(set(candidates(result))) == 1
    assert (result.outcome, result.after) == ("Unknown", result.before)
    assert result.reason == f"no candidate could be measured; of the last one: {WHY}"


def test_without_a_time_limit_it_counts_since_nothing_else_would_end_the_run(engine: EngineServer) -> None:
    result, _ = tune(engine.admin_url, cliff, prepare=cutting(lambda _: True))
    assert len(candidates(result)) == 4
    assert result.outcome == "Unknown"


def test_pairs_of_a_confirmation_that_are_cut_short_are_measured_again(engine: EngineServer) -> None:
    cuts = range(3, 3 + 2 * MAX_LOST_PAIRS)
    result, _ = tune(
        engine.admin_url, first_is_good, same_requests=False, pairs=8, max_trials=3, seed=1,
        time_limit_s=LONG_S, prepare=cutting(lambda n: n in cuts),
    )  # fmt: skip
    assert sum(trial.reason == WHY for trial in result.trials) == len(cuts)
    assert result.outcome == "Recommended", result.reason


def test_a_confirmation_that_is_always_cut_short_ends_by_the_time_limit(engine: EngineServer) -> None:
    clock = [0.0]
    result, _ = tune(
        engine.admin_url, first_is_good, time_limit_s=3000.0, max_trials=3, now=lambda: clock[0],
        prepare=cutting(lambda n: n > 0, clock),
    )  # fmt: skip
    assert (result.outcome, result.reason) == ("Unknown", "no time was left to confirm")
    assert clock[0] <= 3000.0
