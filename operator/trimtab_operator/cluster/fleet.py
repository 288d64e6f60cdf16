"""Reads the fleet's tuning switch every few seconds, and says when it has changed.

`main` calls `turn` in a thread of its own. It asks instead of watching: a switch that must work within ten seconds may not hang on a
watch that can go silent, and one GET costs less than the renewal of the Lease beside it. Reads only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from trimtab_operator.cluster import kinds
from trimtab_operator.cluster.kube import Denied, Kube, KubeError
from trimtab_operator.plan.fleet import Reading, read_switch
from trimtab_operator.plan.live import Switch

logger = logging.getLogger(__name__)

POLL_S = 3.0


class FleetSwitch:
    """See the module. `changed` is called after a change; `complain(config_map, problem)` at each look at a wrong one."""

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        name: str,
        changed: Callable[[Switch], None],
        complain: Callable[[dict[str, Any], str], None],
    ) -> None:
        self._kube = kube
        self._namespace, self._name = namespace, name
        self._where = f"ConfigMap {namespace}/{name}"
        self._changed = changed
        self._complain = complain
        self._reading = Reading(Switch())

    @property
    def now(self) -> Switch:
        """As last read."""
        return self._reading.switch

    def look(self) -> None:
        """Read it once. Raises KubeError when nothing can be known; what was known then stays."""
        found: dict[str, Any] | None = None
        try:
            found = self._kube.get(kinds.CONFIG_MAP, self._namespace, self._name)
        except Denied as error:
            # Somebody may have thrown the switch, and we would not see it.
            reading = Reading(Switch("paused", self._where), f"{self._where} may not be read: {error}")
        else:
            reading = read_switch(found, self._where)
        before, self._reading = self._reading, reading
        if reading.problem is not None:
            if reading.problem != before.problem:
                logger.warning("fleet switch", extra={"problem": reading.problem})
            if found is not None:
                self._complain(found, reading.problem)
        if reading.switch != before.switch:
            logger.info("fleet switch", extra={"tuning": reading.switch.state, "from": self._where})
            self._changed(reading.switch)

    def turn(self) -> None:
        """As `look`; when nothing can be known, the log says why."""
        try:
            self.look()
        except KubeError as error:
            logger.warning("fleet switch not read", extra={"error": str(error)})
