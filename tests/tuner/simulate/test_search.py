"""Tuning runs on a simulated server: what they find, what they promise, and when they find nothing out."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import clocks
from support.simulations import server, step_time
from support.study_runs import Silent
from trimtab_engine.core.live import Ceilings, LiveConfig, Slo, SloClass
from trimtab_tuner import space
from trimtab_tuner import trace as traces
from trimtab_tuner.arrivals import Mode
from trimtab_tuner.audit import Audit
from trimtab_tuner.cli import main
from trimtab_tuner.evaluate import Measurement
from trimtab_tuner.metrics.reading import Reading
from trimtab_tuner.run import RunOptions, RunResult, TuningRun
from trimtab_tuner.simulate.cost import StepModel
from trimtab_tuner.simulate.evaluator import SimulatedEvaluator, Traffic
from trimtab_tuner.simulate.search import LIMITS, Simulator, Standing
from trimtab_tuner.study import Study
from trimtab_tuner.synthesise import Shape, synthesise
from trimtab_tuner.trace import Trace

SLO = Slo("default", (SloClass("default", ttft_s=0.5, itl_s=0.1),))
# Steps of 4,096 tokens take 0.4 s: they break every gap. Small ones make prompts late.
INCUMBENT = LiveConfig(max_num_batched_tokens=4096, max_num_seqs=64, slo=SLO)
CEILINGS = Ceilings()
MODEL = StepModel(step_time(0.01, tokens=1e-4, decode_context=1e-7), "a test")
SERVER = dataclasses.replace(server(num_blocks=4000), name="a test")


def busy(seed: int = 0, requests: int = 240) -> Trace:
    """Bursts at nine requests a second, one in ten with a prompt of 3,000 tokens: no config meets every target."""
    shape = Shape(requests, requests / 9.0, 2.0, 0.1, 3000, 100, 30, seed)
    return synthesise(shape)


def simulator(trace: Trace, **changes: Any) -> Simulator:
    model = changes.pop("model", MODEL)
    traffic = changes.pop("traffic", Traffic(trace))
    return Simulator(INCUMBENT, traffic, model, SERVER, **changes)


async def never() -> str | None:
    return None


def tune(by: Simulator, seed: int = 0, audit: Audit | None = None, **options: Any) -> RunResult:
    run = TuningRun(
        target=Standing(INCUMBENT, CEILINGS),
        evaluator=by.chooser,
        confirmer=by.confirmer,
        doubt=by.doubt,
        caveat=by.caveat,
        make_study=lambda knobs: Study(knobs, seed=seed),
        make_space=lambda config: space.build(config, CEILINGS, tile=64),
        limits=LIMITS,
        options=RunOptions(**{"max_trials": 12, "seed": seed, **options}),
        audit=audit or Audit(),
        view=Silent(),
        paused=never,
    )
    return asyncio.run(run.execute())


def violated(by: Simulator, config: LiveConfig, seed: int = 0) -> int:
    """On the requests that confirm."""
    assert isinstance(by.confirmer, SimulatedEvaluator)
    reading = by.confirmer.measure(config, seed + 1).reading
    assert isinstance(reading, Reading)
    return reading.violated


def test_what_a_run_chooses_is_near_the_best_of_the_whole_grid() -> None:
    removed = []
    for seed in range(3):
        by = simulator(busy(seed), seed=seed)
        result = tune(by, seed)
        assert result.outcome == "Recommended", result.reason
        assert len(result.trials) <= 13  # of 42 configs
        grid = [
            space.apply(INCUMBENT, dict(zip((k.name for k in knobs), values, strict=True)))
            for knobs in [space.build(INCUMBENT, CEILINGS, tile=64)]
            for values in itertools.product(*(knob.choices for knob in knobs))
        ]
        best = min(violated(by, config, seed) for config in grid)
        usual, chosen = (violated(by, config, seed) for config in (INCUMBENT, result.after))
        removed.append((usual - chosen) / (usual - best))  # 1 − regret
        assert best > 0  # else any config below the cliff would do
    assert min(removed) >= 0.75, removed
    assert sum(removed) / len(removed) >= 0.9, removed


def test_a_run_repeats_bit_for_bit_and_confirms_on_requests_that_it_did_not_choose_by() -> None:
    first, second = (tune(simulator(busy())) for _ in range(2))
    assert first.to_json() == second.to_json()
    explored = [t.measurement for t in first.trials if t.role != "confirm"]
    confirmed = [t.measurement for t in first.trials if t.role == "confirm"]
    assert [t.config for t in confirmed].count(INCUMBENT) == 1  # measured anew, on those requests
    assert len(confirmed) == 2
    assert max(m.started_s for m in explored) == 0.0
    assert {m.started_s for m in confirmed} == {busy().requests[120].arrival_s}
    assert {b.n for m in confirmed for b in m.blocks} != {0}
    judged = [sum(b.n for b in m.blocks) for m in explored + confirmed]
    assert set(judged) == {120}
    document = first.to_json()
    rows = (document["before"], document["after"])
    assert [row["role"] for row in rows if isinstance(row, dict)] == ["confirm", "confirm"]


def test_a_result_says_that_it_was_simulated_by_whose_step_times_and_with_what_error() -> None:
    known = dataclasses.replace(MODEL, num_steps=900, error_median=0.03, error_p95=0.09)
    result = tune(simulator(busy(), model=known))
    assert result.reason.endswith(
        "simulated, no engine ran it: chosen on 120 requests, confirmed on 120 later ones; step times of a test (median error 3.0%, "
        "p95 9.0%, over 900 steps); what is chance here is other traffic, not the simulator's error"
    )
    sheet = dataclasses.replace(MODEL, origin="the data sheet of x", fitted=False)
    assert "by which no device was measured" in tune(simulator(busy(), model=sheet)).reason


def test_too_few_requests_say_how_many_are_needed() -> None:
    result = tune(simulator(busy(requests=79)))
    assert result.outcome == "Unknown"
    assert "79 requests, at least 80 are needed" in result.reason
    assert tune(simulator(busy(requests=80))).outcome != "Unknown"


def test_traffic_that_meets_every_target_leaves_nothing_to_gain() -> None:
    calm = busy().scale_rate(0.01).scale_lengths(30)
    result = tune(simulator(calm))
    assert (result.outcome, len(result.trials)) == ("Kept", 1)
    assert result.diagnosis is not None
    assert result.diagnosis.state == "idle"


def test_a_gain_that_the_models_own_error_would_undo_is_none() -> None:
    audit = Audit()
    # One step in twenty takes 150 % longer: budgets that keep a gap in time by the model then break it as well.
    unsure = dataclasses.replace(MODEL.model, error_high=60.0, largest_tokens=4096)
    wrong = dataclasses.replace(MODEL, model=unsure)
    result = tune(simulator(busy(), model=wrong, audit=audit), audit=audit)
    assert result.outcome == "Kept"
    assert (
        "with steps as long as the step-time model's error allows (it has seen no step of more than 4096 tokens)"
        in result.reason
    )
    (line,) = [line for line in audit.lines if line["event"] == "slower steps"]
    assert line["config"] != INCUMBENT.to_json()
    right = dataclasses.replace(MODEL, model=dataclasses.replace(MODEL.model, error_high=0.02))
    assert tune(simulator(busy(), model=right)).outcome == "Recommended"


def test_a_candidate_that_a_guardrail_would_end_live_is_stopped() -> None:
    by = simulator(busy())
    starved = dataclasses.replace(INCUMBENT, max_num_seqs=1)
    assert isinstance(by.chooser, SimulatedEvaluator)
    found = by.chooser.measure(starved, 0)
    assert (found.status, found.reason.split(" is ")[0]) == ("stopped", "oldest waiting request")
    assert by.chooser.measure(INCUMBENT, 0).status == "measured"


def test_a_config_is_simulated_once_for_each_seed() -> None:
    by = simulator(busy())
    assert isinstance(by.chooser, SimulatedEvaluator)
    tune(by)
    known = by.chooser.num_simulated
    tune(by)
    assert by.chooser.num_simulated == known


def test_drawn_arrivals_are_drawn_anew_in_every_further_round_and_alike_for_both_arms() -> None:
    by = simulator(busy(), traffic=Traffic(busy(), mode=Mode("poisson")), seed=5)
    seen: list[Measurement] = []

    async def rounds() -> None:
        for _ in range(2):
            for arm in (None, dataclasses.replace(INCUMBENT, max_num_batched_tokens=512)):
                seen.append(await by.confirmer.evaluate(arm, baseline=None, on_progress=lambda _: None))

    asyncio.run(rounds())
    starts = [found.started_s for found in seen]
    assert starts[0] == starts[1] != starts[2] == starts[3]


def test_no_clock_is_read_while_a_config_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (simulator(busy()).chooser for _ in range(2))
    small = dataclasses.replace(INCUMBENT, max_num_batched_tokens=512)
    assert isinstance(first, SimulatedEvaluator)
    assert isinstance(second, SimulatedEvaluator)
    reference = first.measure(small, 0)
    with clocks.broken(monkeypatch):
        assert second.measure(small, 0) == reference


def test_a_measurement_that_is_given_up_ends_at_once() -> None:
    by, seen, go_on = simulator(busy()), list[float](), threading.Event()

    async def give_up() -> None:
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def progress(done: float) -> None:
            seen.append(done)
            loop.call_soon_threadsafe(begun.set)
            assert go_on.wait(60)

        work = asyncio.create_task(by.chooser.evaluate(None, baseline=None, on_progress=progress))
        await begun.wait()
        work.cancel()
        loop.call_soon(go_on.set)  # after the task has heard of it
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(give_up())
    assert len(seen) == 1


# ---- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A trace and a model."""
    trace, model = tmp_path / "trace.jsonl", tmp_path / "model.json"
    traces.save(busy(), trace)
    model.write_text(
        json.dumps({"model": MODEL.model.to_json(), "score": {"num_steps": 300, "error_median": 0.02}})
    )
    return str(trace), str(model)


def command(files: tuple[str, str], *flags: str) -> list[str]:
    trace, model = files
    base = [
        "simulate",
        "--search",
        "--trace",
        trace,
        "--cost",
        model,
        "--num-blocks",
        "4000",
        "--budget",
        "4096",
    ]
    return [*base, "--slo-ttft", "500ms", "--tile", "64", "--max-trials", "8", *flags]


def test_the_command_writes_what_a_live_run_does(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tuned"
    assert main(command(files, "--out", str(out), "--json")) == 0
    said = capsys.readouterr()
    result = json.loads((out / "result.json").read_text())
    assert json.loads(said.out) == result
    assert result["verdict"]["outcome"] == "Recommended"
    assert result["incumbent"]["after"]["max_num_batched_tokens"] < 4096
    assert result["before"]["n"] == result["after"]["n"] == 120
    assert result["meta"]["step_time"]["error_median"] == 0.02
    assert result["meta"]["evaluator"] == "simulator"
    assert result["verdict"]["throughput"]["limit"] == 0.03
    events = [json.loads(line)["event"] for line in (out / "audit.jsonl").read_text().splitlines()]
    assert (events[0], events[1], events[-1]) == ("workload", "begin", "end")
    assert "compared" in events
    page = tmp_path / "report.html"
    assert main(["report", str(out / "result.json"), "--out", str(page)]) == 0
    assert "simulated, no engine ran it" in page.read_text()


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        (["--parameters", "max_num_batched_tokens"], lambda c: c["scheduling_policy"] == "fcfs"),
        (
            ["--bounds", "max_num_batched_tokens=256:512"],
            lambda c: 256 <= c["max_num_batched_tokens"] <= 512 or c == INCUMBENT.to_json(),
        ),
        (["--step-share", "0.3"], lambda c: c["max_num_batched_tokens"] in (*range(64, 320), 4096)),
    ],
)
def test_flags_of_the_search_bind(
    files: tuple[str, str],
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    kept: Callable[[dict[str, Any]], bool],
) -> None:
    main(command(files, "--json", *flags))
    trials = json.loads(capsys.readouterr().out)["trials"]
    assert len(trials) > 2
    assert all(kept(trial["config"]) for trial in trials)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--max-trials", "2"], "--max-trials"),
        (["--min-requests", "5"], "--min-requests"),
        (["--step-share", "1.5"], "--step-share"),
        (["--bounds", "max_num_batched_tokens=low"], "--bounds"),
        (["--parameters", "speed"], "--parameters"),
        (["--confirm-rounds", "2"], "--confirm-rounds"),
        (["--chrome-trace", "t.json"], "--chrome-trace"),
        (["--storage", "/nowhere/at/all.log"], "--storage"),
        (["--time-limit", "soon"], "--time-limit"),
        (["--blocks", "0"], "--blocks"),
        (["--max-throughput-loss", "much"], "--max-throughput-loss"),
    ],
)
def test_a_wrong_flag_is_named_before_anything_is_simulated(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], named: str
) -> None:
    assert main(command(files, "--out", str(tmp_path / "never"), *flags)) == 2
    said = capsys.readouterr().err
    assert named in said
    assert "trial 1" not in said


def test_more_rounds_need_drawn_arrivals(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(files, "--confirm-rounds", "2", "--mode", "gamma:2", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["meta"]["mode"] == "gamma:2"


def test_too_few_requests_show_in_the_exit_status(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(files, "--limit", "50")) == 1
    assert "at least 80 are needed" in capsys.readouterr().err
