"""Fixtures that several parts use, and hypothesis's profiles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from support.engine_server import EngineServer, start_engine
from support.tiny_models import tiny_chat_model

# In CI a failure must be the change's fault: no random examples, no deadlines on a shared machine.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder that the server can serve: two layers, 512 tokens, ChatML template; named "tiny"."""
    return tiny_chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def served_engine(tiny_model: Path) -> Iterator[EngineServer]:
    """`trimtab-engine serve` on the tiny model, ready, shared by all tests that leave it as they found it."""
    with start_engine(tiny_model) as server:
        yield server
