"""`trimtab-tuner start` against a real API server: what its exit status says to a Job, and its words to a person."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from support.kube_api import KubeApi
from trimtab_operator.cluster import kinds
from trimtab_operator.cluster.kube import Kube
from trimtab_tuner.cli import main

pytestmark = pytest.mark.cluster


def start(kubeconfig: Path, namespace: str, *more: str) -> int:
    own = ["--namespace", namespace, "--service", "chat", "--job", "chat-nightly-29401470"]
    return main(["start", "--kubeconfig", str(kubeconfig), *own, *more])


def other_kubeconfig(
    api: KubeApi, folder: Path, *, token: str | None = None, server: str | None = None
) -> Path:
    config = yaml.safe_load(api.kubeconfig.read_text())
    if token is not None:
        config["users"][0]["user"] = {"token": token}
    if server is not None:
        config["clusters"][0]["cluster"]["server"] = server
    path = folder / "kubeconfig"
    path.write_text(json.dumps(config))
    return path


def test_a_run_is_made_once_however_often_its_job_tries(
    api: KubeApi, kube: Kube, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(api.kubeconfig, namespace, "--max-trials", "3") == 0
    assert capsys.readouterr().out == f"TuningRun {namespace}/chat-29401470 was made\n"
    assert start(api.kubeconfig, namespace, "--max-trials", "4") == 0
    assert "exists already" in capsys.readouterr().out
    [made] = kube.list(kinds.RUN, namespace)
    assert (made["metadata"]["name"], made["spec"]["maxTrials"]) == ("chat-29401470", 3)


@pytest.mark.parametrize(
    ("more", "word"),
    [
        (("--max-trials", "500"), "spec.maxTrials"),
        (("--time-limit", "soon"), "spec.timeLimit"),
        (("--trace-key", "k"), "--trace-config-map"),
    ],
)
def test_what_another_try_would_not_mend_ends_with_2(
    api: KubeApi,
    kube: Kube,
    namespace: str,
    more: tuple[str, str],
    word: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert start(api.kubeconfig, namespace, *more) == 2
    assert word in capsys.readouterr().err
    assert kube.list(kinds.RUN, namespace) == []


def test_what_another_try_may_mend_ends_with_1(
    api: KubeApi, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(other_kubeconfig(api, tmp_path, token="nobody-s"), namespace) == 1
    assert f"TuningRun {namespace}/chat-29401470 was not made" in capsys.readouterr().err
    assert start(other_kubeconfig(api, tmp_path, server="https://127.0.0.1:9"), namespace) == 1
    assert "was not made" in capsys.readouterr().err
    assert start(api.kubeconfig, "no-such-namespace") == 1
    assert "no-such-namespace" in capsys.readouterr().err
