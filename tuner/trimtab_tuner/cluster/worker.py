"""The life of a worker: read the run and its service, measure, write what came of it into the run's status.

Called by `commands.work`. Ends with 0 when a result is in the status, or when there is nothing left to do; raises what keeps it
from a result, and its Job then starts another one, which goes on with the trials that the status has.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from trimtab_engine.core.live import POLICIES, LiveConfig
from trimtab_tuner import space
from trimtab_tuner.audit import Audit
from trimtab_tuner.cluster import evaluators, objects, results
from trimtab_tuner.cluster.kube import RUN, SERVICE, Kind, Kube, KubeError, NotFound, Unavailable
from trimtab_tuner.cluster.notebook import Json, Notebook, RunEnded, RunGone, TrialRow
from trimtab_tuner.cluster.objects import FIELDS, Parameter, Run, Service
from trimtab_tuner.cluster.plan import Engines, Plan, Work
from trimtab_tuner.cluster.run_target import AWAY_S, RunTarget, ServiceGone
from trimtab_tuner.cluster.work_view import WorkView
from trimtab_tuner.errors import InputError
from trimtab_tuner.guardrails import Limits
from trimtab_tuner.run import Known, TuningRun, View
from trimtab_tuner.study import Study

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 2.0  # while something forbids a candidate
FAREWELL_S = 15.0  # to give a candidate back on SIGTERM
TAKEN_S = 60.0  # the operator may take so long to promote a result
MARGIN_S, MARGIN_SHARE = (
    5.0,
    0.02,
)  # of the time limit, so that the result is there before the operator stops the run


@dataclass(frozen=True, slots=True)
class Orders:
    """What a worker is started with."""

    namespace: str
    run: str
    prometheus: str | None = None
    trace: Path | None = None
    url: str | None = None
    tokens: Mapping[str, str] = field(default_factory=dict)
    api_key: str | None = None
    engines: Engines | None = None


async def work(kube: Kube, orders: Orders, log: View) -> str:
    """The whole life → one line on how it ended. Raises TunerError when the run has no result."""
    try:
        run = objects.run_of(await _patiently(kube, RUN, orders.namespace, orders.run))
    except NotFound:
        return f"there is no TuningRun {orders.run}"
    if run.deleting or run.over or run.verdict is not None:
        return f"TuningRun {run.name} is over already"
    notebook = Notebook.resume(kube, orders.namespace, run)
    try:
        return await _tune(kube, orders, run, notebook, log)
    except RunEnded as ended:
        return str(ended)
    except (InputError, ServiceGone) as error:
        # Another worker would find the same: this is the run's result.
        notebook.candidate, notebook.result = None, results.failure(str(error))
        with contextlib.suppress(RunGone):
            await notebook.write_patiently(AWAY_S)
        return f"Failed: {error}"
    finally:
        if notebook.candidate is not None:
            notebook.candidate = None
            with contextlib.suppress(KubeError, RunEnded, TimeoutError):
                await asyncio.wait_for(notebook.write(), FAREWELL_S)


async def _tune(kube: Kube, orders: Orders, run: Run, notebook: Notebook, log: View) -> str:
    try:
        service = objects.service_of(await _patiently(kube, SERVICE, orders.namespace, run.service))
    except NotFound:
        raise ServiceGone(f"there is no InferenceService {run.service}") from None
    target = RunTarget(kube, orders.namespace, service, notebook, evaluators.modes(run))
    await notebook.write_patiently(AWAY_S)  # what an earlier worker left in force, or running, is over
    incumbent = (await target.read()).incumbent.config
    view = WorkView(notebook, target, log)
    started_s = time.time() if run.started_s is None else run.started_s
    margin_s = max(MARGIN_S, MARGIN_SHARE * run.time_limit_s)
    left_s = started_s + run.time_limit_s - time.time() - margin_s
    # No connection is kept: one to a pod that is replaced must not be found dead by the next request.
    async with httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0)) as client:
        plan = await evaluators.make(
            Work(
                namespace=orders.namespace,
                run=run,
                service=service,
                incumbent=incumbent,
                kube=kube,
                client=client,
                target=target,
                paused=target.forbidden,
                time_left_s=left_s,
                prometheus=orders.prometheus,
                trace=orders.trace,
                url=orders.url,
                tokens=orders.tokens,
                api_key=orders.api_key,
                engines=orders.engines,
                say=view.note,
            )
        )
        log.note("run", ", ".join(f"{name} {value}" for name, value in _facts(run, service, plan).items()))
        tuning = TuningRun(
            target=target,
            evaluator=plan.evaluator,
            make_study=lambda knobs: Study(knobs, seed=zlib.crc32(run.uid.encode())),
            make_space=_space(objects.allowed(service, run), service),
            limits=owners(plan.limits, service),
            options=plan.options,
            audit=Audit(),
            view=view,
            paused=_permission(target, plan, view, time.monotonic() + left_s),
            begins=view.begins,
            waited_s=lambda: target.waited_s + plan.waited_s(),
            confirmer=plan.confirmer,
            doubt=plan.doubt,
            caveat=plan.caveat,
            earlier=[known(row, incumbent) for row in notebook.trials],
        )
        async with _writing(notebook, view):
            found = await tuning.execute()
    verdict = results.VERDICTS[found.outcome]
    if verdict == "Recommended" and plan.touches_engines and (await target.service()).mode == "Apply":
        verdict = "Applied"
    notebook.candidate, notebook.result = None, results.result(found, verdict, view.arms)
    await notebook.write_patiently(AWAY_S)
    if verdict == "Applied" and (why := await _not_taken(target, run.name)):
        verdict = "Recommended"
        notebook.result = results.result(found, verdict, view.arms, why)
        await notebook.write_patiently(AWAY_S)
    return f"{verdict}: {found.reason}"


def owners(limits: Limits, service: Service) -> Limits:
    """With what the service's owner allows: spec.tuning.limits.maxThroughputLoss."""
    return dataclasses.replace(limits, max_throughput_loss=service.max_throughput_loss)


def known(row: TrialRow, incumbent: LiveConfig) -> Known:
    """A trial of an earlier worker, as a run takes it. One whose config no longer makes sense counts, and says nothing."""
    values = {FIELDS[wire]: value for wire, value in row.config.items() if wire in FIELDS}
    complete = row.state == "Complete" and bool(row.requests) and row.violated is not None
    if not complete or row.violated is None or row.requests is None or not 0 <= row.violated <= row.requests:
        return Known(incumbent, None, complete=False)
    return Known(dataclasses.replace(incumbent, **values), row.violated / row.requests, complete=True)


def _space(
    parameters: tuple[Parameter, ...], service: Service
) -> Callable[[LiveConfig], tuple[space.Knob, ...]]:
    """The search space within what owner and run allow. Raises InputError when it has a single point."""
    policies = next((p.choices for p in parameters if p.choices), POLICIES)

    def build(start: LiveConfig) -> tuple[space.Knob, ...]:
        try:
            return space.build(
                start,
                service.ceilings,
                knobs=tuple(p.name for p in parameters),
                bounds={p.name: p.bounds for p in parameters if p.bounds is not None},
                policies=policies,
            )
        except InputError as error:
            raise InputError("spec.parameters", None, f"{error} (spec.tuning.parameters of the service count too)") from None  # fmt: skip

    return build


def _permission(
    target: RunTarget, plan: Plan, view: WorkView, give_up_s: float
) -> Callable[[], Awaitable[str | None]]:
    """Asked before each measurement: waits while a person or a quiet time holds tuning, and says why when that lasts, or is for good."""

    async def ask() -> str | None:
        said = None
        while True:
            if not plan.touches_engines:
                await target.run()  # whether anybody still wants to know
                return None
            # Of now: by an answer from before a pause the next candidates would be refused, one after the other.
            why = await target.forbidden(max_age_s=0.0)
            if why is None or not target.halted or time.monotonic() >= give_up_s:
                return why
            if why != said:
                said = why
                view.note("waiting", why)
            await asyncio.sleep(LOOK_AGAIN_S)

    return ask


@contextlib.asynccontextmanager
async def _writing(notebook: Notebook, view: WorkView) -> AsyncIterator[None]:
    """Rows of trials are written as they change, while a run goes on."""

    async def write() -> None:
        while True:
            await view.changed.wait()
            view.changed.clear()
            try:
                await notebook.write_patiently(AWAY_S)
            except (KubeError, RunEnded) as error:
                # Whoever puts the next candidate in force meets the same and knows what to do about it.
                logger.warning("the trials were not written: %s", error)

    task = asyncio.create_task(write())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _not_taken(target: RunTarget, run: str) -> str | None:
    """Waits until the operator has taken an Applied result → why it did not promote it, or None. A result that waits (tuning
    is halted) is taken later, without a worker."""
    give_up = time.monotonic() + TAKEN_S
    while time.monotonic() < give_up:
        try:
            if (await target.service()).recommendation_run == run:
                return None
            if (await target.run()).over:
                # Both are written by one look of the operator's, the service first.
                taken = (await target.service()).recommendation_run == run
                return (
                    None
                    if taken
                    else "the operator did not promote it: the service's bounds or mode have changed"
                )
        except Unavailable:
            pass
        await asyncio.sleep(LOOK_AGAIN_S / 4)
    return None


async def _patiently(kube: Kube, kind: Kind, namespace: str, name: str) -> Json:
    give_up = time.monotonic() + AWAY_S
    while True:
        try:
            return await kube.get(kind, namespace, name)
        except Unavailable:
            if time.monotonic() >= give_up:
                raise
            await asyncio.sleep(1.0)


def _facts(run: Run, service: Service, plan: Plan) -> dict[str, object]:
    return {"service": service.name, "mode": service.mode, "evaluator": run.evaluator, "candidates": run.max_trials, **plan.facts}  # fmt: skip
