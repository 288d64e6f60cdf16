"""The simulator plans what the engine planned: a real engine's record, batch by batch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.engine_server import start_engine
from support.simulations import SLO, trace_of
from trimtab_engine.step_record import RecordError, read
from trimtab_tuner.replay import ReplayOptions, replay
from trimtab_tuner.simulate.identity import compare, compare_free_running, recorded_steps

NUM_REQUESTS = 36


def recorded(tiny_model: Path, path: Path, *more: str) -> Path:
    """A real engine under a bursty load with shared prefixes, chunked prompts and too little KV memory."""
    trace = trace_of(
        *((n // 12 * 0.05, 40 + 9 * (n % 7), 40 + 3 * (n % 5)) for n in range(NUM_REQUESTS)),
        prefixes=[(n % 3,) for n in range(NUM_REQUESTS)],
        block=32,
    )
    flags = ["--kv-cache-memory", "300Ki", "--max-num-batched-tokens", "48", "--max-num-seqs", "12", *more]
    with start_engine(tiny_model, *flags, "--record-steps", str(path)) as server:
        result = replay(trace, server.url, slo=SLO, options=ReplayOptions(prompt_seed=3))
        assert {request.status for request in result.requests} == {"ok"}
        assert server.stop() == 0
    return path


@pytest.fixture(scope="module")
def record(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Preempted requests are computed again."""
    return recorded(tiny_model, tmp_path_factory.mktemp("record") / "steps.jsonl")


@pytest.fixture(scope="module")
def swapped(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Preempted requests go to CPU memory."""
    path = tmp_path_factory.mktemp("swapped") / "steps.jsonl"
    return recorded(tiny_model, path, "--swap-memory", "4Mi", "--no-enable-prefix-caching")


def spoiled(record: Path, path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The record with one entry in its middle changed."""
    lines = record.read_text().splitlines()
    number = next(n for n in range(len(lines) // 2, len(lines)) if len(json.loads(lines[n])["rows"]) > 1)
    entry = json.loads(lines[number])
    change(entry)
    lines[number] = json.dumps(entry)
    path.write_text("\n".join(lines) + "\n")
    return path


def test_every_batch_of_a_real_engine_is_planned_again(record: Path) -> None:
    identity = compare(record)
    assert identity.first_difference is None
    assert identity.equal == identity.steps > 50


def test_a_run_that_swapped_is_planned_again_batch_by_batch(swapped: Path) -> None:
    for identity in (compare(swapped), compare_free_running(swapped)):
        assert identity.first_difference is None
        assert identity.equal == identity.steps > 50
        assert identity.stats.preemptions_swap > 0


def test_the_record_holds_what_makes_scheduling_hard(record: Path) -> None:
    entries = list(read(record)[1])
    chunks = [row for entry in entries for row in entry.rows if 1 < row[2] < 40]
    assert chunks
    assert max(len(entry.rows) for entry in entries) > 4
    firsts: dict[str, int] = {}
    for entry in entries:
        for request_id, context, _ in entry.rows:
            firsts.setdefault(request_id, context)
    assert any(firsts.values()), "no request found its prefix cached"
    assert compare(record).stats.preemptions_recompute > 0


def test_arrivals_and_step_times_alone_give_every_batch_too(record: Path) -> None:
    identity = compare_free_running(record)
    assert identity.first_difference is None
    assert identity.equal == identity.steps > 50


def test_a_batch_that_differs_is_found_and_named(record: Path, tmp_path: Path) -> None:
    def reorder(entry: dict[str, Any]) -> None:
        entry["rows"].reverse()

    other = spoiled(record, tmp_path / "other.jsonl", reorder)
    for found in (compare(other), compare_free_running(other)):
        assert found.equal < found.steps
        assert found.first_difference is not None
        assert "the engine ran" in found.first_difference


def test_a_later_arrival_changes_batches(record: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    busy = next(n for n in range(1, len(lines)) if lines[n]["messages"])
    lines[busy + 2]["messages"] += lines[busy]["messages"]
    lines[busy]["messages"] = []
    other = tmp_path / "later.jsonl"
    other.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compare(other).equal < compare(other).steps


def test_recorded_steps_have_the_times_of_the_record(record: Path) -> None:
    steps = recorded_steps(record)
    entries = [entry for entry in read(record)[1] if entry.rows]
    assert [step.features.tokens for step in steps] == [sum(row[2] for row in e.rows) for e in entries]
    assert [step.features.sequences for step in steps] == [len(e.rows) for e in entries]
    assert all(0 < step.end_s - step.begin_s <= step.duration_s for step in steps)


def test_what_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / "no.jsonl"
    path.write_text("{}\n")
    with pytest.raises(RecordError, match=r"no\.jsonl:1"):
        compare(path)


def test_a_record_with_aborts_is_refused_by_the_free_run(record: Path, tmp_path: Path) -> None:
    def abort(entry: dict[str, Any]) -> None:
        entry["messages"] = [{"now": entry["now"], "message": {"type": "Abort", "ids": ["x"]}}]

    with pytest.raises(RecordError, match="plain requests"):
        compare_free_running(spoiled(record, tmp_path / "aborted.jsonl", abort))
