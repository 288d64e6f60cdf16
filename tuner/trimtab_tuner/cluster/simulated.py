"""Simulator runs in a cluster: what the engines recorded, or a trace, simulated under each candidate; no engine is touched.

Called by `evaluators`. Engines are asked once, at the beginning of a run: for their records, the step-time model that they fitted, and
what their scheduler goes by. Requests go to the replica that had them; those of a trace in turn, as a Service spreads them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import httpx

from trimtab_engine.core.live import LiveConfig
from trimtab_tuner import recorded
from trimtab_tuner import trace as traces
from trimtab_tuner.cluster import pods
from trimtab_tuner.cluster.plan import Plan, Work
from trimtab_tuner.cluster.pods import Pod
from trimtab_tuner.cluster.records import TIMEOUT_S, Records, Told
from trimtab_tuner.errors import InputError, ServerError
from trimtab_tuner.metrics.exposition import ExpositionError, Series, parse
from trimtab_tuner.metrics.names import TRIMTAB
from trimtab_tuner.recorded import EngineRecords
from trimtab_tuner.run import RunOptions
from trimtab_tuner.simulate.cost import StepModel, parse_step_model
from trimtab_tuner.simulate.evaluator import Traffic
from trimtab_tuner.simulate.search import LIMITS, Simulator, Unmeasured
from trimtab_tuner.simulate.simulate import Server

#: Of blocks, and of anything else that an engine tells: a simulation has memory for each block of the pool.
MOST = 10_000_000


async def make(work: Work) -> Plan:
    """The plan of a Simulator run. Raises ServerError when no engine can be asked, InputError for a trace that is none."""
    told = await _ask(work)
    made = plan(work, told)
    return dataclasses.replace(made, caveat=made.caveat and f"{made.caveat}{await _counted(work, told)}")


def plan(work: Work, told: Sequence[Told]) -> Plan:
    """What follows from what engines told. A run that can find out nothing has an evaluator that says why."""
    options = RunOptions(max_trials=work.run.max_trials + 2, time_limit_s=work.time_left_s)
    model = step_model(told)
    if model is None:
        return _nothing(
            work,
            options,
            "no engine has run enough steps yet to have a step-time model; send it traffic first",
        )
    traffic = _trace(work, len(told)) if work.run.workload == "Trace" else _recorded(work, told)
    least = 2 * LIMITS.min_requests
    if traffic is None or len(traffic.trace) < least:
        return _nothing(work, options, _too_little(work, traffic, least))
    simulator = Simulator(work.incumbent, traffic, model, server(work.service.name, work.incumbent, told))
    facts = simulator.facts()
    shown = ("trace", "requests", "span_s", "trace_changes", "replicas", "routing", "num_blocks")
    return Plan(
        simulator.chooser,
        LIMITS,
        options,
        touches_engines=False,
        confirmer=simulator.confirmer,
        doubt=simulator.doubt,
        caveat=simulator.caveat,
        facts={name: facts[name] for name in shown if facts[name]},
    )


def _too_little(work: Work, traffic: Traffic | None, least: int) -> str:
    """What there is, and what to do about it: a run that is over is not tried again."""
    there = f"no engine of {work.service.name} has recorded a request yet"
    if traffic is not None:
        there = f"{traffic.trace.source}: {len(traffic.trace)} requests"
    mend = "send it traffic first" if work.run.workload == "Recorded" else "name a longer trace"
    return f"{there}, at least {least} are needed (half to choose by, half to confirm); {mend}, then create another run"


def _nothing(work: Work, options: RunOptions, reason: str) -> Plan:
    return Plan(Unmeasured(work.incumbent, reason), LIMITS, options, touches_engines=False)


async def _ask(work: Work) -> tuple[Told, ...]:
    """Every engine that can be asked. Raises ServerError when there is none."""
    records = Records(work.client, work.tokens)
    ready = await pods.find(work.kube, work.namespace, work.service.name)
    readable = records.readable(ready)
    if not readable:
        names = ", ".join(pod.name for pod in ready)
        why = f"there is no read token for {names}" if ready else "none is ready"
        raise ServerError(f"no engine of {work.service.name} can be asked what it recorded: {why}")
    if len(readable) < len(ready):
        left_out = ", ".join(pod.name for pod in ready if pod not in readable)
        work.say("engines", f"{left_out} came after the run's start and is left out")
    return tuple(await asyncio.gather(*(records.ask(pod) for pod in readable)))


async def _counted(work: Work, told: Sequence[Told]) -> str:
    """What the engines themselves counted under the incumbent, to hold the simulated incumbent against; empty when it cannot be read."""

    async def one(pod: Pod) -> Series:
        return parse((await work.client.get(pod.metrics_url, timeout=TIMEOUT_S)).raise_for_status().text)

    try:
        violated, judged = counted(await asyncio.gather(*(one(each.pod) for each in told)))
    except (httpx.HTTPError, ExpositionError) as error:
        work.say("engines", f"what they counted is not known: {type(error).__name__}: {error}")
        return ""
    return (
        f"; real engines counted {violated} targets missed in {judged} requests under what is in force"
        if judged
        else ""
    )


def counted(exported: Sequence[Series]) -> tuple[int, int]:
    """(violated verdicts, requests judged) under the generation in force, over engines."""
    assert TRIMTAB.slo_requests is not None, "ours has it"
    assert TRIMTAB.generation is not None, "ours has it"
    violated = judged = 0.0
    for series in exported:
        in_force = {f"{value:.0f}" for value in series.get(TRIMTAB.generation, {}).values()}
        for labels, value in series.get(TRIMTAB.slo_requests, {}).items():
            said = dict(labels)
            if said.get("generation") in in_force and math.isfinite(value):
                violated += value if said.get("outcome") == "violated" else 0
                judged += value if said.get("slo") == "ttft" else 0
    return round(violated), round(judged)


def _recorded(work: Work, told: Sequence[Told]) -> Traffic | None:
    engines = [EngineRecords(each.pod.name, each.records, each.block_size, each.dropped) for each in told]
    found = recorded.merge(work.service.name, engines)
    if found is None:
        return None
    return Traffic(found.trace, len(told), placement=found.placement)


def _trace(work: Work, replicas: int) -> Traffic:
    if work.trace is None:
        raise InputError("--trace", None, "the mounted trace of spec.workload.traceRef")
    return Traffic(traces.load(work.trace), replicas, routing="round-robin")


def step_model(told: Sequence[Told]) -> StepModel | None:
    """The model that was fitted to the most undisturbed steps; None when no engine has one. Raises InputError."""
    found = [
        parse_step_model({"model": each.model, "score": each.score}, f"{each.pod.name}: step-model", f"engine {each.pod.name}")
        for each in told
        if each.model is not None
    ]  # fmt: skip
    return max(found, key=lambda each: each.num_steps or 0, default=None)


def server(service: str, incumbent: LiveConfig, told: Sequence[Told]) -> Server:
    """One engine of the service, as the engines say; with different pools the smallest. Raises ServerError."""
    facts = min((each.info for each in told), key=lambda info: _number(info, "num_blocks"))
    # An engine of the version before does not tell its flags.
    return Server(
        service,
        incumbent,
        num_blocks=_number(facts, "num_blocks"),
        block_size=_number(facts, "block_size"),
        max_model_len=_number(facts, "max_model_len"),
        enable_prefix_caching=facts.get("enable_prefix_caching") is not False,
        prefill_first=facts.get("prefill_first") is True,
        shed_late=facts.get("shed_late") is True,
        fair_tenants=facts.get("fair_tenants") is True,
        num_swap_blocks=_number(facts, "num_swap_blocks", least=0, default=0),
        swap_block_s=_seconds(facts, "swap_block_s"),
    )


def _number(facts: dict[str, Any], name: str, *, least: int = 1, default: int | None = None) -> int:
    value = facts.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
        raise ServerError(f"/admin/info: {name}: {value!r:.80} is no whole number from {least} to {MOST}")
    return value


def _seconds(facts: dict[str, Any], name: str) -> float:
    value = facts.get(name) or 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST:
        raise ServerError(f"/admin/info: {name}: {value!r:.80} is no time in seconds")
    return float(value)
