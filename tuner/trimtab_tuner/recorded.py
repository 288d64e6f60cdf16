"""Recorded traffic of a service: the workload records of its engines as one trace that remembers who got which request.

Called by whoever reads `GET /admin/workload` of several engines. Pure. Ids of prefix blocks are salted by each engine with a key
of its own, so equal prompts at two engines have different ids: shared prefixes can only be told within one engine. That is all
that a simulation needs which sends each request where it went (`placement`), and no change of a live config moves requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab_tuner.errors import ServerError
from trimtab_tuner.readers.records import DEFAULT_BLOCK_TOKENS, row
from trimtab_tuner.trace import Trace, TraceRequest, rebased

# A few minutes of simulation for a study; what is older says less about the traffic of today.
MAX_REQUESTS = 20_000


@dataclass(frozen=True, slots=True)
class EngineRecords:
    """What one engine recorded. `dropped`: it had more once, which fell out of its ring."""

    engine: str
    records: tuple[Mapping[str, Any], ...]
    block_size: int = DEFAULT_BLOCK_TOKENS
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Recorded:
    """`placement[i]` is the place in `engines` of the one that got request i."""

    trace: Trace
    placement: tuple[int, ...]
    engines: tuple[str, ...]


def merge(
    service: str, engines: Sequence[EngineRecords], *, max_requests: int = MAX_REQUESTS
) -> Recorded | None:
    """The newest `max_requests` of all engines in order of arrival; None when there is none that can be sent again.

    Where an engine has lost older records, nothing from before its oldest is taken from any: the traffic is whole in all of the
    trace. Requests that got no token, and whose length is not recorded, are left out and counted. Raises TraceError for a
    record that cannot be meant, ServerError for engines with different KV block sizes.
    """
    taken: list[tuple[TraceRequest, int]] = []
    unusable, whole_from_s, sizes = 0, float("-inf"), dict[int, str]()
    for place, engine in enumerate(engines):
        own: list[TraceRequest] = []
        for number, record in enumerate(engine.records, 1):
            read = row(engine.engine, number, record, engine.block_size)
            if read.request is None:
                unusable += 1
                continue
            if read.block_tokens is not None:
                sizes.setdefault(read.block_tokens, engine.engine)
            own.append(read.request)
        if engine.dropped and own:
            whole_from_s = max(whole_from_s, min(request.arrival_s for request in own))
        taken += [(request, place) for request in own]
    if len(sizes) > 1:
        said = ", ".join(f"{name}: {size}" for size, name in sorted(sizes.items()))
        raise ServerError(
            f"engines of {service} have KV blocks of different sizes ({said}); is a rollout under way?"
        )
    taken.sort(key=lambda each: (each[0].arrival_s, each[1]))
    kept = [each for each in taken if each[0].arrival_s >= whole_from_s][-max_requests:]
    if not kept:
        return None
    changes = []
    if len(kept) < len(taken):
        changes.append(f"the newest {len(kept)} of {len(taken)} requests")
    if unusable:
        changes.append(f"left out {unusable} requests that got no token")
    trace = Trace(
        tuple(rebased([request for request, _ in kept])),
        f"recorded by {len(engines)} {'engine' if len(engines) == 1 else 'engines'} of {service}",
        "records",
        next(iter(sizes), None),
        tuple(changes),
    )
    return Recorded(trace, tuple(place for _, place in kept), tuple(engine.engine for engine in engines))
