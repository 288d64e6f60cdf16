"""Builders for tests of the simulator: small traces, a step-time model that is easy to compute by hand, a small server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab_engine.core.live import LiveConfig
from trimtab_engine.core.step_time import KNOTS, TERMS, StepTimeModel
from trimtab_tuner.simulate.simulate import Server, Simulation, simulate
from trimtab_tuner.slo import Slo
from trimtab_tuner.trace import Trace, TraceRequest

SLO = Slo(1.0, 0.1)


def step_time(base: float = 1.0, tokens: float = 0.0, **terms: float) -> StepTimeModel:
    """`base` and `tokens` for each token after the first, and the given terms (`core.step_time.TERMS`); others cost nothing."""
    given = {"base": base, **{f"tokens_from_{knot}": tokens for knot in KNOTS[:-1]}, **terms}
    assert set(given) <= set(TERMS)
    return StepTimeModel(tuple(given.get(name, 0.0) for name in TERMS))


def trace_of(
    *requests: tuple[float, int, int], prefixes: Sequence[tuple[int, ...]] | None = None, block: int = 16
) -> Trace:
    """(arrival_s, prompt_tokens, output_tokens) each; `prefixes` are the prefix block ids of each prompt."""
    made = tuple(
        TraceRequest(*each, prefix_block_ids=None if prefixes is None else prefixes[number])
        for number, each in enumerate(requests)
    )
    return Trace(made, "made here", "records", None if prefixes is None else block)


def server(
    budget: int = 64, seqs: int = 8, policy: str = "fcfs", num_blocks: int = 1000, **other: Any
) -> Server:
    """A small server; `other` are fields of `Server`."""
    live = LiveConfig(max_num_batched_tokens=budget, max_num_seqs=seqs, scheduling_policy=policy)
    return Server("made here", live, num_blocks=num_blocks, **other)


def run(trace: Trace, cost: Any = None, on: Server | None = None, **other: Any) -> Simulation:
    """Simulate with defaults that suit small traces."""
    return simulate(
        trace, step_time() if cost is None else cost, server() if on is None else on, slo=SLO, **other
    )


def token_times(simulation: Simulation) -> list[list[float]]:
    """When each request's tokens came, in trace order."""
    return [request.token_times_s for request in simulation.result.requests]
