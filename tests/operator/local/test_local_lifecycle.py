"""Start and end of `trimtab-operator local`, the good ones and the bad, with real engines."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml

from support.local_operator import LocalOperator, alive, command, condition, reasons, service_resource
from support.tiny_models import tiny_chat_model
from trimtab_operator.local import process

TUNING = {"mode": "Apply", "parameters": [{"name": "maxNumBatchedTokens", "min": 32, "max": 4096}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat_model(tmp_path_factory.mktemp("model"))


def wait_gone(process_ids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while alive(process_ids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive(process_ids) == []


def test_life_from_the_first_held_request_to_the_second_interrupt(tmp_path: Path, model: Path) -> None:
    resource = service_resource(model, tuning=TUNING)
    resource["spec"]["engine"]["maxModelLen"] = 2048
    first = LocalOperator(tmp_path, resource)
    try:
        # Nothing is ready yet: a probe says so, a request waits and is served.
        assert first.client.get("/ready").status_code == 503
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
        answer = first.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4

        first.wait_ready()
        ready = json.loads((tmp_path / "ready.json").read_text())
        assert ready == {"url": first.url, "control_url": first.control_url, "pid": first.process.pid}
        recommended = first.control.put(
            "/admin/recommendation", json={"config": {"max_num_batched_tokens": 256}}
        )
        assert recommended.json()["promoted"] is True

        # A second operator must not take the same state.
        rival = subprocess.run(
            command(first.file, tmp_path / "state"), capture_output=True, text=True, timeout=60, check=False
        )
        assert rival.returncode == 2
        assert f"in use by another operator (pid {first.process.pid})" in rival.stderr

        engines = first.engine_pids()
        assert len(engines) == 2  # the HTTP process and its worker
    finally:
        first.stop(signal.SIGKILL)
    wait_gone(engines)

    # The next operator goes on with what was promoted, under a number that no engine has to doubt.
    second = LocalOperator(tmp_path, resource)
    try:
        status = second.wait_ready()
        assert status["live"]["incumbent"]["source"] == "Recommendation"
        assert status["live"]["in_force"]["config"]["max_num_batched_tokens"] == 256
        assert status["live"]["incumbent"]["generation"] >= recommended.json()["generation"]

        engines = second.engine_pids()
        long = {"model": "tiny", "prompt": "hello", "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with second.client.stream("POST", "/v1/completions", json=long) as response:
            lines = response.iter_lines()
            next(lines)
            second.process.send_signal(signal.SIGINT)
            second.wait_log("Draining: 1 requests finish first")
            second.process.send_signal(signal.SIGINT)
            # Whatever was left of the stream is cut or ends with an error; it does not look whole.
            rest: list[str] = []
            with contextlib.suppress(httpx.TransportError):
                rest.extend(lines)
            assert "data: [DONE]" not in rest
        assert second.process.wait(20) == 0
        wait_gone(engines)
    finally:
        second.stop()


def test_model_that_cannot_be_loaded_stalls_the_service_and_shows_the_log(
    tmp_path: Path, model: Path
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    (broken / "model.safetensors").write_bytes(b"not weights")
    operator = LocalOperator(tmp_path, service_resource(broken))
    try:
        status = operator.wait(
            lambda s: "Stalled" in {c["type"] for c in s["conditions"] if c["status"] == "True"}
        )
        stalled = condition(status, "Stalled")
        assert stalled["reason"] == "ModelLoadFailed"
        assert "chat-0 cannot start: ended with exit status" in stalled["message"]
        assert condition(status, "Ready")["status"] == "False"
        assert "ModelLoadFailed" in reasons(status)
        assert "safetensors" in operator.log
        assert operator.stop(signal.SIGTERM) == 0
    finally:
        operator.stop()


def run_briefly(file: Path, state: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """An operator that must not start."""
    return subprocess.run(
        command(file, state, *options), capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("option", ["--port", "--control-port"])
def test_port_in_use_is_named(tmp_path: Path, model: Path, option: str) -> None:
    file = tmp_path / "chat.yaml"
    file.write_text(yaml.safe_dump(service_resource(model)))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = run_briefly(file, tmp_path / "state", option, port)
    assert result.returncode == 2
    assert f"{option}: {port} is in use on 127.0.0.1" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("text", "wants"),
    [
        (None, "cannot be read: No such file or directory"),
        ("a: [", "line 1"),
        ("a: 1", "apiVersion"),
        (
            "apiVersion: serving.trimtab.dev/v1alpha1\nkind: Pod",
            "kind: 'Pod' is not allowed; one of InferenceService",
        ),
    ],
    ids=["missing", "not-yaml", "not-a-resource", "other-kind"],
)
def test_wrong_file_is_explained(tmp_path: Path, text: str | None, wants: str) -> None:
    file = tmp_path / "chat.yaml"
    if text is not None:
        file.write_text(text)
    result = run_briefly(file, tmp_path / "state")
    assert result.returncode == 2
    assert wants in result.stderr
    assert str(file) in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("uri", "wants"),
    [
        ("file:///nowhere/model", "nothing is at /nowhere/model"),
        ("package://no_such_package/model.gguf", "'no_such_package' is not installed"),
        ("package://yaml/model.gguf", "it has no 'model.gguf'"),
        ("pvc://claim/model", "local mode has no volume claims; use file://, package:// or hf://"),
        ("model", "spec.model.uri: 'model' is not allowed; hf://"),
    ],
)
def test_unknown_model_is_explained(tmp_path: Path, uri: str, wants: str) -> None:
    resource = service_resource(tmp_path)
    resource["spec"]["model"]["uri"] = uri
    file = tmp_path / "chat.yaml"
    file.write_text(yaml.safe_dump(resource))
    result = run_briefly(file, tmp_path / "state")
    assert result.returncode == 2
    assert wants in result.stderr


def test_port_out_of_range_is_refused(tmp_path: Path) -> None:
    result = run_briefly(tmp_path / "chat.yaml", tmp_path / "state", "--port", "70000")
    assert result.returncode == 2
    assert "'70000' is not allowed; a port from 0" in result.stderr


def test_child_does_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    # Also before the engine itself has done anything about it: from its first instruction on.
    launcher = Path(process.__file__).with_name("launcher.py")
    script = (
        "import os, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, {str(launcher)!r}, str(os.getpid()), '/bin/sleep', '600'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    deadline = time.monotonic() + 10
    while "sleep" not in Path(f"/proc/{child}/cmdline").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_gone([child])
