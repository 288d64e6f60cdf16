"""Folders with tiny models, built once per session."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.tiny_models import save_tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """family → folder, sharded, made on first use."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny_model(tmp_path_factory.mktemp(family) / "model", family, sharded=True)
        return made[family]

    return folder
