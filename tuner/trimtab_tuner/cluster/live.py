"""Live runs in a cluster: candidates as leases on running engines, on real traffic as it comes, or on a trace replayed on top.

Called by `evaluators`. The engines' metrics come from Prometheus, or from scraping the pods behind the service; series are per
generation, so a candidate on canary pods needs no selection beyond the pods that run it.
"""

from __future__ import annotations

from trimtab_tuner.cluster.plan import Plan, Work


async def make(work: Work) -> Plan:
    """The plan of a Live run."""
    raise NotImplementedError(work.run.workload)
