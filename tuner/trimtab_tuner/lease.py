"""Holds a candidate in force while it is measured: renews its lease, notices when it is lost, and always ends it.

Used by the evaluator as `async with Lease(...)`. Leaving it, by success, error or Ctrl-C alike, reverts to the incumbent;
should even that fail, or this process die, the engine ends the lease by itself within `lease_s`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from types import TracebackType

from trimtab_engine.core.live import LiveConfig
from trimtab_tuner.errors import ServerError
from trimtab_tuner.target import ServiceTarget, TargetUnreachable

logger = logging.getLogger(__name__)


class Lease:
    """A candidate in force from `move` until the block is left."""

    def __init__(self, target: ServiceTarget, *, lease_s: float) -> None:
        self._target = target
        self._lease_s = lease_s
        self._config: LiveConfig | None = None
        self._task: asyncio.Task[None] | None = None
        self.generation: int | None = None
        self.lost: str | None = None  # why the lease could not be kept

    async def __aenter__(self) -> Lease:
        return self

    async def move(self, config: LiveConfig) -> int:
        """Put `config` in force in place of what this lease held before → its generation."""
        await self._stop_renewing()
        self._config, self.lost = config, None
        self.generation = await self._target.put_candidate(config, lease_s=self._lease_s)
        self._task = asyncio.create_task(self._renew(config, self.generation))
        return self.generation

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop_renewing()
        if self._config is None:
            return
        try:
            # Shielded: a second Ctrl-C must not stop the revert that the first one began.
            await asyncio.shield(self._target.end_candidate())
        except ServerError as failure:
            logger.warning(
                "the candidate could not be ended; the engine ends its lease by itself: %s", failure
            )

    async def _stop_renewing(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _renew(self, config: LiveConfig, generation: int) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._lease_s
        while True:
            await asyncio.sleep(min(self._lease_s / 3, max(0.1, (until - loop.time()) / 2)))
            sent = loop.time()
            try:
                await self._target.put_candidate(config, lease_s=self._lease_s, generation=generation)
            except TargetUnreachable as failure:
                if loop.time() >= until:
                    self.lost = f"the lease could not be renewed: {failure}"
                    return
            except ServerError as failure:
                self.lost = f"the lease was refused: {failure}"
                return
            else:
                until = sent + self._lease_s
