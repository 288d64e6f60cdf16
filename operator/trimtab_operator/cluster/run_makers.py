"""Carries out what makes TuningRuns without a person: a schedule's objects, a drift's run; and deletes finished runs of both.

Nothing that goes wrong here holds a service up: it is answered, for condition TuningReady or DriftDetected. Used by `reconcile`;
the rules are `plan.nightly`, `plan.tuning_drift` and `plan.made_runs`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trimtab_operator import names
from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.cluster import kinds
from trimtab_operator.cluster.kube import Conflict, Denied, Kube, NamespaceGoing, Refused
from trimtab_operator.plan import children, nightly, tuning_drift

logger = logging.getLogger(__name__)

Json = dict[str, Any]
Apply = Callable[[Json], None]
Delete = Callable[[Mapping[str, Any]], None]


class RunMakers:
    """See the module. Every method raises KubeError when the API server cannot be used."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    def schedule(
        self, service: InferenceService, changes: children.Changes, apply: Apply, delete: Delete
    ) -> nightly.Problem | None:
        """Make what there is of a schedule so → what went wrong, None when nothing did."""
        problem: nightly.Problem | None = None
        for manifest in changes.apply:
            try:
                apply(manifest)
            except NamespaceGoing:
                raise
            except Refused as error:
                problem = nightly.refused(service, error.message, error.causes)
            except Denied as error:
                problem = nightly.Problem(names.API_DENIED, str(error))
        for live in changes.delete:
            try:
                delete(live)
            except Denied as error:
                problem = nightly.Problem(names.API_DENIED, str(error))
        return problem

    def drift_run(self, found: tuning_drift.DriftVerdict | None) -> tuning_drift.DriftVerdict | None:
        """Create the run that is due, if one is → how it stands then."""
        if found is None or found.create is None:
            return found
        metadata = found.create["metadata"]
        try:
            self._kube.create(found.create)
        except Conflict:
            return found  # an operator before us made the same
        except NamespaceGoing:
            raise
        except Refused as error:
            return tuning_drift.failed(found, names.INVALID_SPEC, str(error))
        except Denied as error:
            return tuning_drift.failed(found, names.API_DENIED, str(error))
        logger.info("made a run", extra={"run": f"{metadata['namespace']}/{metadata['name']}"})
        return found

    def forget_runs(self, superfluous: Iterable[TuningRun]) -> None:
        """Delete finished runs beyond those that are kept."""
        for run in superfluous:
            try:
                self._kube.delete(kinds.RUN, run.metadata.namespace, run.name, run.uid)
            except (Conflict, Denied) as error:
                # Another run under that name by now; or rights older than this operator: no harm but a longer list.
                logger.warning("a finished run is kept", extra={"run": run.name, "error": str(error)})
