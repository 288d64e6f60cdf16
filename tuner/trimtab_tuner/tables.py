"""Tables for terminals: one replay, several side by side, before and after. Rendering only; every number comes from `stats.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rich.table import Table

from .quantiles import Interval
from .stats import Distribution, Share, Summary
from .units import format_duration

Row = tuple[str, Callable[[Summary], str]]


def rows() -> list[Row]:
    """What is said of a replay, in reading order; also the report's table."""
    return [
        ("requests", _requests),
        ("TTFT p50 / p90 / p99", lambda s: _quantiles(s.ttft)),
        ("ITL p50 / p90 / p99", lambda s: _quantiles(s.itl)),
        (
            "longest gap p50 / p90 / max",
            lambda s: " / ".join(map(format_duration, (s.max_gap.p50, s.max_gap.p90, s.max_gap.max))),
        ),
        ("stalled requests", lambda s: f"{s.stalled_requests} of {s.n_due}"),
        ("TTFT target met", lambda s: _share(s.ttft_attainment)),
        ("ITL target met", lambda s: _share(s.itl_attainment)),
        ("goodput", lambda s: _share(s.attainment)),
        ("E2E p50 / p90", lambda s: f"{format_duration(s.e2e.p50)} / {format_duration(s.e2e.p90)}"),
        ("output tokens/s, good", lambda s: f"{s.output_tokens_per_s:.1f}, {s.good_output_tokens_per_s:.1f}"),
        (
            "send error p50 / p99",
            lambda s: f"{format_duration(s.send_error.p50)} / {format_duration(s.send_error.p99)}",
        ),
    ]


def summary_table(summaries: Mapping[str, Summary], title: str | None = None) -> Table:
    """One column a replay, with what was refused and why in the caption."""
    table = Table(
        title=title,
        title_justify="left",
        caption=caption(summaries.values()),
        caption_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
    )
    table.add_column("")
    for label in summaries:
        table.add_column(label, justify="right")
    for name, text in rows():
        table.add_row(name, *(text(summary) for summary in summaries.values()))
    return table


def caption(summaries: Iterable[Summary]) -> str:
    """Targets, and notes of quantiles that are not shown."""
    notes: dict[str, None] = {}
    for summary in summaries:
        slo = summary.slo
        notes[f"targets: TTFT {format_duration(slo.ttft_s)}, every gap {format_duration(slo.itl_s)}"] = None
        if summary.ttft.note:
            notes[f"TTFT: {summary.ttft.note}"] = None
        notes[
            f"ITL pooled over {summary.itl.n:,} gaps; goodput = share of requests that met both targets"
        ] = None
        if summary.n_cancelled:
            notes[f"{summary.n_cancelled} requests cut off by stopping are left out unless already late"] = (
                None
            )
    return "\n".join(notes)


def _requests(summary: Summary) -> str:
    failed = "".join(f", {count} {status}" for status, count in summary.failures.items())
    cut = f", {summary.n_cancelled} cut off" if summary.n_cancelled else ""
    return f"{summary.n_ok} of {summary.n_due} ok{failed}{cut}"


def _quantiles(found: Distribution) -> str:
    return " / ".join(format_duration(value) for value in (found.p50, found.p90, found.p99))


def _share(share: Share) -> str:
    if share.fraction is None:
        return "–"
    return f"{share.fraction:.0%}{_interval(share.interval)}"


def _interval(found: Interval | None) -> str:
    return "" if found is None else f" [{found.low:.0%}, {found.high:.0%}]"
