"""Quiet times of a local service by the clock alone: nothing has to happen for one to begin or to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.services import BUDGET_PARAMETER, service
from trimtab_operator.local.backends import Backends
from trimtab_operator.local.contract import RuntimeContract
from trimtab_operator.local.control import ControlError
from trimtab_operator.local.service import LocalService
from trimtab_operator.local.state_dir import StateDir
from trimtab_operator.local.watch import FileWatch
from trimtab_operator.plan.live import recommend, spec_config
from trimtab_operator.plan.pods import unix


class Clock:
    """What `time.time` of the service's modules says."""

    now = 0.0

    def set(self, text: str) -> None:
        self.now = unix(text)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", lambda: clock.now)
    clock.set("2026-11-30T07:00:00Z")
    return clock


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDir]:
    folder = StateDir(tmp_path / "state")
    yield folder
    folder.close()


def made(state: StateDir, **changes: Any) -> LocalService:
    """A service without replicas, quiet from 08:00 to 10:00 UTC."""
    spec = service(
        **{
            "tuning.mode": "Apply",
            "tuning.parameters": [BUDGET_PARAMETER],
            "tuning.limits.notDuring": [{"schedule": "0 8 * * *", "duration": "2h"}],
            **changes,
        }
    )
    built = LocalService(
        spec, FileWatch(state.folder / "none"), state, Backends(), httpx.AsyncClient(), "", ""
    )
    built.decide_live()
    return built


def on_trial(local: LocalService) -> bool:
    return local.live.live.candidate is not None


def test_a_candidate_ends_when_a_quiet_time_begins(clock: Clock, state: StateDir) -> None:
    local = made(state)
    config = {**spec_config(local.resource.spec), "max_num_batched_tokens": 64}
    local.live.live.offer(None, "Recommendation", config, 120.0, clock.now)
    clock.set("2026-11-30T07:59:59Z")
    local.keep_quiet()
    assert on_trial(local)
    clock.set("2026-11-30T08:00:00Z")
    local.keep_quiet()
    assert not on_trial(local)
    assert "until 2026-11-30T10:00:00Z" in local.events.last(1)[0].message


def test_a_lease_is_no_longer_than_to_the_next_quiet_time(clock: Clock, state: StateDir) -> None:
    local = made(state)
    asked: list[float] = []

    async def tried(
        generation: object, source: object, config: object, lease_s: float, targets: object
    ) -> None:
        asked.append(lease_s)
        raise ControlError(503, "no replica")

    local.live.try_candidate = tried  # type: ignore[method-assign,assignment]  # the outer rim: no engine here
    config = {**spec_config(local.resource.spec), "max_num_batched_tokens": 64}
    for moment, want in (("2026-11-30T07:00:00Z", 60.0), ("2026-11-30T07:59:50Z", 10.0)):
        clock.set(moment)
        with pytest.raises(ControlError, match="no replica"):
            asyncio.run(RuntimeContract(local).put_live({"config": config, "lease_s": 60}))
        assert asked.pop() == want
    clock.set("2026-11-30T08:00:00Z")
    with pytest.raises(ControlError, match=r"until 2026-11-30T10:00:00Z"):
        asyncio.run(RuntimeContract(local).put_live({"config": config, "lease_s": 60}))
    assert asked == []


def test_a_recommendation_that_waits_outlives_a_restart_and_is_taken_at_the_end(
    clock: Clock, state: StateDir
) -> None:
    clock.set("2026-11-30T08:30:00Z")
    before = made(state)
    before.hold_recommendation(recommend(before.resource.spec, {"max_num_batched_tokens": 128}))
    local = made(state)
    local.keep_quiet()
    assert local.live.live.incumbent is not None
    assert local.live.live.incumbent.config["max_num_batched_tokens"] == 2048
    clock.set("2026-11-30T10:00:00Z")
    local.keep_quiet()
    assert local.live.live.incumbent.config["max_num_batched_tokens"] == 128
    assert local.waiting is None
    assert made(state).waiting is None


def test_what_waits_is_not_taken_while_a_person_has_paused_tuning(clock: Clock, state: StateDir) -> None:
    local = made(state, **{"tuning.limits.notDuring": []})
    local.hold_recommendation(recommend(local.resource.spec, {"max_num_batched_tokens": 128}))
    annotations = local.resource.metadata.annotations
    assert isinstance(annotations, dict)
    annotations["serving.trimtab.dev/tuning"] = "paused"
    local.keep_quiet()
    assert local.waiting is not None
    annotations["serving.trimtab.dev/tuning"] = "active"
    local.keep_quiet()
    assert local.live.live.incumbent is not None
    assert local.live.live.incumbent.config["max_num_batched_tokens"] == 128
