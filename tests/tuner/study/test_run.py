"""The run as a whole. Decisions on simulated measurements with a known truth, mechanism on a real engine."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.engine_server import EngineServer, wait_until
from support.study_runs import OFFLINE, Simulated, cliff, tune
from trimtab_engine.core.live import LiveConfig
from trimtab_tuner import cli
from trimtab_tuner.audit import Audit
from trimtab_tuner.evaluate import Measurement
from trimtab_tuner.metrics.reading import Unknown
from trimtab_tuner.target import TargetRefused


def test_a_better_candidate_is_confirmed_on_fresh_requests_and_applied(engine: EngineServer) -> None:
    audit = Audit()
    result, evaluator = tune(engine.admin_url, cliff, apply=True, audit=audit)
    assert result.outcome == "Applied", result.reason
    assert result.after.max_num_batched_tokens <= 512
    assert result.trials[-1].role == "confirm"
    assert result.trials[-1].decision == "better"
    assert (
        evaluator.asked[-1] == evaluator.asked[-2] == result.after
    )  # measured twice: to find it, and to believe it
    incumbent = engine.live_config()["incumbent"]
    assert incumbent["generation"] == result.generation
    assert incumbent["config"] == result.after.to_json()
    compared = next(line for line in audit.lines if line["event"] == "compared")
    assert {"n_incumbent", "n_candidate", "low", "high", "evidence_better", "seed"} <= set(compared)


def test_without_apply_a_better_candidate_is_only_recommended(engine: EngineServer) -> None:
    before = engine.live_config()
    result, _ = tune(engine.admin_url, cliff)
    assert result.outcome == "Recommended"
    assert engine.live_config()["incumbent"] == before["incumbent"]


def test_equal_configs_are_accepted_in_at_most_one_run_of_twenty(engine: EngineServer) -> None:
    accepted = sum(
        tune(engine.admin_url, lambda _: 0.4, seed=seed, max_trials=5)[0].outcome == "Recommended"
        for seed in range(60)
    )
    assert accepted <= 3


def test_a_worse_space_keeps_the_incumbent(engine: EngineServer) -> None:
    result, _ = tune(
        engine.admin_url, lambda c: 0.1 if c.max_num_batched_tokens == 2048 else 0.9, apply=True, seed=3
    )
    assert result.outcome == "Kept"
    assert result.after == result.before
    assert result.to_json()["after"] == result.to_json()["before"]


def test_nothing_violated_means_nothing_to_tune(engine: EngineServer) -> None:
    result, evaluator = tune(engine.admin_url, lambda _: 0.0)
    assert (result.outcome, len(evaluator.asked)) == ("Kept", 1)


def test_an_incumbent_that_cannot_be_read_is_unknown_and_kept(engine: EngineServer) -> None:
    def blind_to_all(evaluator: Simulated) -> None:
        evaluator.same_requests = True
        evaluator.truth = lambda _: 0.5
        measure = evaluator.evaluate

        async def unknown(config: LiveConfig | None, **options: Any) -> Measurement:
            found = await measure(config, **options)
            return dataclasses.replace(found, status="unknown", reading=Unknown("stale"), reason="stale")

        evaluator.evaluate = unknown  # type: ignore[method-assign]

    result, evaluator = tune(engine.admin_url, cliff, prepare=blind_to_all, apply=True)
    assert (result.outcome, result.reason) == ("Unknown", "stale")
    assert evaluator.asked == [None]


def test_trials_without_metrics_and_stopped_ones_never_win(engine: EngineServer) -> None:
    def bad(evaluator: Simulated) -> None:
        evaluator.blind = lambda c: c.max_num_batched_tokens <= 512
        evaluator.stop = lambda c: c.max_num_batched_tokens > 512

    result, _ = tune(engine.admin_url, cliff, prepare=bad, apply=True, max_trials=8)
    assert result.outcome == "Kept"
    assert {t.decision for t in result.trials} <= {"incumbent", "unknown", "stopped"}


def refuse(evaluator: Simulated) -> None:
    """Whatever it is asked to try is refused, as by an owner whose edit is invalid."""
    measure = evaluator.evaluate

    async def refused(config: LiveConfig | None, **options: Any) -> Measurement:
        if config is not None:
            raise TargetRefused("spec.slo.itl: not allowed")
        return await measure(config, **options)

    evaluator.evaluate = refused  # type: ignore[method-assign]


def blind(evaluator: Simulated) -> None:
    """Metrics of candidates never come."""
    evaluator.blind = lambda _: True


@pytest.mark.parametrize(("prepare", "why"), [(refuse, "spec.slo.itl: not allowed"), (blind, "")])
def test_without_a_single_measured_candidate_nothing_is_known(
    engine: EngineServer, prepare: Callable[[Simulated], None], why: str
) -> None:
    result, _ = tune(engine.admin_url, cliff, prepare=prepare, apply=True, max_trials=4)
    assert result.outcome == "Unknown"
    assert result.reason.startswith("no candidate could be measured; of the last one: ")
    assert why in result.reason
    assert result.after == result.before


def test_a_pause_before_and_a_pause_in_the_middle_try_nothing_more(engine: EngineServer) -> None:
    result, evaluator = tune(engine.admin_url, cliff, pause=lambda asked: "paused by a person")
    assert (result.outcome, evaluator.asked) == ("Paused", [])
    result, evaluator = tune(
        engine.admin_url, cliff, pause=lambda asked: "paused by a person" if asked else None
    )
    assert (result.outcome, evaluator.asked) == ("Paused", [None])


def test_no_exploring_when_the_error_budget_is_spent(engine: EngineServer) -> None:
    live = dataclasses.replace(OFFLINE, error_budget_left=0.2)
    result, evaluator = tune(engine.admin_url, cliff, limits=live)
    assert (result.outcome, evaluator.asked) == ("Paused", [None])
    assert "error budget" in result.reason


def test_after_a_rollback_the_incumbent_runs_for_three_windows(engine: EngineServer) -> None:
    live = dataclasses.replace(OFFLINE, cooldown_windows=3)
    stopped: list[LiveConfig] = []

    def stop_the_first(evaluator: Simulated) -> None:
        def stop(config: LiveConfig) -> bool:
            stopped.append(config)
            return len(stopped) == 1

        evaluator.stop = stop

    _, evaluator = tune(engine.admin_url, lambda _: 0.4, limits=live, prepare=stop_the_first, max_trials=4)
    first = evaluator.asked.index(stopped[0])
    assert evaluator.asked[first + 1 : first + 4] == [None, None, None]
    assert evaluator.asked[first + 4] is not None


def test_live_traffic_is_confirmed_in_randomly_ordered_pairs(engine: EngineServer) -> None:
    def first_is_good(config: LiveConfig) -> float:
        return 0.9 if config.max_num_batched_tokens == 2048 else 0.02

    result, _ = tune(engine.admin_url, first_is_good, same_requests=False, pairs=8, apply=True, seed=1)
    assert result.outcome == "Applied", result.reason
    confirm = [t.measurement.config == result.before for t in result.trials if t.role == "confirm"]
    pairs = list(zip(confirm[::2], confirm[1::2], strict=True))
    assert all(a != b for a, b in pairs)  # each pair holds both
    assert len(set(pairs)) == 2  # in both orders
    assert 5 <= len(pairs) <= 8


def test_live_tuning_is_frozen_while_overloaded_and_a_replay_is_not(engine: EngineServer) -> None:
    def overloaded(evaluator: Simulated) -> None:
        evaluator.reading_changes = {
            "violated_ttft": 40,
            "queue_mean_s": 4.0,
            "prefill_mean_s": 1.0,
            "share_over_half_budget": 0.9,
            "steps": {"decode": (200.0, 8.0), "mixed": (300.0, 51.0)},
        }

    live, asked = tune(engine.admin_url, lambda _: 0.9, prepare=overloaded, same_requests=False)
    assert live.diagnosis is not None
    assert (live.outcome, live.diagnosis.state) == ("Kept", "overloaded")
    assert asked.asked == [None]
    _, asked = tune(engine.admin_url, lambda _: 0.9, prepare=overloaded)
    assert len(asked.asked) > 1


def test_a_time_limit_leaves_out_what_would_not_fit(engine: EngineServer) -> None:
    result, evaluator = tune(engine.admin_url, cliff, time_limit_s=1e-9)
    assert (result.outcome, evaluator.asked) == ("Kept", [None])


def test_the_same_seed_makes_the_same_run(engine: EngineServer) -> None:
    def tried(seed: int) -> list[LiveConfig | None]:
        return tune(engine.admin_url, lambda _: 0.4, seed=seed)[1].asked

    assert tried(5) == tried(5)


def command(engine: EngineServer, trace: Path, out: Path, *flags: str) -> list[str]:
    return [
        *(sys.executable, "-P", "-m", "trimtab_tuner.cli", "run", "--control", engine.admin_url),
        *("--url", engine.url, "--trace", str(trace), "--parameters", "max_num_seqs", "--interval", "250ms"),
        *("--min-requests", "30", "--max-trials", "3", "--washout", "10s", "--out", str(out), *flags),
    ]


def test_the_command_tunes_a_real_engine_without_a_restart(
    engine_of_now: EngineServer, bursts: Path, tmp_path: Path
) -> None:
    engine = engine_of_now
    before = engine.live_config()
    flags = ("--bounds", "max_num_seqs=1:16", "--seed", "2", "--apply", "--json")
    done = subprocess.run(
        command(engine, bursts, tmp_path, *flags), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert json.loads(done.stdout) == result
    assert result["verdict"]["outcome"] == "Applied", done.stderr
    assert [t["role"] for t in result["trials"]] == ["incumbent", "explore", "confirm"]
    assert all(t["n"] == 72 for t in result["trials"])
    assert result["before"]["violations"]["ttft"] > result["after"]["violations"]["ttft"]
    assert result["diagnosis"]["state"] == "scheduling-bound", result["diagnosis"]
    assert result["meta"]["trace_hash"]
    after = engine.live_config()
    assert after["incumbent"]["config"] == result["incumbent"]["after"]
    assert after["incumbent"]["source"] == "Recommendation"
    assert after["process_start"] == before["process_start"]
    events = [json.loads(line)["event"] for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert events[:2] == ["workload", "begin"]
    assert events[-1] == "end"
    assert "compared" in events
    assert "trial 2" in done.stderr
    samples = json.loads(gzip.decompress((tmp_path / "samples-00.json.gz").read_bytes()))
    ends = [
        sum(
            value
            for labels, value in snapshot["targets"][0]["series"]["trimtab_slo_requests_total"]
            if labels["slo"] == "ttft" and labels["generation"] == str(samples["generation"])
        )
        for snapshot in (samples["snapshots"][0], samples["snapshots"][-1])
    ]
    assert ends[1] - ends[0] == 72  # the stored samples say again what the result says


def candidate(engine: EngineServer) -> bool:
    return engine.live_config()["candidate"] is not None


def test_a_killed_tuner_leaves_no_candidate_behind(
    engine: EngineServer, straggler: Path, tmp_path: Path
) -> None:
    flags = ("--lease", "3s", "--min-requests", "20")
    with subprocess.Popen(command(engine, straggler, tmp_path, *flags), stderr=subprocess.DEVNULL) as tuner:
        wait_until(lambda: candidate(engine), 90.0)
        tuner.send_signal(signal.SIGKILL)
    wait_until(lambda: not candidate(engine), 15.0)  # 3 s, and the test machine's own delays
    found = engine.live_config()
    assert found["in_force"] == found["incumbent"]


def test_ctrl_c_reverts_at_once(engine: EngineServer, straggler: Path, tmp_path: Path) -> None:
    flags = ("--lease", "120s", "--min-requests", "20")
    with subprocess.Popen(
        command(engine, straggler, tmp_path, *flags), stderr=subprocess.PIPE, text=True, env=os.environ
    ) as tuner:
        wait_until(lambda: candidate(engine), 90.0)
        tuner.send_signal(signal.SIGINT)
        _, said = tuner.communicate(timeout=30)
    assert tuner.returncode == 130, said
    assert not candidate(engine)  # long before its lease would have ended
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--bounds", "max_num_seqs=1:4096"), "within 0:256"),
        (("--max-trials", "2"), "at least 3"),
        (("--lease", "600s"), "3s to 120s"),
        (("--observe", "60s"), "exactly one of the two"),
        (("--storage", "/nowhere/at/all.log"), "--storage"),
        (("--token-file", "/nowhere"), "--token-file"),
    ],
)
def test_wrong_flags_are_one_clear_line(
    engine: EngineServer,
    bursts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    said: str,
) -> None:
    arguments = command(engine, bursts, tmp_path, *flags)
    assert cli.main(arguments[arguments.index("run") :]) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.count("error:") == 1
