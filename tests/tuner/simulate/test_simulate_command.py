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
from trimtab_tuner.simulate.trace_export import ChromeTrace


@pytest.fixture
def trace_file(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    traces.save(trace_of(*((n * 0.05, 50 + 10 * n, 12) for n in range(12))), path)
    return str(path)


@pytest.fixture
def cost_file(tmp_path: Path) -> str:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(step_time(0.01, tokens_from_1=1e-4).to_json()))
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
        (["--preset", "h100/mistral-7b", "--budget", "0"], "max_num_batched_tokens"),
        (["--preset", "h100/mistral-7b", "--budget", "8", "--max-num-seqs", "16"], "max_num_seqs"),
        (["--preset", "h100/mistral-7b", "--policy", "lifo"], "scheduling_policy"),
        (["--preset", "h100/mistral-7b", "--replicas", "0"], "--replicas"),
        (["--preset", "h100/mistral-7b", "--routing", "dice"], "--routing"),
        (["--preset", "h100/mistral-7b", "--block-size", "0"], "--block-size"),
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


def test_watching_a_simulation_does_not_change_it() -> None:
    trace = trace_of(*((n * 0.7, 40, 9) for n in range(9)))
    assert run(trace, observer=ChromeTrace()).result == run(trace).result
