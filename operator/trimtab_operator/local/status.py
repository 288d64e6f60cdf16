"""The status of a local service as JSON: the body of `/status`, and what the terminal shows.

Rendered from `service`; `conditions` and `status` are what a cluster's resource would carry, from the same planner. Decides
nothing.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from trimtab_operator import names
from trimtab_operator.local.replica import Phase, Replica
from trimtab_operator.plan import live as plan_live
from trimtab_operator.plan.engine_flags import served_name

if TYPE_CHECKING:
    from trimtab_operator.local.service import LocalService

Json = dict[str, Any]
_EVENTS = 50


def render(service: LocalService) -> Json:
    """Everything there is to know, as of now."""
    spec = service.resource.spec
    assert spec.model is not None, "support.check refuses services without a model"
    read_back = service.live.read_back()
    found = service.found.to_json()
    ready = service.found.condition(names.READY)
    state, quiet = plan_live.tuning_state(service.resource.metadata.annotations), service.quiet()
    return {
        "name": service.resource.name,
        "namespace": service.resource.namespace,
        "pid": os.getpid(),
        "phase": "Starting" if ready is None else "Ready" if ready.status == "True" else ready.reason,
        "observedGeneration": service.found.observed_generation,
        "url": service.url,
        "controlUrl": service.control_url,
        "model": served_name(spec.model),
        "conditions": found.pop("conditions", []),
        "replicas": [_replica(service, replica) for replica in service.replicas.values()],
        "status": found,
        "held": service.backends.num_held,
        "live": {key: read_back[key] for key in ("incumbent", "candidate", "in_force", "applied")},
        "tuning": {
            "mode": spec.tuning.mode,
            "state": "quiet" if quiet is not None and state == "active" else state,
            "quiet": quiet and {"message": str(quiet), "until": quiet.until_s if quiet.ends else None},
            "parameters": [
                {
                    "name": plan_live.WIRE[p.name],
                    "min": p.minimum,
                    "max": p.maximum,
                    "choices": list(p.choices),
                }
                for p in spec.tuning.parameters
            ],
            "limits": {"maxThroughputLoss": spec.tuning.limits.max_throughput_loss},
            "recommendation": service.recommendation and service.recommendation.to_json(),
            "waiting": service.waiting and service.waiting.to_json(),
        },
        "file": {"path": str(service.watch.path), "error": service.file_error},
        "events": [event.to_json() for event in service.events.last(_EVENTS)],
    }


def _replica(service: LocalService, replica: Replica) -> Json:
    addresses = replica.addresses
    return {
        "name": replica.name,
        "phase": str(replica.phase),
        "ready": replica.phase is Phase.READY,
        "pid": replica.pid,
        "url": addresses and addresses.url,
        "adminUrl": addresses and addresses.admin_url,
        "templateHash": replica.template_hash,
        "generation": service.live.generation_in_force(replica.name),
        "restarts": replica.restarts,
        "outstanding": replica.backend.outstanding if replica.backend is not None else 0,
        "ageSeconds": round(time.monotonic() - replica.created_s, 1),
        "lastFailure": replica.failure and replica.failure.message,
        "log": str(replica.folder / "engine.log"),
    }
