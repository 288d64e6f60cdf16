"""Request traces: when requests arrive and how long they are, never what they say.

`load` picks the reader for a file (`readers/`); a `Trace` is sliced and scaled without changing the order or the relative
lengths of its requests, and remembers what was done to it. Replay, simulator, study and report build on it. Knows nothing
about servers or arrival processes (`arrivals.py`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from .errors import InputError


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. `arrival_s` counts from the first arrival of the trace.

    `prefix_block_ids` name the blocks of the prompt from its start (`Trace.prefix_block_tokens` tokens each): equal leading
    ids mean an equal prompt prefix, which a prefix cache can reuse. None: nothing is known to be shared.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    slo_class: str = "default"
    prefix_block_ids: tuple[int | str, ...] | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, with where they came from and what was changed since (`changes`)."""

    requests: tuple[TraceRequest, ...]
    source: str
    format: str
    prefix_block_tokens: int | None = None
    changes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.requests:
            raise InputError(self.source, "no requests", "a trace with at least one request")
        if any(b.arrival_s < a.arrival_s for a, b in pairwise(self.requests)):
            raise AssertionError("requests of a Trace are in order of arrival; readers sort")

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    @property
    def rate_rps(self) -> float:
        """Mean arrivals per second: (n - 1) gaps over the span; infinite when all arrive at once, 0 for one request."""
        if len(self.requests) == 1:
            return 0.0
        return (len(self.requests) - 1) / self.span_s if self.span_s > 0 else math.inf

    @property
    def hash(self) -> str:
        """16 hex digits over arrivals (to the microsecond), lengths, classes and prefix blocks."""
        return _digest(f"{request.arrival_s:.6f}|{_shape(request)}" for request in self.requests)

    @property
    def lengths_hash(self) -> str:
        """As `hash` without arrivals: equal for two traces that differ in timing only."""
        return _digest(_shape(request) for request in self.requests)

    def with_arrivals(self, arrivals_s: Sequence[float], change: str) -> Trace:
        """The same requests in the same order at other (non-decreasing) times."""
        if len(arrivals_s) != len(self.requests):
            raise AssertionError("one arrival per request")
        moved = zip(self.requests, arrivals_s, strict=True)
        return self._changed((replace(request, arrival_s=float(at)) for request, at in moved), change)

    def slice_time(self, start_s: float, end_s: float) -> Trace:
        """Requests with start_s ≤ arrival_s < end_s; arrivals count from the first one kept."""
        if not 0 <= start_s < end_s:
            raise InputError(
                "slice", f"{start_s:g}:{end_s:g}", f"0 ≤ start < end, in seconds up to {self.span_s:g}"
            )
        kept = [request for request in self.requests if start_s <= request.arrival_s < end_s]
        if not kept:
            raise InputError(
                "slice",
                f"{start_s:g}:{end_s:g}",
                f"a window with arrivals; the trace spans {self.span_s:g} s",
            )
        return self._changed(rebased(kept), f"slice {start_s:g}:{end_s:g} s")

    def slice_count(self, first: int, count: int) -> Trace:
        """`count` requests from index `first`; arrivals count from the first one kept. Fewer when the trace ends."""
        if not 0 <= first < len(self.requests):
            raise InputError("--skip", first, f"0 to {len(self.requests) - 1}, so that a request is left")
        if count < 1:
            raise InputError("--limit", count, "a whole number of at least 1")
        return self._changed(
            rebased(self.requests[first : first + count]), f"requests {first}..{first + count - 1}"
        )

    def scale_rate(self, factor: float) -> Trace:
        """Arrivals `factor` times as fast; burst shape (CV, order) unchanged."""
        if not (math.isfinite(factor) and factor > 0):
            raise InputError("--speed", factor, "a factor above 0 (2 = twice as fast)")
        return self.with_arrivals(
            [request.arrival_s / factor for request in self.requests], f"rate ×{factor:g}"
        )

    def scale_to_span(self, span_s: float) -> Trace:
        """Stretch or compress arrivals so that the last one comes `span_s` seconds after the first."""
        if not (math.isfinite(span_s) and span_s > 0):
            raise InputError("--duration", span_s, "seconds above 0")
        if self.span_s == 0:
            raise InputError("--duration", span_s, "a trace whose arrivals are not all at one instant")
        return self.scale_rate(self.span_s / span_s)

    def scale_lengths(self, divisor: float) -> Trace:
        """Prompt, output and prefix-block lengths divided by `divisor` (rounded, at least 1): a smaller model's workload."""
        if not (math.isfinite(divisor) and divisor > 0):
            raise InputError("--scale-lengths", divisor, "a divisor above 0 (8 = an eighth of the tokens)")
        shrink = _divider(divisor)
        requests = (
            replace(
                request,
                prompt_tokens=shrink(request.prompt_tokens),
                output_tokens=shrink(request.output_tokens),
            )
            for request in self.requests
        )
        scaled = self._changed(requests, f"lengths ÷{divisor:g}")
        block = self.prefix_block_tokens
        return scaled if block is None else replace(scaled, prefix_block_tokens=shrink(block))

    def drop_longer(self, max_total_tokens: int) -> Trace:
        """Without the requests whose prompt and output together exceed `max_total_tokens`."""
        kept = [r for r in self.requests if r.prompt_tokens + r.output_tokens <= max_total_tokens]
        if not kept:
            raise InputError("--drop-longer", max_total_tokens, "a limit that at least one request keeps")
        dropped = len(self.requests) - len(kept)
        return self._changed(
            kept, f"dropped {dropped} of {len(self.requests)} longer than {max_total_tokens} tokens"
        )

    def _changed(self, requests: Iterable[TraceRequest], change: str) -> Trace:
        return replace(self, requests=tuple(requests), changes=(*self.changes, change))


def load(
    path: str | Path, *, format: str = "auto", limit: int | None = None, jitter_seed: int | None = None
) -> Trace:
    """Read a trace file (plain or .gz). `limit` stops after that many usable lines.

    `format`: auto | azure | burstgpt | mooncake | records. `jitter_seed` spreads Mooncake's arrivals, which are
    quantised to 3 s, uniformly inside their bin, keeping the order. Raises TraceError with file, line, value and
    what was expected, InputError for an unknown file or format.
    """
    from . import readers  # the readers import this module's types

    return readers.read(Path(path), format=format, limit=limit, jitter_seed=jitter_seed)


def save(trace: Trace, path: str | Path) -> None:
    """Write the trace as own records, one JSON object a line, readable by `load`."""
    lines = []
    for request in trace.requests:
        row: dict[str, object] = {
            "arrival_s": round(request.arrival_s, 6),
            "prompt_tokens": request.prompt_tokens,
            "output_tokens": request.output_tokens,
            "slo_class": request.slo_class,
        }
        if request.tenant is not None:
            row["tenant"] = request.tenant
        if request.prefix_block_ids is not None:
            row["prefix_block_ids"] = list(request.prefix_block_ids)
            row["prefix_block_tokens"] = trace.prefix_block_tokens
        lines.append(json.dumps(row, separators=(", ", ": ")))
    Path(path).write_text("\n".join(lines) + "\n")


def rebased(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """The same requests with arrivals counted from the first one."""
    first = requests[0].arrival_s
    return [replace(request, arrival_s=request.arrival_s - first) for request in requests]


def _divider(divisor: float) -> Callable[[int], int]:
    return lambda tokens: max(1, round(tokens / divisor))


def _shape(request: TraceRequest) -> str:
    blocks = "-" if request.prefix_block_ids is None else ",".join(map(str, request.prefix_block_ids))
    return (
        f"{request.prompt_tokens}|{request.output_tokens}|{request.slo_class}|{request.tenant or ''}|{blocks}"
    )


def _digest(lines: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode())
        digest.update(b"\n")
    return digest.hexdigest()[:16]
