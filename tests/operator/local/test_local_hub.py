"""A service from a hub on this machine: one download for its replicas, seen while it goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.hub import Model, hub_server, wait_for
from support.local_operator import LocalOperator, condition, reasons, service_resource


def test_a_model_of_a_hub_is_downloaded_once_and_seen_to_be(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN", "mine")
    with hub_server() as hub:
        hub.models["trimtab/tiny"] = Model(tiny_model, token="mine")
        held = hub.fault("model.safetensors", hold_at=250_000)
        resource = service_resource(tiny_model, replicas=2)
        resource["spec"]["model"] = {"uri": "hf://trimtab/tiny"}
        resource["spec"]["engine"]["extraArgs"] = [f"--hub-endpoint={hub.url}"]
        operator = LocalOperator(tmp_path, resource)
        try:
            wait_for(held.reached.is_set, "the download of the weights", timeout_s=120)
            said = operator.wait(lambda status: " % of " in condition(status, "ModelLoaded")["message"])
            assert condition(said, "ModelLoaded")["reason"] == "ModelDownloading"
            held.released.set()
            operator.wait_ready()
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 4}
            assert operator.client.post("/v1/completions", json=body).status_code == 200
            assert "Downloading" in reasons(operator.status())
            assert len(hub.downloads("model.safetensors")) == 1
        finally:
            held.released.set()
            operator.stop()
