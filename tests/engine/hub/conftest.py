"""A hub with a tiny model, as people publish one: with files that nobody needs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.hub import HubServer, Model, hub_server
from trimtab_engine.hub import patience

REPOSITORY = "trimtab/tiny"


@pytest.fixture
def repository(tmp_path: Path, tiny_model: Path) -> Path:
    """The folder that the hub serves; tests spoil it."""
    folder = tmp_path / "repository"
    shutil.copytree(tiny_model, folder)
    for name in ("README.md", "pytorch_model.bin", "consolidated.safetensors"):
        (folder / name).write_bytes(b"nobody needs this" * 1000)
    return folder


@pytest.fixture
def hub(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A running hub with that repository, and a client that is not patient for long."""
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.01)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with hub_server() as server:
        server.models[REPOSITORY] = Model(repository)
        yield server
