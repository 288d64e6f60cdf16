"""The command line: what it accepts, and that whatever is wrong is said with flag, value and range before a model loads."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from support.core_builders import make_step_time
from trimtab_engine.cli import build_parser, configuration, duration_s, size_bytes
from trimtab_engine.config import EngineConfig
from trimtab_engine.core.live import LiveConfig
from trimtab_engine.errors import ConfigError
from trimtab_engine.server.options import ServerOptions


def parse(*flags: str) -> argparse.Namespace:
    return build_parser().parse_args(["serve", "hf://some/model", *flags])


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "trimtab_engine.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_no_flag_at_all_gives_the_defaults_of_the_types() -> None:
    config, options, incumbent, boot_error = configuration(parse())
    assert config == EngineConfig(model="hf://some/model")
    assert options == ServerOptions(served_model_name="model")
    assert incumbent.config == LiveConfig()
    assert (incumbent.generation, incumbent.source, boot_error) == (0, "Spec", None)


def test_every_field_has_a_flag_that_binds(tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    model.write_text(json.dumps({"model": make_step_time().to_json(), "score": {}}))
    config, options, incumbent, _ = configuration(
        parse(
            *("--device", "cpu", "--dtype", "float32", "--max-model-len", "100", "--block-size", "32"),
            *("--kv-cache-memory", "512Mi", "--gpu-memory-utilization", "0.5", "--no-enable-prefix-caching"),
            *(
                "--prefill-first",
                "--batch-invariant",
                "--shed-late",
                "--fair-tenants",
                "--num-threads",
                "3",
                "--seed",
                "4",
                "--record-steps",
                "r",
            ),
            *("--cache-dir", "c", "--ceiling-max-num-batched-tokens", "700", "--ceiling-max-num-seqs", "70"),
            *("--max-num-batched-tokens", "600", "--max-num-seqs", "60", "--scheduling-policy", "priority"),
            *("--long-prefill-token-threshold", "50", "--priority-aging", "2m", "--slo-ttft", "800ms"),
            *("--slo-itl", "0.06", "--host", "127.0.0.2", "--port", "1", "--admin-host", "::1"),
            *("--admin-port", "2", "--port-file", "p", "--live-config", "l", "--max-queued-requests", "5"),
            *("--drain-timeout", "6", "--leaving-time", "7", "--stall-timeout", "8", "--api-keys", "k"),
            *("--admin-public-key", "a", "--admin-audience", "me", "--trusted-class-header", "X-Class"),
            *("--trusted-tenant-header", "X-Tenant", "--log-format", "json", "--served-model-name", "name"),
            *("--client-stall-timeout", "9", "--fair-tenants", "--swap-memory", "64Mi"),
            *("--step-model", str(model)),
            *("--revision", "v1", "--hub-endpoint", "https://hub", "--hub-ca-file", "ca"),
            *("--hub-patience", "1m", "--hub-limit", "1Gi"),
        )
    )
    engine_defaults, server_defaults = EngineConfig(model=""), ServerOptions(served_model_name="")
    for given, default in ((config, engine_defaults), (options, server_defaults)):
        for field in fields(default):
            assert getattr(given, field.name) != getattr(default, field.name), f"{field.name} has no flag"
    assert config.kv_cache_bytes == 512 * 2**20
    assert config.step_model == make_step_time().to_json()
    assert (config.ceilings.max_num_batched_tokens, config.ceilings.max_num_seqs) == (700, 70)
    live = incumbent.config.to_json()
    assert all(live[name] != value for name, value in LiveConfig().to_json().items()), live
    assert incumbent.config.priority_aging_s == 120.0
    assert incumbent.config.slo.classes[0].ttft_s == 0.8


def test_a_lowered_ceiling_lowers_the_defaults_with_it() -> None:
    _, _, incumbent, _ = configuration(parse("--ceiling-max-num-batched-tokens", "32"))
    assert (incumbent.config.max_num_batched_tokens, incumbent.config.max_num_seqs) == (32, 32)
    _, _, incumbent, _ = configuration(parse("--max-num-batched-tokens", "16"))
    assert (incumbent.config.max_num_batched_tokens, incumbent.config.max_num_seqs) == (16, 16)


@pytest.mark.parametrize(
    ("flags", "path", "allowed"),
    [
        (["--max-num-batched-tokens", "8193"], "--max-num-batched-tokens", "an integer from 1 to 8192"),
        (["--max-num-seqs", "300"], "--max-num-seqs", "an integer from 1 to 256"),
        (
            ["--max-num-batched-tokens", "8", "--max-num-seqs", "9"],
            "--max-num-batched-tokens",
            "at least max_num_seqs (9)",
        ),
        (["--block-size", "17"], "--block-size", "one of 8, 16, 32, 64, 128"),
        (["--kv-cache-memory", "0"], "--kv-cache-memory", "more than 0"),
        (["--slo-ttft", "0"], "--slo-ttft", "a number from 0.001 to 3600"),
        (["--ceiling-max-num-seqs", "0"], "--ceiling-max-num-seqs", "an integer from 1 to 1048576"),
        (["--port", "70000"], "--port", "a port from 0"),
        (["--max-queued-requests", "0"], "--max-queued-requests", "an integer from 1 to 1000000"),
        (["--admin-host", "0.0.0.0"], "--admin-host", "a loopback address, unless --admin-public-key"),
        (["--admin-public-key", "k.pem"], "--admin-audience", "when --admin-public-key is given"),
        (["--stall-timeout", "0"], "--stall-timeout", "seconds from 0.1"),
        (["--num-threads", "9999999"], "--num-threads", "at most 1024"),
        (["--seed", str(2**63)], "--seed", "an integer of 64 bits"),
        (["--client-stall-timeout", "0"], "--client-stall-timeout", "seconds from 0.1"),
        (["--step-model", "/no/such/file"], "--step-model", "No such file"),
        (["--step-model", "/dev/null"], "--step-model", "a JSON file that can be read"),
    ],
)
def test_a_value_out_of_range_names_its_flag(flags: list[str], path: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configuration(parse(*flags))
    assert caught.value.path == path
    assert allowed in caught.value.allowed


@pytest.mark.parametrize(
    ("text", "want"), [("4096", 4096), ("512Mi", 2**29), ("1.5Gi", 1610612736), ("2G", 2 * 10**9)]
)
def test_sizes(text: str, want: int) -> None:
    assert size_bytes(text) == want


@pytest.mark.parametrize(("text", "want"), [("0.5", 0.5), ("800ms", 0.8), ("2s", 2.0), ("1m", 60.0)])
def test_durations(text: str, want: float) -> None:
    assert duration_s(text) == pytest.approx(want)


@pytest.mark.parametrize("text", ["", "-1", "1h", "ten", "1 2"])
def test_what_is_no_size_or_duration_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        size_bytes(text)
    with pytest.raises(argparse.ArgumentTypeError):
        duration_s(text)


def test_help_teaches_and_version_tells() -> None:
    shown = run("serve", "--help")
    assert shown.returncode == 0
    for part in ("live config", "operation:", "examples:", "lease_s", "Exit codes"):
        assert part in shown.stdout
    version = run("--version")
    assert version.returncode == 0
    assert version.stdout.startswith("trimtab-engine 0.")


def test_a_bad_flag_ends_with_code_2_and_one_line(tmp_path: Path) -> None:
    ended = run("serve", str(tmp_path), "--max-num-batched-tokens", "9000")
    assert ended.returncode == 2
    assert ended.stderr == (
        "trimtab-engine: --max-num-batched-tokens: 9000 is not allowed; an integer from 1 to 8192\n"
    )


def test_what_is_missing_is_not_called_none(tmp_path: Path) -> None:
    ended = run("serve", str(tmp_path), "--admin-public-key", str(tmp_path / "a.pem"))
    assert ended.returncode == 2
    assert ended.stderr.startswith("trimtab-engine: --admin-audience: missing; a name of this engine")


def test_an_unknown_model_path_ends_with_code_1_and_names_it() -> None:
    ended = run("serve", "/no/such/model")
    assert ended.returncode == 1
    assert "/no/such/model" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_port_in_use_ends_with_code_2_and_names_it(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = run("serve", str(tiny_model), "--port", "0", "--admin-port", port)
    assert ended.returncode == 2
    assert f"--admin-port: {port} is not allowed; a port that is free on 127.0.0.1" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_only_the_engine_can_judge_ends_with_its_reason(tiny_model: Path) -> None:
    # Whether the length fits is known once the pool is: the engine process says so, the server ends with it.
    flags = ["--port", "0", "--admin-port", "0", "--kv-cache-memory", "100Ki", "--max-model-len", "2048"]
    ended = run("serve", str(tiny_model), *flags)
    assert ended.returncode == 2
    assert "max_model_len" in ended.stderr.rstrip().splitlines()[-1]
    assert "2048 is not allowed" in ended.stderr.rstrip().splitlines()[-1]


def test_an_unreadable_key_file_ends_with_code_2(tiny_model: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    ended = run("serve", str(tiny_model), "--admin-public-key", str(missing), "--admin-audience", "me")
    assert ended.returncode == 2
    assert str(missing) in ended.stderr


@pytest.mark.parametrize("place", ["missing/ports.json", "."])
def test_a_port_file_that_cannot_be_written_ends_with_code_2_and_leaves_nothing(
    tiny_model: Path, tmp_path: Path, place: str
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    ended = run(
        "serve", str(tiny_model), "--port", "0", "--admin-port", "0", "--port-file", str(folder / place)
    )
    assert ended.returncode == 2, ended.stderr
    assert "--port-file" in ended.stderr.strip().splitlines()[-1]
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == [folder]
    assert not list(folder.iterdir())
