"""The real scheduler and the real runner in one process and one thread, for tests of what a model says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from trimtab_engine.core.live import LiveConfig
from trimtab_engine.core.request import FinishReason, Request, SamplingParams
from trimtab_engine.core.scheduler import Scheduler
from trimtab_engine.core.step import TokenEvent
from trimtab_engine.runtime.runner import Runner


@dataclass(slots=True)
class Generated:
    """What became of one request."""

    token_ids: list[int]
    finish_reason: FinishReason | None
    num_cached: int
    num_preemptions: int
    error: str | None
    events: list[TokenEvent] = field(default_factory=list)


class Engine:
    """One scheduler over one runner. `num_blocks` below the runner's pool makes memory short on purpose."""

    def __init__(
        self,
        runner: Runner,
        *,
        budget: int = 2048,
        max_num_seqs: int = 64,
        num_blocks: int | None = None,
        enable_prefix_caching: bool = True,
        prefill_first: bool = False,
        policy: str = "fcfs",
        num_swap_blocks: int = 0,
    ) -> None:
        self.runner = runner
        self.live = LiveConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=min(max_num_seqs, budget),
            scheduling_policy=policy,
        )
        self.scheduler = Scheduler(
            num_blocks=num_blocks or runner.info.num_blocks,
            block_size=runner.info.block_size,
            max_model_len=runner.info.max_model_len,
            live=self.live,
            generation=1,
            enable_prefix_caching=enable_prefix_caching,
            prefill_first=prefill_first,
            eos_token_ids=runner.info.eos_token_ids,
            num_swap_blocks=num_swap_blocks,
        )
        self._clock = 0.0
        self._count = 0

    def generate(
        self,
        prompts: list[list[int]],
        sampling: SamplingParams | list[SamplingParams],
        before_step: Callable[[float], None] | None = None,
    ) -> list[Generated]:
        """Run all prompts together to their ends; results in the order of the prompts.

        `before_step` is called with the time of each step before it is planned.
        """
        params = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        requests = []
        for prompt, one in zip(prompts, params, strict=True):
            request = Request(f"r{self._count}", list(prompt), len(prompt), one, self._clock)
            self._count += 1
            self.scheduler.add(request)
            requests.append(request)
        events: dict[str, list[TokenEvent]] = {request.id: [] for request in requests}
        while self.scheduler.has_work:
            self._clock += 0.01
            if before_step is not None:
                before_step(self._clock)
            step = self.scheduler.schedule(self._clock)
            done = self.scheduler.commit(step, self.runner.run(step), self._clock) if step else []
            for event in [*done, *self.scheduler.drain_events()]:
                events[event.request.id].append(event)
        self.scheduler.check_integrity()
        return [
            Generated(
                request.token_ids[request.num_prompt_tokens :],
                request.finish_reason,
                request.num_cached or 0,
                request.num_preemptions,
                request.error,
                events[request.id],
            )
            for request in requests
        ]
