"""One writing operator at a time: a coordination Lease, held and renewed by `turn`, which `main` calls in a thread of its own.

`guard` is called before every write to the API server. It goes by this process's own monotonic clock and the start of the last
renewal that succeeded, so a process that was cut off stops writing before another one may take over.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from trimtab_operator.cluster import kinds
from trimtab_operator.cluster.kube import Conflict, Kube, KubeError, NotLeading

logger = logging.getLogger(__name__)

Json = dict[str, Any]
LEASE_S = 15.0  # others wait so long without a renewal before they take over
SAFE_S = 10.0  # we write at most so long after a renewal
RENEW_S = 3.0
#: For requests about the Lease: one connection that has fallen silent must not cost the lead, so a second try fits in before SAFE_S.
REQUEST_TIMEOUT_S, REQUEST_PAUSES_S = 5.0, (0.1,)


class Leadership:
    """See the module. `kube` must be without a guard of ours: the Lease itself is written by followers too."""

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        name: str,
        identity: str,
        on_change: Callable[[bool], None] = lambda leading: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._namespace, self._name, self._identity = namespace, name, identity
        self._on_change = on_change
        self._now = now
        self._safe_until = float("-inf")
        self._seen: tuple[object, object] = (None, None)  # holder and renewTime, as last changed
        self._seen_s = float("-inf")
        self._was_leading = False
        self._said: str | None = None  # of the last turn: a refusal may stand for long

    @property
    def leading(self) -> bool:
        """Whether this process may write now."""
        return self._now() < self._safe_until

    def guard(self) -> None:
        """Raises NotLeading unless this process may write now."""
        if not self.leading:
            raise NotLeading(
                "write", None, "NotLeading", f"{self._identity} does not hold Lease {self._name}"
            )

    def hand_over(self) -> None:
        """Write no more, and let go of the Lease at once; no turn may follow."""
        held, self._safe_until = self.leading, float("-inf")
        if held:
            try:
                lease = self._kube.get(kinds.LEASE, self._namespace, self._name)
                if lease is not None and lease["spec"].get("holderIdentity") == self._identity:
                    lease["spec"].update(holderIdentity="", leaseDurationSeconds=1)
                    self._kube.replace(lease)
            except KubeError as error:
                logger.info("lease not handed over", extra={"error": str(error)})

    def turn(self) -> None:
        """Ask for the Lease, or renew it, once."""
        began = self._now()
        try:
            if self._ask(began):
                self._safe_until = began + SAFE_S
        except KubeError as error:
            if str(error) != self._said:
                logger.warning("lease not renewed", extra={"error": str(error)})
            self._said = str(error)
        else:
            self._said = None
        if self.leading != self._was_leading:
            self._was_leading = self.leading
            logger.info("leading" if self.leading else "not leading", extra={"identity": self._identity})
            self._on_change(self.leading)

    def _ask(self, began: float) -> bool:
        lease = self._kube.get(kinds.LEASE, self._namespace, self._name)
        spec = self._spec()
        if lease is None:
            metadata = {"name": self._name, "namespace": self._namespace}
            try:
                self._kube.create({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata,
                                   "spec": {**spec, "acquireTime": spec["renewTime"], "leaseTransitions": 0}})  # fmt: skip
            except Conflict:
                return False
            return True
        held = lease["spec"]
        seen = (held.get("holderIdentity"), held.get("renewTime"))
        if seen != self._seen:
            self._seen, self._seen_s = seen, began
        mine = held.get("holderIdentity") == self._identity
        duration_s = float(held.get("leaseDurationSeconds") or LEASE_S)
        # By our own clock since the holder last moved: clocks of machines differ.
        if not mine and held.get("holderIdentity") and began - self._seen_s < duration_s:
            self._safe_until = float("-inf")
            return False
        if not mine:
            spec["acquireTime"] = spec["renewTime"]
            spec["leaseTransitions"] = int(held.get("leaseTransitions") or 0) + 1
        held.update(spec)
        try:
            self._kube.replace(lease)  # at its resource version: only one of two wins
        except Conflict:
            return False
        return True

    def _spec(self) -> Json:
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(LEASE_S),
            "renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
