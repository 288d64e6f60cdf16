"""Which evaluator carries out a run: by spec.evaluator and spec.workload.type. Called by `worker`; knows no evaluator's work.

Only the chosen one is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

from trimtab_tuner.cluster.objects import Run
from trimtab_tuner.cluster.plan import Factory, Plan, Work
from trimtab_tuner.errors import InputError
from trimtab_tuner.guardrails import TRYING_MODES

#: (evaluator, workload) → module of `cluster` that has `async def make(work) -> Plan`.
MODULES = {
    ("Live", "Recorded"): "live",
    ("Live", "Trace"): "live",
    ("Simulator", "Recorded"): "simulated",
    ("Simulator", "Trace"): "simulated",
    ("Shadow", "Recorded"): "shadow",
    ("Shadow", "Trace"): "shadow",
}
#: Modes of a service in which a run may have a candidate in force on engines of its own.
_OWN_ENGINES = ("Recommend", *TRYING_MODES)


def modes(run: Run) -> tuple[str, ...]:
    """The service's modes in which candidates of this run may be in force."""
    return _OWN_ENGINES if run.evaluator == "Shadow" else TRYING_MODES


OBSERVING = ("Live", "Recorded")  # real traffic as it comes, in slices


async def make(work: Work) -> Plan:
    """The plan for this run. Raises InputError for a pair that nobody carries out."""
    chosen = (work.run.evaluator, work.run.workload)
    module = MODULES.get(chosen)
    if module is None:
        known = ", ".join(f"{evaluator} with {workload}" for evaluator, workload in MODULES)
        raise InputError("spec.evaluator", f"{chosen[0]} with workload {chosen[1]}", f"one of: {known}")
    if work.run.slice_s is not None and chosen != OBSERVING:
        raise InputError(
            "spec.workload.slice",
            f"{work.run.slice_s:g} s",
            f"left out: only {' with '.join(OBSERVING)} observes",
        )
    factory = cast("Factory", import_module(f"trimtab_tuner.cluster.{module}").make)
    return await factory(work)
