"""Runs of the tuner over simulated measurements with a known truth, on a real service's control port."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from support.study import make_reading
from trimtab_engine.core.live import LiveConfig
from trimtab_tuner import space
from trimtab_tuner.audit import Audit
from trimtab_tuner.evaluate import Measurement
from trimtab_tuner.guardrails import Limits
from trimtab_tuner.metrics.reading import Block, Unknown
from trimtab_tuner.run import Known, RunOptions, RunResult, TuningRun
from trimtab_tuner.study import Study
from trimtab_tuner.target import Target
from trimtab_tuner.trial import Trial

OFFLINE = Limits(min_requests=40, max_factor=None, cooldown_windows=0, error_budget_left=0.0)
Truth = Callable[[LiveConfig], float]
"""Probability that a request violates, by config."""


class Simulated:
    """An evaluator over a known truth: 12 blocks of 5 requests, violations clustered as stalls cluster them."""

    def __init__(self, truth: Truth, seed: int, incumbent: LiveConfig, *, same_requests: bool = True) -> None:
        self.same_requests = same_requests
        self.stop: Callable[[LiveConfig], bool] = lambda _: False
        self.blind: Callable[[LiveConfig], bool] = lambda _: False
        self.before_each: Callable[[Target, LiveConfig], Awaitable[object]] | None = None
        self.target: Target | None = None
        self.reading_changes: dict[str, Any] = {}
        self.seconds: Callable[[LiveConfig], float] | None = None  # of each block's hundred tokens
        self.engines: Callable[[LiveConfig], int] = lambda _: 1  # that run a config, each with as many tokens
        self.asked: list[LiveConfig | None] = []
        self.truth = truth
        self._rng = random.Random(seed)
        self._incumbent = incumbent

    async def evaluate(
        self,
        config: LiveConfig | None,
        *,
        baseline: Measurement | None,
        on_progress: Callable[[float], None],
    ) -> Measurement:
        """See `evaluate.Evaluator`."""
        if config is not None and self.before_each is not None and self.target is not None:
            await self.before_each(self.target, config)
        self.asked.append(config)
        used = config or self._incumbent
        risk = self.truth(used)
        blocks = tuple(
            Block(self._rng.choice((2, 3, 4, 5)) if self._rng.random() < risk else 0, 5) for _ in range(12)
        )
        reading = make_reading(n=60, violated_itl=sum(b.violated for b in blocks), **self.reading_changes)
        if self.seconds is not None:
            paced = [self.seconds(used) * self._rng.uniform(0.97, 1.03) for _ in blocks]
            blocks = tuple(
                dataclasses.replace(b, tokens=100.0, seconds=s) for b, s in zip(blocks, paced, strict=True)
            )
            count = self.engines(used)
            reading = dataclasses.replace(
                reading, generation_tokens=1200.0 * count, targets=count, end_s=sum(paced)
            )
        number = len(self.asked)
        if config is not None and self.blind(config):
            unknown = Unknown("no metrics")
            return Measurement("unknown", used, number, 0.0, 1.0, unknown, (), "no metrics")
        if config is not None and self.stop(config):
            return Measurement("stopped", used, number, 0.0, 1.0, reading, blocks[:3], "longest token gap")
        return Measurement("measured", used, number, 0.0, 1.0, reading, blocks)


class Silent:
    """A view that shows nothing."""

    def begin(self, what: str, trial: int, of: int) -> Callable[[float], None]:
        """Nothing."""
        return lambda _: None

    def end(self, trial: Trial) -> None:
        """Nothing."""

    def note(self, label: str, text: str) -> None:
        """Nothing."""


def cliff(config: LiveConfig) -> float:
    """Stalls in two blocks of three above 512 tokens, in none below."""
    return 0.67 if config.max_num_batched_tokens > 512 else 0.0


def tune(
    control_url: str,
    truth: Truth,
    *,
    seed: int = 0,
    limits: Limits = OFFLINE,
    audit: Audit | None = None,
    pause: Callable[[int], str | None] = lambda asked: None,
    prepare: Callable[[Simulated], None] = lambda _: None,
    same_requests: bool = True,
    bounds: dict[str, tuple[int, int]] | None = None,
    earlier: Sequence[Known] = (),
    begins: Callable[[str, LiveConfig | None], None] = lambda role, config: None,
    waited_s: Callable[[], float] = lambda: 0.0,
    now: Callable[[], float] = time.monotonic,
    **options: Any,
) -> tuple[RunResult, Simulated]:
    """One run on the service at `control_url`: real changes of its live config, simulated measurements."""

    async def main() -> tuple[RunResult, Simulated]:
        async with httpx.AsyncClient() as client:
            target = Target(client, control_url)
            readback = await target.read()
            incumbent = readback.incumbent.config
            evaluator = Simulated(truth, seed, incumbent, same_requests=same_requests)
            evaluator.target = target
            prepare(evaluator)

            async def paused() -> str | None:
                return pause(len(evaluator.asked))

            run = TuningRun(
                target=target,
                evaluator=evaluator,
                make_study=lambda knobs: Study(knobs, seed=seed),
                make_space=lambda config: space.build(config, readback.ceilings, bounds=bounds),
                limits=limits,
                options=RunOptions(**{"max_trials": 6, "seed": seed, **options}),
                audit=audit or Audit(),
                view=Silent(),
                paused=paused,
                earlier=earlier,
                begins=begins,
                waited_s=waited_s,
                now=now,
            )
            return await run.execute(), evaluator

    return asyncio.run(main())
