"""`trimtab-tuner simulate`: flags in, table and files out, and the Chrome trace."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from support.simulations import run, server, step_time, trace_of
from trimtab_tuner import trace as traces
from trimtab_tuner.cli import main
from trimtab_tuner.result import ReplayResult
from trimtab_tuner.simulate.presets import preset
from trimtab_tuner.simulate.trace_export import ChromeTrace


@pytest.fixture
def trace_file(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    traces.save(trace_of(*((n * 0.05, 50 + 10 * n, 12) for n in range(12))), path)
    return str(path)


@pytest.fixture
def cost_file(tmp_path: Path) -> str:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(step_time(0.01, tokens=1e-4).to_json()))
    return str(path)


def simulated(trace_file: str, tmp_path: Path, *flags: str) -> ReplayResult:
    out = tmp_path / "out.json"
    assert main(["simulate", "--trace", trace_file, "--out", str(out), *flags]) == 0
    return ReplayResult.load(out)


def test_a_preset_gives_a_table_and_a_result_that_report_reads(
    trace_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = simulated(trace_file, tmp_path, "--preset", "a100-80gb/mistral-7b", "--mode", "gamma:2")
    printed = capsys.readouterr()
    assert "12 of 12 ok" in printed.out
    assert "times real time" in printed.err
    assert result.meta["url"] == "simulated:a100-80gb/mistral-7b"
    assert result.meta["step_time"]["coefficients"]["base"] > 0
    page = tmp_path / "report.html"
    assert main(["report", f"simulated={tmp_path / 'out.json'}", "--out", str(page)]) == 0
    assert "modelled step times" in page.read_text()


def test_every_flag_of_the_server_binds(trace_file: str, cost_file: str, tmp_path: Path) -> None:
    base = ["--cost", cost_file, "--num-blocks", "100"]
    plain = simulated(trace_file, tmp_path, *base)
    for flags in (
        ["--budget", "64"],
        ["--budget", "64", "--max-num-seqs", "2"],
        ["--long-prefill-token-threshold", "32"],
        ["--num-blocks", "20"],
        ["--prefill-first", "--budget", "64"],
        ["--replicas", "2"],
        ["--replicas", "2", "--routing", "round-robin"],
        ["--mode", "poisson"],
        ["--mode", "poisson", "--seed", "1"],
        ["--speed", "2"],
    ):
        other = simulated(trace_file, tmp_path, *base, *flags)
        assert other.requests != plain.requests, flags
        assert all(request.status == "ok" for request in other.requests)
    policy = simulated(trace_file, tmp_path, *base, "--policy", "priority", "--priority-aging", "5")
    assert policy.meta["live_config"]["scheduling_policy"] == "priority"
    assert policy.meta["live_config"]["priority_aging_s"] == 5


def test_a_swap_pool_is_used_counted_and_paid_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, dear = tmp_path / "trace.jsonl", tmp_path / "dear.json"
    traces.save(trace_of(*((0.0, 30, 60) for _ in range(4))), trace)
    dear.write_text(json.dumps(step_time(1.0, tokens=0.1).to_json()))
    base = ["--cost", str(dear), "--num-blocks", "12"]
    recomputed = simulated(str(trace), tmp_path, *base)
    assert "0 swapped" in capsys.readouterr().err
    swapped = simulated(str(trace), tmp_path, *base, "--swap-blocks", "50", "--swap-block-time", "10ms")
    assert "blocks out" in capsys.readouterr().err
    none, some = recomputed.meta["memory"], swapped.meta["memory"]
    assert none["preemptions_recompute"] > 0 == none["preemptions_swap"]
    assert some["preemptions_swap"] > 0 == some["preemptions_recompute"] == some["recomputed_tokens"]
    assert 0 < some["blocks_swapped_in"] <= some["blocks_swapped_out"]
    assert some["copying_s"] == pytest.approx(0.01 * (some["blocks_swapped_in"] + some["blocks_swapped_out"]))
    assert (swapped.meta["num_swap_blocks"], swapped.meta["swap_block_s"]) == (50, 0.01)
    assert swapped.meta["elapsed_s"] < recomputed.meta["elapsed_s"]


def test_the_link_of_a_preset_gives_the_time_of_a_copy(trace_file: str, tmp_path: Path) -> None:
    base = ["--preset", "a100-80gb/mistral-7b", "--swap-blocks", "9"]
    known = preset("a100-80gb/mistral-7b").swap_block_s
    assert simulated(trace_file, tmp_path, *base).meta["swap_block_s"] == known
    assert simulated(trace_file, tmp_path, *base, "--block-size", "32").meta["swap_block_s"] == 2 * known


def test_what_is_shed_counts_as_rejected(cost_file: str, tmp_path: Path) -> None:
    path = tmp_path / "late.jsonl"
    traces.save(trace_of((0.0, 10, 200), (0.1, 10, 1)), path)
    base = ["--cost", cost_file, "--num-blocks", "100", "--max-num-seqs", "1", "--policy", "sla-aware"]
    assert [r.status for r in simulated(str(path), tmp_path, *base).requests] == ["ok", "ok"]
    out = tmp_path / "shed.json"
    assert main(["simulate", "--trace", str(path), "--out", str(out), *base, "--shed-late"]) == 1
    late = ReplayResult.load(out).requests[1]
    assert (late.status, late.http_status) == ("rejected", 503)


def test_prefix_caching_can_be_switched_off(cost_file: str, tmp_path: Path) -> None:
    path = tmp_path / "shared.jsonl"
    traces.save(trace_of((0.0, 64, 2), (5.0, 64, 2), prefixes=[(1, 2)] * 2), path)
    base = ["--cost", cost_file, "--num-blocks", "100"]
    cached = [
        sum(request.cached_tokens or 0 for request in simulated(str(path), tmp_path, *base, *flags).requests)
        for flags in ([], ["--no-enable-prefix-caching"])
    ]
    assert cached == [32, 0]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--cost/--preset"),
        (["--cost", "{cost}", "--preset", "h100/mistral-7b"], "--cost/--preset"),
        (["--cost", "{cost}"], "--num-blocks"),
        (["--preset", "nothing"], "--preset"),
        (
            ["--preset", "h100/mistral-7b", "--budget", "0"],
            "--budget: 0 is not allowed; a whole number of at least 1",
        ),
        (
            ["--preset", "h100/mistral-7b", "--budget", "8", "--max-num-seqs", "16"],
            "--budget: 8 is not allowed; at least max_num_seqs",
        ),
        (["--preset", "h100/mistral-7b", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["--preset", "h100/mistral-7b", "--policy", "lifo"], "--policy"),
        (["--preset", "h100/mistral-7b", "--priority-aging", "-1"], "--priority-aging"),
        (["--preset", "h100/mistral-7b", "--limit", "0"], "--limit"),
        (["--preset", "h100/mistral-7b", "--skip", "100000"], "--skip"),
        (["--preset", "h100/mistral-7b", "--max-trials", "4"], "--max-trials: only together with --search"),
        (["--preset", "h100/mistral-7b", "--json"], "--json: only together with --search"),
        (
            ["--preset", "h100/mistral-7b", "--bounds", "max_num_seqs=1:2"],
            "--bounds: only together with --search",
        ),
        (["--preset", "h100/mistral-7b", "--replicas", "0"], "--replicas"),
        (["--preset", "h100/mistral-7b", "--routing", "dice"], "--routing"),
        (["--preset", "h100/mistral-7b", "--block-size", "0"], "--block-size"),
        (["--cost", "{cost}", "--num-blocks", "9", "--swap-blocks", "9"], "--swap-block-time"),
        (["--preset", "h100/mistral-7b", "--swap-block-time", "soon"], "--swap-block-time"),
        (["--preset", "h100/mistral-7b", "--swap-blocks", "-1"], "--swap-blocks"),
        (["--preset", "h100/mistral-7b", "--chrome-trace", "/no/such/folder/t.json"], "--chrome-trace"),
    ],
)
def test_a_wrong_flag_is_named_and_nothing_is_written(
    trace_file: str,
    cost_file: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    named: str,
) -> None:
    out = tmp_path / "never.json"
    asked = [flag.format(cost=cost_file) for flag in flags]
    assert main(["simulate", "--trace", trace_file, "--out", str(out), *asked]) == 2
    assert named in capsys.readouterr().err
    assert not out.exists()


def test_a_request_that_cannot_run_shows_in_the_exit_status(trace_file: str, cost_file: str) -> None:
    assert main(["simulate", "--trace", trace_file, "--cost", cost_file, "--num-blocks", "8"]) == 1


# ---- Chrome trace ------------------------------------------------------------------------------------------------


def events_of(path: Path) -> list[dict[str, Any]]:
    document = json.loads(path.read_text())
    found: list[dict[str, Any]] = document["traceEvents"]
    return found


def test_the_chrome_trace_shows_every_step_once_without_overlap(
    trace_file: str, cost_file: str, tmp_path: Path
) -> None:
    path = tmp_path / "chrome.json"
    flags = ["--cost", cost_file, "--num-blocks", "100", "--replicas", "2", "--chrome-trace", str(path)]
    result = simulated(trace_file, tmp_path, *flags)
    steps = [event for event in events_of(path) if event["ph"] == "X"]
    assert {event["pid"] for event in steps} == {0, 1}
    for replica in (0, 1):
        spans = [(e["ts"], e["ts"] + e["dur"]) for e in steps if e["pid"] == replica]
        assert all(b[0] >= a[1] - 1e-6 for a, b in pairwise(spans))
    computed = sum(e["args"]["decodes"] + e["args"]["prefill_tokens"] for e in steps)
    assert computed == sum(r.asked_prompt_tokens + r.asked_output_tokens - 1 for r in result.requests)
    assert max(e["ts"] + e["dur"] for e in steps) == pytest.approx(
        1e6 * max(request.finish_s or 0.0 for request in result.requests)
    )


def test_requests_begin_and_end_once_in_the_chrome_trace_and_preemptions_show(tmp_path: Path) -> None:
    chrome = ChromeTrace()
    simulation = run(trace_of(*((0.0, 30, 60) for _ in range(4))), on=server(num_blocks=12), observer=chrome)
    path = tmp_path / "chrome.json"
    chrome.save(path)
    phases = {phase: [e["id"] for e in events_of(path) if e["ph"] == phase] for phase in "ben"}
    assert sorted(phases["b"]) == sorted(phases["e"]) == ["0", "1", "2", "3"]
    assert len(phases["n"]) == simulation.stats[0].preemptions_recompute > 0


def test_the_chrome_trace_shows_swaps(tmp_path: Path) -> None:
    chrome, trace = ChromeTrace(), trace_of(*((0.0, 30, 60) for _ in range(4)))
    swapping = server(num_blocks=12, num_swap_blocks=50, swap_block_s=0.01)
    simulation = run(trace, step_time(1.0, tokens=0.1), swapping, observer=chrome)
    path = tmp_path / "chrome.json"
    chrome.save(path)
    events = events_of(path)
    assert {e["args"]["kv"] for e in events if e["ph"] == "n"} == {"swapped"}
    steps = [e["args"] for e in events if e["ph"] == "X"]
    assert sum(args.get("blocks_swapped_out", 0) for args in steps) == simulation.num_swapped_out > 0
    assert sum(args.get("blocks_swapped_in", 0) for args in steps) == simulation.num_swapped_in > 0


def test_watching_a_simulation_does_not_change_it() -> None:
    trace = trace_of(*((n * 0.7, 40, 9) for n in range(9)))
    assert run(trace, observer=ChromeTrace()).result == run(trace).result
