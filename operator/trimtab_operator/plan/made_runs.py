"""TuningRuns that a schedule or a drift makes rather than a person: by which evaluator, and how many finished ones are kept. Pure.

They carry a label that says where they come from, and go with their service. Used by `plan.nightly`, `plan.tuning_drift` and
`plan.cluster`.
"""

from __future__ import annotations

from collections.abc import Iterable

from trimtab_operator import names
from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.plan.runs import FINISHED, created_s

NIGHTLY, DRIFT = "nightly", "drift"


def evaluator(service: InferenceService) -> str:
    """Live where candidates may be tried on engines; else nothing is touched."""
    return "Live" if service.spec.tuning.mode in ("Canary", "Apply") else "Simulator"


def origin(run: TuningRun) -> str | None:
    """What made the run; None: a person."""
    found = run.metadata.labels.get(names.LABEL_ORIGIN)
    return found if found in (NIGHTLY, DRIFT) else None


def superfluous(runs: Iterable[TuningRun], limit: int) -> tuple[TuningRun, ...]:
    """Finished runs beyond the newest `limit` of each origin. A person's runs are never among them."""
    finished = sorted(
        (run for run in runs if run.status.phase in FINISHED and not run.deleting),
        key=lambda run: (created_s(run), run.name),
        reverse=True,
    )
    return tuple(
        run for made_by in (NIGHTLY, DRIFT) for run in [r for r in finished if origin(r) == made_by][limit:]
    )
