"""Runners on tiny models, built once per session."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.tiny_models import save_tiny_model
from trimtab_engine.config import EngineConfig
from trimtab_engine.runtime.runner import Runner


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama without end tokens, so that every request runs to its limit."""
    return save_tiny_model(tmp_path_factory.mktemp("llama") / "model", "llama", eos_token_id=None)


@pytest.fixture(scope="session")
def runner_of(llama_folder: Path) -> Callable[[bool], Runner]:
    """batch_invariant → a runner on the tiny Llama with 64 blocks of 8 tokens and room to swap 40. Steps leave KV only, so it is shared."""
    made: dict[bool, Runner] = {}

    def runner(batch_invariant: bool) -> Runner:
        if batch_invariant not in made:
            config = EngineConfig(
                model=str(llama_folder),
                device="cpu",
                block_size=8,
                kv_cache_bytes=65 * 8 * 2 * 3 * 2 * 8 * 4,
                swap_bytes=40 * 8 * 2 * 3 * 2 * 8 * 4,
                batch_invariant=batch_invariant,
                num_threads=1,
            )
            made[batch_invariant] = Runner(config)
        return made[batch_invariant]

    return runner
