"""A run that goes on where another one stood, and a confirmation on live traffic that loses a pair or finds few requests."""

from __future__ import annotations

import dataclasses

from support.engine_server import EngineServer
from support.study_runs import OFFLINE, Simulated, cliff, tune
from trimtab_engine.core.live import LiveConfig
from trimtab_tuner.run import MAX_LOST_PAIRS, Known


def at(engine: EngineServer, tokens: int) -> LiveConfig:
    """The incumbent with another budget."""
    found: list[LiveConfig] = []

    def look(evaluator: Simulated) -> None:
        found.append(dataclasses.replace(evaluator._incumbent, max_num_batched_tokens=tokens))

    tune(engine.admin_url, lambda _: 0.0, prepare=look)
    return found[0]


def first_is_good(config: LiveConfig) -> float:
    return 0.9 if config.max_num_batched_tokens == 2048 else 0.02


def test_what_an_earlier_worker_found_best_is_confirmed_without_being_searched_again(
    engine: EngineServer,
) -> None:
    best = at(engine, 256)
    earlier = (Known(best, 0.0, complete=True), Known(at(engine, 1024), 1.5, complete=True))
    result, evaluator = tune(engine.admin_url, cliff, earlier=earlier, max_trials=4)
    assert result.outcome == "Recommended"
    assert result.after == best
    assert [trial.role for trial in result.trials] == ["incumbent", "confirm"], (
        "two of two were tried already"
    )
    assert evaluator.asked == [None, best]


def test_what_an_earlier_worker_tried_counts_and_is_not_tried_again(engine: EngineServer) -> None:
    tried, failed = at(engine, 256), at(engine, 512)
    earlier = (Known(tried, 2.0, complete=True), Known(failed, None, complete=False))
    few = {"max_num_batched_tokens": (256, 512)}
    result, _ = tune(engine.admin_url, lambda _: 0.5, earlier=earlier, bounds=few, max_trials=5)
    assert sum(trial.role == "explore" for trial in result.trials) == 1
    _, evaluator = tune(engine.admin_url, lambda _: 0.5, earlier=earlier, bounds=few, max_trials=40)
    assert tried not in evaluator.asked
    assert failed in evaluator.asked, "of that one nothing is known"


def test_what_an_earlier_worker_tried_beside_other_values_says_nothing_now(engine: EngineServer) -> None:
    """Somebody changed what this run may not turn; its winner must not change that back."""
    other = dataclasses.replace(at(engine, 256), max_num_seqs=3)
    _, evaluator = tune(engine.admin_url, cliff, earlier=(Known(other, 0.0, complete=True),))
    assert evaluator.asked
    assert all(config is None or config.max_num_seqs != 3 for config in evaluator.asked)


def test_a_watcher_hears_of_each_measurement_before_it_begins(engine: EngineServer) -> None:
    heard: list[LiveConfig | None] = []
    _, evaluator = tune(engine.admin_url, cliff, begins=lambda role, config: heard.append(config))
    assert heard == evaluator.asked


def test_a_pair_of_live_slices_that_says_nothing_is_left_out(engine: EngineServer) -> None:
    seen = 0

    def blind_once(evaluator: Simulated) -> None:
        def blind(config: LiveConfig) -> bool:
            nonlocal seen
            seen += 1
            return seen == 3  # the first was explored, so this is in the confirmation

        evaluator.blind = blind

    result, _ = tune(
        engine.admin_url, first_is_good, prepare=blind_once, same_requests=False, pairs=8, max_trials=3
    )
    assert result.outcome == "Recommended", result.reason
    assert result.comparison is not None
    judged = [t for t in result.trials if t.role == "confirm" and t.measurement.status == "measured"]
    lost = [t for t in result.trials if t.role == "confirm" and t.measurement.status == "unknown"]
    assert len(lost) == 1
    assert result.comparison.blocks * 2 <= len(judged) <= result.comparison.blocks * 2 + 1


def test_a_confirmation_that_loses_too_many_pairs_is_unknown(engine: EngineServer) -> None:
    seen = 0

    def blind_after_exploring(evaluator: Simulated) -> None:
        def blind(config: LiveConfig) -> bool:
            nonlocal seen
            seen += 1
            return seen > 1

        evaluator.blind = blind

    result, _ = tune(
        engine.admin_url, first_is_good, prepare=blind_after_exploring, same_requests=False, pairs=8, max_trials=3
    )  # fmt: skip
    assert (result.outcome, result.reason) == ("Unknown", "no metrics")
    assert seen == 1 + MAX_LOST_PAIRS + 1


def test_pairs_go_on_under_a_time_limit_while_requests_are_rare(engine: EngineServer) -> None:
    # 60 requests a slice: eight pairs hold 480 of an arm.
    rare = dataclasses.replace(OFFLINE, min_requests=700)
    short, _ = tune(engine.admin_url, first_is_good, same_requests=False, pairs=8, max_trials=3, limits=rare)
    assert short.comparison is not None
    assert (short.outcome, short.comparison.blocks) == ("Kept", 8)
    longer, _ = tune(engine.admin_url, first_is_good, same_requests=False, pairs=8, max_trials=3, limits=rare, time_limit_s=3600.0)  # fmt: skip
    assert longer.comparison is not None
    assert longer.outcome == "Recommended"
    assert 700 / 60 <= longer.comparison.blocks < 14


def test_time_for_the_whole_confirmation_is_kept_back(engine: EngineServer) -> None:
    measuring: list[Simulated] = []
    result, _ = tune(
        engine.admin_url,
        lambda config: 0.95 if config.max_num_batched_tokens == 2048 else 0.2,
        prepare=measuring.append,
        same_requests=False,
        pairs=8,
        max_trials=9,
        time_limit_s=200.0,
        now=lambda: 10.0 * len(measuring[0].asked),
    )
    # 10 s each: the incumbent, three candidates, and 16 slices are 200 s.
    roles = [trial.role for trial in result.trials]
    assert roles[:5] == ["incumbent", "explore", "explore", "explore", "confirm"]
    assert result.outcome == "Recommended", result.reason


def test_time_that_a_candidate_had_to_wait_is_no_measure_of_the_next(engine: EngineServer) -> None:
    measuring: list[Simulated] = []

    def hours_s() -> float:
        return 3600.0 if len(measuring[0].asked) > 1 else 0.0  # the first candidate waited for its turn

    result, _ = tune(
        engine.admin_url,
        first_is_good,
        prepare=measuring.append,
        same_requests=False,
        pairs=8,
        max_trials=3,
        time_limit_s=7200.0,
        now=lambda: 10.0 * len(measuring[0].asked) + hours_s(),
        waited_s=hours_s,
    )
    assert result.outcome == "Recommended", result.reason
