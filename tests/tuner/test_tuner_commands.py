"""The command line of traces and replays, end to end: files in, a real server, files and tables out."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from support.scripted_openai import Answer, ScriptedServer
from trimtab_tuner import trace as traces
from trimtab_tuner.cli import COMMANDS, main
from trimtab_tuner.result import ReplayResult
from trimtab_tuner.units import format_durations, parse_duration_s


def records(path: Path, count: int = 5) -> Path:
    lines = [
        json.dumps({"arrival_s": 0.02 * n * n, "prompt_tokens": 10 + n, "output_tokens": 3})
        for n in range(count)
    ]
    path.write_text("\n".join(lines))
    return path


async def whole(answer: Answer) -> None:
    await answer.whole()


def test_replay_writes_samples_and_prints_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = records(tmp_path / "t.jsonl")
    out = tmp_path / "r.json.gz"
    with ScriptedServer(whole) as server:
        status = main(
            ["replay", "--url", server.url, "--trace", str(trace), "--mode", "uniform", "--slo-ttft", "30s", "--slo-itl", "20s",
             "--speed", "2", "--limit", "4", "--scale-lengths", "2", "--slo-class", "batch=60s,50s", "--out", str(out)]
        )  # fmt: skip
        assert [body["max_tokens"] for body in server.bodies] == [2] * 4
    assert status == 0
    printed = capsys.readouterr()
    assert "4 of 4 ok" in printed.out
    assert "p99 needs 300 requests: not shown" in printed.out
    result = ReplayResult.load(out)
    assert result.meta["trace_changes"][:3] == ["first 4 requests", "lengths ÷2", "rate ×2"]
    assert result.slo.of("batch").itl_s == 50.0
    gaps = {
        round(b.intended_s - a.intended_s, 6)
        for a, b in zip(result.requests, result.requests[1:], strict=False)
    }
    assert len(gaps) == 1


def test_failed_requests_show_in_table_and_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def full(answer: Answer) -> None:
        await answer.reply(503, {"error": {"message": "full"}})

    with ScriptedServer(full) as server:
        assert main(["replay", "--url", server.url, "--trace", str(records(tmp_path / "t.jsonl", 2))]) == 1
    assert "0 of 2 ok, 2 rejected" in capsys.readouterr().out


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    first = threading.Event()

    async def answer(answer: Answer) -> None:
        await answer.whole()
        first.set()

    trace = tmp_path / "t.jsonl"
    lines = [{"arrival_s": at, "prompt_tokens": 5, "output_tokens": 2} for at in (0.0, 600.0)]
    trace.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "r.json"
    with ScriptedServer(answer) as server:
        command = ["replay", "--url", server.url, "--trace", str(trace), "--out", str(out)]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "trimtab_tuner.cli", *command], stderr=subprocess.PIPE
        )
        try:
            assert first.wait(60)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
    assert process.returncode == 130
    assert b"Traceback" not in errors
    result = ReplayResult.load(out)
    assert result.meta["interrupted"] is True
    assert [request.index for request in result.requests] == [0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--mode", "bursty"], "--mode: 'bursty' is not allowed; one of: recorded"),
        (["--slo-ttft", "soon"], "--slo-ttft: 'soon' is not allowed; a duration above 0"),
        (["--slo-class", "x"], "NAME=TTFT,ITL"),
        (["--slice", "5"], "FROM:TO"),
        (["--speed", "0"], "a factor above 0"),
        (["--limit", "0"], "--limit: 0 is not allowed; a whole number of at least 1"),
        (["--token-ids", "9:3"], "LO:HI"),
        (["--extra-body", "[1]"], "a JSON object"),
        (["--api-key-env", "NO_SUCH_VARIABLE"], "environment variable that is set"),
        (["--out", "/no/such/folder/r.json"], "a folder that exists"),
        (["--warmup", "-1"], "--warmup"),
        (["--jitter-seed", "1"], "only with a Mooncake trace"),
        (["--format", "csv"], "one of: auto, azure, burstgpt, mooncake, records"),
    ],
)
def test_a_wrong_flag_is_one_line_with_path_value_and_what_is_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    trace = records(tmp_path / "t.jsonl")
    assert main(["replay", "--url", "http://127.0.0.1:9", "--trace", str(trace), *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("trimtab-tuner replay: error: ")
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trace", "info", "/nowhere"], "/nowhere: cannot be read as a trace: No such file or directory"),
        (
            ["report", "/nowhere"],
            "/nowhere: cannot be read as a replay result (JSON, or .gz of it): No such file",
        ),
        (["report"], "at least one replay result or tuning result is needed"),
        (["run", "--control", "http://127.0.0.1:9"], "--trace/--observe: exactly one of the two is needed"),
    ],
)
def test_what_is_missing_is_said_in_one_plain_line(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "None" not in error
    assert error.count("\n") == 1


def test_a_broken_trace_line_is_named_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = records(tmp_path / "t.jsonl")
    trace.write_text(trace.read_text() + '\n{"arrival_s": 9, "prompt_tokens": "x", "output_tokens": 1}\n')
    assert main(["trace", "info", str(trace)]) == 2
    assert (
        f"{trace}:6: 'x' is not allowed; expected prompt_tokens as a whole number" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[" * 100_000, b"{}", b"[]", b"\x1f\x8b\x08junk"], ids=range(7)
)
def test_a_report_of_what_is_no_result_is_one_line_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(content)
    assert main(["report", str(path), "--out", str(tmp_path / "out")]) == 2
    assert "result.json" in capsys.readouterr().err.strip().splitlines()[-1]


def test_traces_are_described_converted_and_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = records(tmp_path / "t.jsonl", 40)
    out = tmp_path / "u.jsonl"
    assert (
        main(
            ["trace", "convert", str(trace), str(out), "--mode", "poisson", "--seed", "3", "--duration", "1m"]
        )
        == 0
    )
    assert traces.load(out).span_s == pytest.approx(60.0)
    assert main(["trace", "info", str(out)]) == 0
    assert "40 over 60.0 s" in capsys.readouterr().out
    assert (
        main(
            [
                "trace",
                "synth",
                str(tmp_path / "s.jsonl"),
                "--requests",
                "80",
                "--cv",
                "2",
                "--long-tokens",
                "900",
            ]
        )
        == 0
    )
    made = traces.load(tmp_path / "s.jsonl")
    assert (len(made), max(r.prompt_tokens for r in made.requests)) == (80, 900)


def test_help_teaches_and_loads_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys, contextlib; from trimtab_tuner.cli import main\nwith contextlib.suppress(SystemExit): main(['--help'])\nsys.exit(any(m in sys.modules for m in ('optuna', 'matplotlib', 'rich', 'numpy')))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in COMMANDS)
    with pytest.raises(SystemExit, match="0"):
        main(["replay", "--help"])
    assert "open loop" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "want"), [("800ms", 0.8), ("1.5", 1.5), ("2m", 120.0), ("1e-3s", 0.001), ("50 us", 5e-5)]
)
def test_durations_are_read_with_their_units(text: str, want: float) -> None:
    assert parse_duration_s(text, "--x") == pytest.approx(want)


def test_durations_are_shown_with_one_unit() -> None:
    assert format_durations((0.334, 4.8, None)) == "0.33 / 4.80 / – s"
    assert format_durations((0.0431, 1.53), "ms") == "43 / 1,530 ms"
    assert format_durations((0.0005, 0.02, float("inf"))) == "0.5 / 20.0 / failed ms"
    assert format_durations((None, None)) == "– / –"
