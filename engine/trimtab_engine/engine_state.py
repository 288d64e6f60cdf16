"""What the engine process does with a message: the scheduler and the live state behind one `apply`.

Used by the engine loop (`runtime.loop`) between two steps and by the replay of step records (`step_record`), so that
both treat a message the same way. Pure apart from what it is given: no sockets, no torch, no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab_engine.core.live import LiveConfig
from trimtab_engine.core.request import FinishReason, Request
from trimtab_engine.errors import ConfigError, GenerationConflict, RequestError
from trimtab_engine.live_state import Versioned, check_generation, check_lease, check_source
from trimtab_engine.messages import Abort, Add, Applied, EndLease, Reconfigure, Token

if TYPE_CHECKING:
    from trimtab_engine.core.scheduler import Scheduler
    from trimtab_engine.live_state import LiveState


def request_from(add: Add) -> Request:
    """The scheduler's form of a new request."""
    return Request(
        id=add.id,
        token_ids=list(add.prompt_token_ids),
        num_prompt_tokens=len(add.prompt_token_ids),
        sampling=add.sampling,
        arrival_s=add.arrival_s,
        priority=add.priority,
        slo_class=add.slo_class,
        ttft_s=add.ttft_s,
        itl_s=add.itl_s,
        tenant=add.tenant,
        cache_salt=add.cache_salt,
        group=add.group,
    )


class EngineState:
    """Everything that messages change. `tokens` collects news of requests that ended outside a step."""

    def __init__(self, scheduler: Scheduler, live: LiveState, unix_offset_s: float) -> None:
        self.scheduler = scheduler
        self.live = live
        self.unix_offset_s = unix_offset_s
        self.tokens: list[Token] = []
        self._used = (live.in_force.generation, live.in_force.config)  # what the scheduler was built with

    def apply(self, message: Add | Abort | Reconfigure | EndLease, now: float) -> Applied | None:
        """Apply one message; the answer to send, if it has one. Raises nothing for what a message can get wrong."""
        match message:
            case Add():
                self._add(message)
            case Abort(ids=ids):
                for request_id in ids:
                    if self.scheduler.abort(request_id) is not None:
                        self.tokens.append(Token(request_id, None, FinishReason.ABORT.value))
            case Reconfigure():
                return self._reconfigure(message, now)
            case EndLease(sequence=sequence):
                if self.live.end_candidate():
                    self._use_in_force()
                return Applied(sequence, self.readback())
        return None

    def expire(self, now: float) -> Applied | None:
        """End a lease that has run out; the news of it, if it did."""
        if not self.live.expire(now):
            return None
        self._use_in_force()
        return Applied(None, self.readback())

    def readback(self) -> dict[str, object]:
        """`LiveState.to_json` with wall-clock times."""
        return self.live.to_json(self.unix_offset_s)

    def take_tokens(self) -> list[Token]:
        """News since the last call, of requests that ended outside a step."""
        tokens, self.tokens = self.tokens, []
        return tokens

    def _add(self, message: Add) -> None:
        try:
            self.scheduler.add(request_from(message))
        except RequestError as error:
            self.tokens.append(Token(message.id, None, FinishReason.ERROR.value, error=str(error)))

    def _reconfigure(self, message: Reconfigure, now: float) -> Applied:
        try:
            document = Versioned(
                check_generation(message.generation),
                check_source(message.source),
                LiveConfig.from_json(message.config, self.live.ceilings),
            )
            lease_s = check_lease(message.lease_s)
            self.live.expire(now)
            self.live.offer(document, lease_s, now)
        except ConfigError as error:
            return Applied(message.sequence, self.readback(), str(error), error.path)
        except GenerationConflict as error:
            return Applied(message.sequence, self.readback(), str(error), conflict=True)
        finally:
            self._use_in_force()
        return Applied(message.sequence, self.readback())

    def _use_in_force(self) -> None:
        in_force = self.live.in_force
        if (in_force.generation, in_force.config) != self._used:
            self.scheduler.reconfigure(in_force.config, in_force.generation)
            self._used = (in_force.generation, in_force.config)
