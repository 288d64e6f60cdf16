"""The file of the live config: what can be wrong with it, and changes that fall into awkward moments."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from support.broken_json import BROKEN_JSON
from trimtab_engine.core.live import Ceilings, LiveConfig
from trimtab_engine.errors import ConfigError, EngineDead
from trimtab_engine.live_state import LiveState, Versioned
from trimtab_engine.server import live
from trimtab_engine.server.client import EngineClient
from trimtab_engine.server.lifecycle import Lifecycle

CEILINGS = Ceilings()


@pytest.mark.parametrize(
    "content",
    [*(text.encode() for text in BROKEN_JSON), b"", b"{", b"\xff", b'"x"', b"{}", b" " * (2 << 20)],
    ids=range(len(BROKEN_JSON) + 6),
)
def test_a_broken_file_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "live.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"live\.json"):
        live.read_live_file(path, CEILINGS)


def test_a_file_whose_number_leaves_no_room_is_an_error_that_names_number_and_range(tmp_path: Path) -> None:
    path = tmp_path / "live.json"
    write(path, 2**61 - 1)
    assert live.read_live_file(path, CEILINGS).generation == 2**61 - 1
    write(path, 2**61)
    with pytest.raises(ConfigError, match=r"live\.json: generation.*2\^61-1"):
        live.read_live_file(path, CEILINGS)


def write(path: Path, generation: int) -> None:
    document = {"generation": generation, "source": "Spec", "config": LiveConfig().to_json()}
    path.write_text(json.dumps(document))


def door(client: EngineClient, generation: int) -> live.LiveDoor:
    boot = LiveState(Versioned(generation, "Spec", LiveConfig()), CEILINGS, None).to_json(0.0)
    return live.LiveDoor(client, CEILINGS, boot, 0.0, lambda in_force: None)


def engine_client() -> EngineClient:
    """One whose engine is not started: what it is sent is never answered."""
    return EngineClient(
        model_name="m",
        lifecycle=Lifecycle(),
        max_queued_requests=1,
        stall_timeout_s=1.0,
        on_token=lambda record, token: None,
        on_step=lambda stats: None,
    )


@pytest.mark.parametrize(("generation", "taken"), [(8, True), (7, False)])
def test_a_file_that_was_replaced_since_the_start_values_were_read_is_taken(
    tmp_path: Path, generation: int, taken: bool
) -> None:
    path = tmp_path / "live.json"
    write(path, generation)

    async def main() -> object:
        watched = door(engine_client(), 7)
        task = asyncio.create_task(watched.watch(path))
        for _ in range(200):
            await asyncio.sleep(0.005)
            if watched.readback()["pending"] is not None:
                break
        pending = watched.readback()["pending"]
        task.cancel()
        return pending

    found = asyncio.run(main())
    assert (isinstance(found, dict) and found["generation"] == 8) if taken else found is None


def test_a_file_that_changes_while_the_engine_dies_is_reported_and_no_second_failure(
    tmp_path: Path,
) -> None:
    path = tmp_path / "live.json"
    write(path, 8)
    client = engine_client()
    client.death = EngineDead("the engine process was killed")
    watched = door(client, 7)

    async def main() -> bool:
        task = asyncio.create_task(watched.watch(path))
        for _ in range(400):
            await asyncio.sleep(0.005)
            if task.done() or watched.readback()["file_error"]:
                break
        done = task.done()
        task.cancel()
        return done

    assert not asyncio.run(main())
    assert "was killed" in str(watched.readback()["file_error"])
