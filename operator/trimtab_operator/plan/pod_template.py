"""Which pod template a service's Deployment carries: the one its pods were made from, until a person's edit asks for another. Pure.

Another version of the operator may build other pods from the same spec, and hash it differently. None of that rolls a pod: the
Deployment carries a record of the template as it was applied, and that one stays in force until a restart-only field of spec is
edited or `rollout.upgradePolicy` is Auto. Used by `plan.cluster`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_operator import names
from trimtab_operator.api import InferenceService
from trimtab_operator.api.status import Resolved, ServiceStatus
from trimtab_operator.plan.drift import digest
from trimtab_operator.plan.manifests import hash_of, pod_template
from trimtab_operator.plan.template import restart_only

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Built:
    """The record. `basis` is the hash that the last operator computed for the spec, `fields` a digest of what restarts pods, as
    written in it. An edit changes both; another version of the operator, or of the CRD's defaults, one of them."""

    basis: str
    fields: str
    template: Json

    @classmethod
    def of(cls, deployment: Mapping[str, Any]) -> Built | None:
        """From the live object; None when there is none that can be read."""
        text = (deployment["metadata"].get("annotations") or {}).get(names.ANNOTATION_BUILT)
        if not isinstance(text, str):
            return None
        try:
            found = json.loads(text)
            built = cls(str(found["basis"]), str(found["fields"]), found["template"])
            hash_of(built.template)
            containers = built.template["spec"]["containers"]
            # Operators before this one wrote no seal.
            whole = found.get("seal") in (None, built._seal())
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        return built if containers and whole else None

    def annotations(self) -> dict[str, str]:
        """What is written to the Deployment."""
        content = {
            "basis": self.basis,
            "fields": self.fields,
            "template": self.template,
            "seal": self._seal(),
        }
        return {names.ANNOTATION_BUILT: json.dumps(content, sort_keys=True, separators=(",", ":"))}

    def _seal(self) -> str:
        """An edit by hand breaks it: such a record would roll pods onto something that no spec asks for."""
        return digest({"basis": self.basis, "fields": self.fields, "template": self.template})


@dataclass(frozen=True, slots=True)
class Choice:
    """What the Deployment carries from now on. `resolved`: the defaults that this template was built with."""

    built: Built
    resolved: Resolved
    upgrade_available: bool = False

    @property
    def template_hash(self) -> str:
        """What marks its pods."""
        return hash_of(self.built.template)


def choose(
    service: InferenceService,
    previous: ServiceStatus,
    deployment: Mapping[str, Any] | None,
    defaults: Resolved,
) -> Choice:
    """`previous` is the status as it stands, `deployment` the live object, `defaults` this operator's own."""
    fresh = pod_template(service, defaults)
    stamped = previous.resolved
    fields = digest(restart_only(service))
    newest = Choice(Built(hash_of(fresh), fields, fresh), defaults)
    if deployment is None or stamped.image is None:
        return newest
    as_stamped = pod_template(service, stamped)
    live = deployment["spec"]["template"]["metadata"].get("annotations") or {}
    built = Built.of(deployment) or Built(live.get(names.ANNOTATION_TEMPLATE_HASH, ""), "", as_stamped)
    basis = hash_of(as_stamped)
    edited = basis != built.basis and fields != built.fields and not _carried_out(service, previous)
    waits = _content(fresh) != _content(built.template)
    if edited or (waits and service.spec.rollout.upgrade_policy == "Auto"):
        return newest
    return Choice(
        Built(basis, fields, built.template), stamped if waits else defaults, upgrade_available=waits
    )


def _content(template: Json) -> str:
    """Everything but the mark: the same pods under another mark are no reason to replace them."""
    marks = template["metadata"]["annotations"]
    others = {key: value for key, value in marks.items() if key != names.ANNOTATION_TEMPLATE_HASH}
    return digest({**template, "metadata": {**template["metadata"], "annotations": others}})


def _carried_out(service: InferenceService, previous: ServiceStatus) -> bool:
    """Whether the spec as it stands has gone into the Deployment before."""
    stalled = previous.condition(names.STALLED)
    stopped = (
        stalled is not None and stalled.status == "True" and stalled.reason in names.NOT_CARRIED_OUT_REASONS
    )
    return previous.observed_generation == service.metadata.generation and not stopped
