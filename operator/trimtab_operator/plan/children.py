"""Which children to apply or delete, comparing what is wanted with what exists. Pure; used by `plan.cluster`.

An object is ours when its controller is this very InferenceService, or when it lost its owner but carries our labels. A name
that somebody else's object holds is never taken over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trimtab_operator import names
from trimtab_operator.api import InferenceService
from trimtab_operator.errors import Finding
from trimtab_operator.plan.drift import drift, stamped

Json = dict[str, Any]
Key = tuple[str, str]  # kind, name
Ownership = Literal["ours", "former", "foreign"]


def possible(service: str) -> tuple[Key, ...]:
    """Every child that a service may have."""
    return (
        ("ServiceAccount", names.service_account(service)),
        ("ConfigMap", names.live_config_map(service)),
        ("Service", names.service(service)),
        ("NetworkPolicy", names.network_policy(service)),
        ("PodDisruptionBudget", names.disruption_budget(service)),
        ("Deployment", names.deployment(service)),
    )


@dataclass(frozen=True, slots=True)
class Changes:
    """`apply` in order; `drifted` says for each what differs (its path), None for a new object. `waiting`: objects that are on
    their way out and hold a name that we need."""

    apply: tuple[Json, ...] = ()
    drifted: tuple[str | None, ...] = ()
    delete: tuple[Json, ...] = ()
    taken: tuple[Finding, ...] = ()
    waiting: tuple[str, ...] = ()


def ownership(service: InferenceService, live: Mapping[str, Any]) -> Ownership:
    """Whose object this is; `former` belonged to a service of the same name that is gone."""
    metadata = live["metadata"]
    for owner in metadata.get("ownerReferences") or ():
        if not owner.get("controller"):
            continue
        if owner.get("uid") == service.metadata.uid:
            return "ours"
        same_kind = str(owner.get("apiVersion", "")).partition("/")[0] == names.GROUP
        if same_kind and owner.get("kind") == names.SERVICE_KIND and owner.get("name") == service.name:
            return "former"
        return "foreign"
    labels = metadata.get("labels") or {}
    mine = labels.get(names.LABEL_SERVICE) == service.name
    return "ours" if mine and labels.get(names.LABEL_MANAGED_BY) == names.FIELD_MANAGER else "foreign"


def changes(
    service: InferenceService, wanted: Sequence[Json], live: Mapping[Key, Mapping[str, Any]]
) -> Changes:
    """What to do about every possible child."""
    return differences(wanted, live, lambda found: ownership(service, found))


def differences(
    wanted: Sequence[Json],
    live: Mapping[Key, Mapping[str, Any]],
    whose: Callable[[Mapping[str, Any]], Ownership],
) -> Changes:
    """The same for whatever has children; `whose` says of each whether it is one of them."""
    apply: list[Json] = []
    drifted: list[str | None] = []
    taken: list[Finding] = []
    waiting: list[str] = []
    for manifest in map(stamped, wanted):
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        found = live.get((kind, name))
        if found is None:
            apply.append(manifest)
            drifted.append(None)
            continue
        owned = whose(found)
        if owned == "foreign":
            taken.append(
                Finding(f"{kind}/{name}", _owner_text(found), "a name that is free for this service")
            )
        elif owned == "former" or found["metadata"].get("deletionTimestamp"):
            waiting.append(f"{kind}/{name}")
        elif differs := drift(manifest, found):
            apply.append(manifest)
            drifted.append(differs[0])
    keys = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in wanted}
    delete = tuple(
        dict(found)
        for key, found in live.items()
        if key not in keys and whose(found) == "ours" and not found["metadata"].get("deletionTimestamp")
    )
    return Changes(tuple(apply), tuple(drifted), delete, tuple(taken), tuple(waiting))


def _owner_text(live: Mapping[str, Any]) -> str:
    owner = next((o for o in live["metadata"].get("ownerReferences") or () if o.get("controller")), None)
    return "an object of nobody's" if owner is None else f"an object of {owner['kind']} {owner['name']}"
