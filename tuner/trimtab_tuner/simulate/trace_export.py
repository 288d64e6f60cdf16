"""A simulation as a Chrome trace (chrome://tracing, ui.perfetto.dev): steps, requests and load over time, one JSON file.

Per replica (a "process"): the thread *steps* has a slice per step with its rows in the arguments, the counters show running and
waiting requests and tokens a step; each request is an asynchronous slice from its first admission to its end, with an instant
for every preemption (where its KV went), and copies to CPU memory and back are in the arguments of their step. Times are simulated microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab_engine.core.step import Step, TokenEvent

_SECOND = 1e6


class ChromeTrace:
    """A `StepObserver` that collects events; `save` writes them."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._replicas: set[int] = set()
        self._admitted: set[str] = set()

    def on_step(self, replica: int, step: Step, begin_s: float, end_s: float) -> None:
        """A slice for the step, its load, and what became of requests in it."""
        if replica not in self._replicas:
            self._replicas.add(replica)
            self._meta(replica, "process_name", f"replica {replica}")
            self._meta(replica, "thread_name", "steps")
        prefills = step.num_tokens - step.num_decodes
        self._add(
            replica,
            "X",
            "decode" if prefills == 0 else "mixed" if step.num_decodes else "prefill",
            begin_s,
            dur=(end_s - begin_s) * _SECOND,
            args=_copies(step)
            | {
                "step": step.step_id,
                "decodes": step.num_decodes,
                "prefill_tokens": prefills,
                "budget": step.budget,
                "prefills": {
                    step.requests[row].id: [step.context[row], step.chunk[row]]
                    for row in range(step.num_decodes, len(step.requests))
                },
            },
        )
        self._add(replica, "C", "tokens", begin_s, args={"decode": step.num_decodes, "prefill": prefills})
        self._add(replica, "C", "rows", begin_s, args={"rows": len(step.requests)})
        for request in step.admitted:
            if request.id not in self._admitted:
                self._admitted.add(request.id)
                waited_s = begin_s - request.arrival_s
                args = {
                    "prompt": request.num_prompt_tokens,
                    "cached": request.num_cached,
                    "waited_s": waited_s,
                }
                self._request(replica, "b", request.id, begin_s, args)
        for request in step.preempted:
            about = {"preemptions": request.num_preemptions, "kv": str(request.state)}
            self._request(replica, "n", request.id, begin_s, about)

    def on_events(self, replica: int, events: Sequence[TokenEvent], now: float) -> None:
        """The ends of requests."""
        for event in events:
            if event.finished and event.request.id in self._admitted:
                self._request(
                    replica, "e", event.request.id, now, {"reason": str(event.request.finish_reason)}
                )

    def save(self, path: str | Path) -> None:
        """Write the JSON object format."""
        Path(path).write_text(
            json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}, separators=(",", ":"))
        )

    def _request(self, replica: int, phase: str, request_id: str, at_s: float, args: dict[str, Any]) -> None:
        self._add(replica, phase, f"request {request_id}", at_s, cat="request", id=request_id, args=args)

    def _meta(self, replica: int, name: str, value: str) -> None:
        self._events.append({"ph": "M", "pid": replica, "tid": 0, "name": name, "args": {"name": value}})

    def _add(self, replica: int, phase: str, name: str, at_s: float, **more: Any) -> None:
        self._events.append(
            {"ph": phase, "pid": replica, "tid": 0, "name": name, "ts": at_s * _SECOND, **more}
        )


def _copies(step: Step) -> dict[str, int]:
    """Blocks copied to CPU memory and back before the step, if any."""
    if not step.swap_out and not step.swap_in:
        return {}
    return {"blocks_swapped_out": len(step.swap_out), "blocks_swapped_in": len(step.swap_in)}
