"""Reads, makes and ends the workers of tuning runs at the API server.

Used by `observe` (what there is) and `reconcile` (what to do about it). A worker's objects are asked for when they matter and not watched;
its pods are, with those of the service. Each object has one name for a run, so that whoever makes it, and however often the
operator dies meanwhile, there is one; the Secret, which may not be read, gets another name where its own is taken. What somebody
else holds is never touched.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trimtab_operator import names
from trimtab_operator.api import InferenceService, TuningRun
from trimtab_operator.cluster import kinds
from trimtab_operator.cluster.kube import Conflict, Denied, Kube, NamespaceGoing, Refused
from trimtab_operator.plan import pods, worker_job, workers
from trimtab_operator.plan.shadow import Engines
from trimtab_operator.plan.tuner_pod import Tuner
from trimtab_operator.plan.workers import Obstacle, Worker

Json = dict[str, Any]


class WorkerObjects:
    """See the module."""

    def __init__(self, kube: Kube, now: Callable[[], float] = time.time) -> None:
        self._kube = kube
        self._now = now

    def read(self, run: TuningRun, found: Iterable[Json], complaints: Mapping[str, str]) -> Worker:
        """The run's worker. `found`: pods of workers; `complaints` by pod name: what kubelets say of volumes."""
        job = self._kube.get(kinds.JOB, run.metadata.namespace, names.worker(run.name))
        mine = tuple(pod for pod in found if workers.run_of(pod) == run.name)
        said = next(
            (complaints[name] for pod in mine if (name := pod["metadata"]["name"]) in complaints), None
        )
        if said is None and job is not None and all(map(pods.over, mine)) and not workers.finished(job):
            said = self._of_job(job, mine)
        return Worker(job, mine, said)

    def pods(self, namespace: str, service: str) -> list[Json]:
        """Pods of all workers of a service's runs, as they are now."""
        labels = {names.LABEL_SERVICE: service, names.LABEL_COMPONENT: names.WORKER_COMPONENT}
        return [pod for pod in self._kube.list(kinds.POD, namespace, labels) if workers.is_worker(pod)]

    def make(
        self,
        service: InferenceService,
        run: TuningRun,
        tuner: Tuner,
        tokens: Mapping[str, str],
        engines: Engines | None = None,
        address: str | None = None,
    ) -> Json | Obstacle:
        """Make what is missing → the Job, or why there is none. `tokens` by the UID of an engine's pod; `engines` of a Shadow run."""
        try:
            for manifest in worker_job.access(service, run):
                problem = self._ensure(run, manifest)
                if problem is not None:
                    return problem
            began = run.status.start_time
            left_s = run.spec.time_limit_s - (0.0 if began is None else self._now() - pods.unix(began))

            def job(secret: str | None = None) -> Json:
                return worker_job.job(service, run, tuner, left_s, secret, engines, address)

            # While no Job may be made (a quota), each try would leave a Secret that nobody can find again.
            self._kube.create(job(), dry_run=True)
            return self._kube.create(job(self._tokens(run, tokens)))
        except Conflict:
            return Obstacle("Pending", "somebody made its worker at the same time")
        except NamespaceGoing as error:
            return Obstacle(names.API_DENIED, error.message)
        except Denied as error:
            return Obstacle(names.API_DENIED, f"its worker is not made: {error}", stalled=True)
        except Refused as error:
            return Obstacle(names.INVALID_SPEC, f"its worker is not made: {error}", stalled=True)

    def end(self, run: TuningRun) -> None:
        """Delete the run's Job, and with it its pods; its log goes with them."""
        namespace = run.metadata.namespace
        job = self._kube.get(kinds.JOB, namespace, names.worker(run.name))
        if job is None or workers.ownership(run, job) != "ours":
            return
        if not workers.finished(job) and not job["metadata"].get("deletionTimestamp"):
            self._kube.delete(kinds.JOB, namespace, job["metadata"]["name"], job["metadata"]["uid"])

    def _ensure(self, run: TuningRun, manifest: Json) -> Obstacle | None:
        """One object of the run; why it cannot be had."""
        metadata = manifest["metadata"]
        live = self._kube.get(kinds.BY_NAME[manifest["kind"]], metadata["namespace"], metadata["name"])
        if live is None:
            self._kube.create(manifest)
            return None
        whose = workers.ownership(run, live)
        if whose == "former":
            return Obstacle("Pending", "what belonged to a former run of that name is on its way out")
        return workers.taken({**live, "kind": manifest["kind"]}) if whose == "foreign" else None

    def _tokens(self, run: TuningRun, tokens: Mapping[str, str]) -> str:
        """Make the Secret → its name. One that exists may hold anything, and tokens that are old by now."""
        name = names.worker(run.name)
        try:
            self._kube.create(worker_job.tokens(run, tokens))
        except Conflict:
            name = f"{name}-{os.urandom(4).hex()}"
            self._kube.create(worker_job.tokens(run, tokens, name))
        return name

    def _of_job(self, job: Json, tried: Iterable[Json]) -> str | None:
        """What the Job controller says when it may make no pod: a quota, an admission rule. No status has it."""
        metadata = job["metadata"]
        if self._now() - pods.unix(metadata.get("creationTimestamp")) < pods.CREATING_PATIENCE_S:
            return None
        about = {"involvedObject.uid": metadata["uid"], "type": "Warning"}
        return workers.not_made(self._kube.list(kinds.EVENT, metadata["namespace"], fields=about), job, tried)
