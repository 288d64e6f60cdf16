"""`trimtab-engine serve hf://…` as a process: progress while it downloads, kills and neighbours, and how it ends when it cannot."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.engine_server import EngineServer, start_engine, wait_until
from support.hub import HubServer, Model, hub_server, wait_for

MODEL = "hf://trimtab/tiny"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def hub(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    """A hub over TLS, whose model needs a token."""
    folder = tmp_path_factory.mktemp("hub")
    shutil.copytree(tiny_model, folder / "model")
    with hub_server(pki=folder / "pki") as server:
        server.models["trimtab/tiny"] = Model(folder / "model", token="right")
        yield server


@pytest.fixture
def flags(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How an engine reaches it, with a cache and a token of the test's own."""
    hub.requests.clear()
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN", "right")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)  # whatever the library would ask by itself shows here too
    return ["--hub-endpoint", hub.url, "--hub-ca-file", str(hub.ca_file)]


def progress(server: EngineServer) -> dict[str, Any]:
    answer = httpx.get(f"{server.url}/ready", timeout=10)
    body: dict[str, Any] = answer.json()
    return {**body, "status": answer.status_code}


def complete(server: EngineServer) -> str:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def test_progress_shows_while_it_downloads_and_the_model_answers_as_a_local_one(
    hub: HubServer, flags: list[str], served_engine: EngineServer
) -> None:
    held = hub.fault(WEIGHTS, hold_at=200_000)
    with start_engine(MODEL, *flags, wait_ready=False) as server:
        wait_for(held.reached.is_set, "the download of the weights")
        wait_until(lambda: progress(server).get("fraction", 0) > 0.3, 120, lambda: server.log)
        said = progress(server)
        assert (said["status"], said["phase"], said["stage"]) == (503, "loading", "download")
        assert 0.3 < said["fraction"] < 1
        assert said["detail"].startswith(f"{said['fraction']:.0%} (")
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.admin_url}/admin/drain").json()["total_bytes"] == said["total_bytes"]
        held.released.set()
        server.wait_ready()
        assert complete(server) == complete(served_engine)
        assert "downloading" in server.log
        assert "right" not in server.log.replace("rights", "")
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "tiny"


def test_an_engine_killed_in_its_download_leaves_it_to_the_next_and_neighbours_share_it(
    hub: HubServer, flags: list[str]
) -> None:
    held = hub.fault(WEIGHTS, hold_at=200_000)
    with start_engine(MODEL, *flags, wait_ready=False) as first:
        wait_for(held.reached.is_set, "the download of the weights")
        wait_until(lambda: progress(first).get("fraction", 0) > 0.3, 120, lambda: first.log)
        first.stop(signal.SIGKILL)
    held.released.set()
    hub.requests.clear()
    held = hub.fault(WEIGHTS, hold_at=400_000)
    with start_engine(MODEL, *flags, wait_ready=False) as second:
        wait_for(held.reached.is_set, "the rest of the download")
        with start_engine(MODEL, *flags, wait_ready=False) as third:
            wait_until(
                lambda: "another engine downloads it" in progress(third).get("waiting_for", ""),
                60,
                lambda: third.log,
            )
            held.released.set()
            for server in (second, third):
                server.wait_ready()
                assert complete(server)
    starts = [asked.start for asked in hub.requests if asked.cdn and asked.path.endswith(WEIGHTS)]
    assert min(starts) > 0, "resumed"
    strange = [
        a.path
        for a in hub.requests
        if not a.cdn and "/resolve/" not in a.path and "/api/models/" not in a.path
    ]
    assert strange == [], "nothing is asked that a download does not need"
    assert {Path(asked.path).name for asked in hub.downloads()} == {WEIGHTS}, "the small files were there"
    assert sorted(set(starts)) == starts, "no byte came twice"


def test_a_signal_in_the_download_ends_it_at_once(hub: HubServer, flags: list[str]) -> None:
    held = hub.fault(WEIGHTS, hold_at=1000)
    with start_engine(MODEL, *flags, wait_ready=False) as server:
        wait_for(held.reached.is_set, "the download of the weights")
        assert server.stop() == 0
    held.released.set()


@pytest.mark.parametrize(
    ("model", "further", "code", "words"),
    [
        ("hf://trimtab/none", [], 1, "model hf://trimtab/none: no such model at https://"),
        (MODEL, ["--revision", "v9"], 1, "model hf://trimtab/tiny: the hub has no revision 'v9'"),
        (MODEL, ["--hub-ca-file", "/dev/null"], 1, "TLS: the certificate of https://127.0.0.1"),
        (MODEL, ["--hub-ca-file", "/no/such.pem"], 2, "--hub-ca-file: '/no/such.pem' is not allowed"),
        (MODEL, ["--hub-endpoint", "ftp://x"], 2, "--hub-endpoint: 'ftp://x' is not allowed"),
        (MODEL, ["--hub-limit", "10Ki"], 1, "the cache may hold 10.0 KiB"),
        ("hf://tiny", [], 1, "the form is hf://organisation/name"),
        (
            "/models/x",
            ["--revision", "v9"],
            2,
            "--revision: 'v9' is not allowed; left out: only hf:// models",
        ),
    ],
)
def test_what_cannot_work_ends_with_one_line_that_says_why(
    hub: HubServer, flags: list[str], model: str, further: list[str], code: int, words: str
) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "trimtab_engine.cli",
        "serve",
        model,
        "--port",
        "0",
        "--admin-port",
        "0",
    ]
    ended = subprocess.run(
        [*command, *flags, *further], capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == code, ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("trimtab-engine: ")
    assert words in last


def test_progress_of_each_stage_has_only_what_belongs_to_it() -> None:
    from trimtab_engine.server.lifecycle import Lifecycle

    lifecycle = Lifecycle()
    lifecycle.progress("download", 0.43, 1000 * 2**20, "https://hub answers HTTP 503")
    want = {"detail": "43% (430.0 MiB of 1000.0 MiB)", "waiting_for": "https://hub answers HTTP 503"}
    assert want.items() <= lifecycle.to_json().items()
    lifecycle.progress("load", 0.5)
    assert json.loads(json.dumps(lifecycle.to_json())) == {
        "ready": False, "phase": "loading", "stage": "load", "fraction": 0.5,
    }  # fmt: skip
