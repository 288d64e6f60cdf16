"""Figures of a report as inline SVG (or PNG for looking at them alone). Matplotlib without pyplot: no global state, no display.

Takes results and the trials of a study; computes nothing but what it draws. Colours are safe for colour-blind readers.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from .quantiles import Floats
from .result import ReplayResult
from .stats import Summary, gaps_s, ttft_s

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#555555")
_GREY = "#8a8a8a"
_STALL = "#C00000"
_WAIT = "#E3B778"
_TICKS = (0.0, 0.5, 0.9, 0.99, 0.999)
_MAX_POINTS = 600
_MAX_BARS = 400
_STYLE = {
    "svg.fonttype": "none",  # text stays text: small, searchable, in the page's font
    "svg.hashsalt": "trimtab",  # the same figure gives the same bytes
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "legend.frameon": False,
}


P = ParamSpec("P")


def _styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Draw in the house style, whatever the process's matplotlib settings are."""

    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with matplotlib.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return styled


def to_svg(figure: Figure) -> str:
    """The figure as an `<svg>` element to put into a page."""
    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, bbox_inches="tight")
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def to_png(figure: Figure, dpi: int = 110) -> bytes:
    """The figure as PNG."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(buffer, format="png", dpi=dpi, bbox_inches="tight")
    return buffer.getvalue()


@_styled
def distributions(results: Mapping[str, ReplayResult], colours: Mapping[str, str]) -> Figure:
    """CDFs of TTFT and of gaps, with the tail stretched: equal heights for each factor of ten. A curve that ends below the top
    stands for failures; dashed: the target."""
    figure, (left, right) = _panels(2, height=3.4)
    kinds = ((left, "Time to first token", "requests"), (right, "Gaps between tokens", "gaps"))
    for axes, title, unit in kinds:
        for label, result in results.items():
            samples = _ttft(result) if unit == "requests" else _gaps(result)
            _cdf(axes, samples, colours[label], f"{label} ({len(samples):,} {unit})")
        slo = next(iter(results.values())).slo
        _target(axes, slo.ttft_s if unit == "requests" else slo.itl_s, vertical=True)
        axes.set_title(title)
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        axes.set_xlim(max(low, high / 1000), high)  # gaps of microseconds are chunks that arrived together
        _time_axis(axes.xaxis)
        axes.set_yticks(
            [_stretch(share) for share in _TICKS], ["min", *(f"p{share * 100:g}" for share in _TICKS[1:])]
        )
        axes.grid(axis="y", color="#e5e5e5", linewidth=0.8)
        axes.legend(loc="upper left", fontsize=8)
    left.set_ylabel("share of samples below")
    return figure


@_styled
def percentiles(summaries: Mapping[str, Summary], colours: Mapping[str, str]) -> Figure:
    """p50, p90 and p99 of TTFT and gaps with their intervals; what has too few samples is said, not drawn."""
    figure, (left, right) = _panels(2, height=3.0)
    names = ("p50", "p90", "p99")
    width = 0.8 / max(1, len(summaries))
    for axes, title, of in ((left, "Time to first token", "ttft"), (right, "Gaps between tokens", "itl")):
        shown = [v for s in summaries.values() if (v := _finite(getattr(s, of).p50))]
        floor = min(shown, default=1e-3) / 3
        top = floor
        for position, (label, summary) in enumerate(summaries.items()):
            found = getattr(summary, of)
            for column, name in enumerate(names):
                x = column + (position - (len(summaries) - 1) / 2) * width
                value = getattr(found, name)
                if value is None or math.isinf(value):
                    text = "failed" if value is not None else f"n = {found.n}: too few"
                    axes.text(
                        x, floor * 1.15, text, rotation=90, fontsize=7, ha="center", va="bottom", color=_GREY
                    )
                    continue
                axes.bar(
                    x,
                    value - floor,
                    width * 0.92,
                    bottom=floor,
                    color=colours[label],
                    label=label if column == 0 else None,
                )
                top = max(top, value)
                around = found.intervals.get(name)
                if around is not None and math.isfinite(around.high):
                    axes.plot([x, x], [max(around.low, floor), around.high], color="black", linewidth=1.0)
                    top = max(top, around.high)
        slo = next(iter(summaries.values())).slo
        target = slo.ttft_s if of == "ttft" else slo.itl_s
        _target(axes, target, vertical=False)
        axes.set_title(title)
        axes.set_yscale("log")
        axes.set_ylim(floor, max(top, target) * 1.6)
        _time_axis(axes.yaxis)
        axes.set_xticks(range(len(names)), names)
        axes.set_xlim(-0.5, len(names) - 0.5)
    left.legend(fontsize=8, loc="upper left")
    return figure


@_styled
def arrivals(results: Mapping[str, ReplayResult], colours: Mapping[str, str]) -> Figure:
    """Requests sent over time: the same requests, evenly spaced and in bursts."""
    figure, (axes,) = _panels(1, height=2.2)
    for label, result in results.items():
        at = sorted(r.sent_s for r in result.requests if r.sent_s is not None)
        cv = (result.meta.get("burstiness_sent") or {}).get("cv")
        known = "" if cv is None else f", CV of gaps {cv:.1f}"
        axes.step(
            at,
            np.arange(1, len(at) + 1),
            where="post",
            color=colours[label],
            linewidth=1.5,
            label=f"{label}{known}",
        )
    axes.set_title("Requests sent")
    axes.set_xlabel("seconds since the start")
    axes.legend(fontsize=8, loc="upper left")
    return figure


@_styled
def timeline(results: Mapping[str, ReplayResult]) -> Figure:
    """Each request as a line from its intended send: waiting, streaming, and in red the gaps over the target."""
    figure, panels = _panels(len(results), height=3.2, columns=min(2, len(results)), sharex=True)
    for axes, (label, result) in zip(panels, results.items(), strict=False):
        requests = result.requests
        if len(requests) > _MAX_BARS:
            _scatter_timeline(axes, result)
        else:
            for row, request in enumerate(requests):
                end = request.finish_s or request.intended_s
                first = request.first_token_s if request.first_token_s is not None else end
                axes.plot(
                    [request.intended_s, first], [row, row], color=_WAIT, linewidth=1.6, solid_capstyle="butt"
                )
                axes.plot([first, end], [row, row], color=COLOURS[0], linewidth=1.6, solid_capstyle="butt")
                limit = result.slo.of(request.slo_class).itl_s
                for a, b in zip(request.token_times_s, request.token_times_s[1:], strict=False):
                    if b - a > limit:
                        axes.plot([a, b], [row, row], color=_STALL, linewidth=2.4, solid_capstyle="butt")
                if request.failed:
                    axes.plot(end, row, marker="x", color=_STALL, markersize=5)
            axes.set_ylabel("request, in order of arrival")
        axes.set_title(label)
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("seconds since the start")
        axes.margins(y=0.02)
    marks = [
        matplotlib.lines.Line2D([], [], color=_WAIT, linewidth=3, label="waiting for the first token"),
        matplotlib.lines.Line2D([], [], color=COLOURS[0], linewidth=3, label="streaming"),
        matplotlib.lines.Line2D([], [], color=_STALL, linewidth=3, label="gap over the target"),
    ]
    figure.legend(handles=marks, loc="outside lower center", ncols=3, fontsize=8)
    return figure


def measured(trial: Mapping[str, Any]) -> bool:
    """Whether `budget` has a point for it."""
    return any(
        value is not None for value in (trial.get("itl_p99_s"), _share(trial, "itl"), _share(trial, "ttft"))
    )


@_styled
def budget(trials: Sequence[Mapping[str, Any]], itl_target_s: float | None) -> Figure:
    """What each trial measured against tokens a step: p99 of gaps, and shares of requests over their targets.

    Numbers are trials in order; `trials` are rows of a tuning result.
    """
    figure, (left, right) = _panels(2, height=3.2)
    policies = sorted({_policy(trial) for trial in trials})
    colour_of = dict(zip(policies, itertools.cycle(COLOURS), strict=False))
    for policy, colour in colour_of.items():
        mine = [trial for trial in trials if _policy(trial) == policy]
        _points(left, [(trial, trial.get("itl_p99_s")) for trial in mine], label=policy, color=colour)
        _points(
            right, [(trial, _share(trial, "itl")) for trial in mine], label=f"{policy}, gap", color=colour
        )
        _points(
            right,
            [(trial, _share(trial, "ttft")) for trial in mine],
            label=f"{policy}, first token",
            facecolors="none",
            edgecolors=colour,
        )
    if itl_target_s is not None:
        _target(left, itl_target_s, vertical=False)
    budgets = sorted({_budget(trial) for trial in trials})
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(budgets, [f"{each:,}" for each in budgets], rotation=0 if len(budgets) < 7 else 45)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("budget: tokens a step")
        axes.margins(x=0.12, y=0.15)
        axes.legend(fontsize=8)
    left.set_yscale("log")
    _time_axis(left.yaxis)
    left.set_title("p99 gap between tokens, by trial")
    right.set_title("Requests over their target, by trial")
    right.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    right.set_ylim(bottom=-0.02)
    return figure


def _points(axes: Any, points: Sequence[tuple[Mapping[str, Any], float | None]], **style: Any) -> None:
    known = [(_budget(trial), value, trial) for trial, value in points if value is not None]
    if not known:
        return
    axes.scatter([x for x, _, _ in known], [y for _, y, _ in known], s=38, zorder=3, **style)
    for x, y, trial in known:
        # Left and right in turn: the last trial often repeats an earlier config.
        side = (6, 3) if int(trial["number"]) % 2 else (-12, 3)
        axes.annotate(
            f"{int(trial['number']) + 1}", (x, y), textcoords="offset points", xytext=side, fontsize=8
        )


def _budget(trial: Mapping[str, Any]) -> int:
    return int(trial["config"]["max_num_batched_tokens"])


def _policy(trial: Mapping[str, Any]) -> str:
    return str(trial["config"]["scheduling_policy"])


def _share(trial: Mapping[str, Any], slo: str) -> float | None:
    violated, offered = (trial.get("violations") or {}).get(slo), trial.get("n")
    return violated / offered if violated is not None and offered else None


def _panels(
    count: int, *, height: float, columns: int | None = None, sharex: bool = False
) -> tuple[Figure, list[Any]]:
    columns = count if columns is None else columns
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(9.2, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharex=sharex)
    panels = [axes for line in grid for axes in line]
    for extra in panels[count:]:
        extra.set_visible(False)
    return figure, panels[:count]


def _cdf(axes: Any, samples: Floats, colour: str, label: str) -> None:
    ordered = np.sort(samples)
    finite = ordered[np.isfinite(ordered)]
    if not finite.size:
        axes.plot([], [], color=colour, label=f"{label}, all failed")
        return
    # The share below the i-th of n samples; the last one would be at infinity on this scale, so it ends at 1 - 1/(2n).
    share = (np.arange(finite.size) + 0.5) / ordered.size
    if finite.size > _MAX_POINTS:  # evenly on the stretched axis, so that the tail keeps every sample
        wanted = np.linspace(0.0, _stretch(float(share[-1])), _MAX_POINTS)
        keep = np.unique(np.clip(np.searchsorted(share, 1.0 - 10.0**-wanted), 0, finite.size - 1))
        finite, share = finite[keep], share[keep]
    axes.step(
        np.maximum(finite, 1e-5),
        -np.log10(1.0 - share),
        where="post",
        color=colour,
        linewidth=1.6,
        label=label,
    )


def _scatter_timeline(axes: Any, result: ReplayResult) -> None:
    at = [r.intended_s for r in result.requests]
    waits = [ttft_s(r) for r in result.requests]
    known = [(t, w) for t, w in zip(at, waits, strict=True) if w is not None and math.isfinite(w)]
    axes.scatter([t for t, _ in known], [w for _, w in known], s=5, color=_WAIT, label="TTFT")
    stalls = [
        (r.token_times_s[i], g)
        for r in result.requests
        for i, g in enumerate(gaps_s(r))
        if result.slo.of(r.slo_class).itl_s < g < math.inf
    ]
    axes.scatter(
        [t for t, _ in stalls], [g for _, g in stalls], s=6, color=_STALL, label="gap over the target"
    )
    axes.set_yscale("log")
    _time_axis(axes.yaxis)


def _target(axes: Any, value: float, *, vertical: bool) -> None:
    draw = axes.axvline if vertical else axes.axhline
    draw(value, color=_GREY, linestyle="--", linewidth=1.0, label="target")


def _ttft(result: ReplayResult) -> Floats:
    return np.array([value for r in result.requests if (value := ttft_s(r)) is not None])


def _gaps(result: ReplayResult) -> Floats:
    found = [gaps_s(request) for request in result.requests]
    return np.concatenate(found) if found else np.zeros(0)


def _stretch(share: float) -> float:
    return -math.log10(1.0 - share)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) and value > 0 else None


def _time_axis(axis: Any) -> None:
    """Ticks at 1, 2 and 5 of a logarithmic axis, as far as there is room, with units."""
    low, high = axis.get_view_interval()
    wide = low > 0 and high / low > 300
    axis.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(_time_label))
    axis.set_minor_locator(NullLocator())


def _time_label(seconds: float, _: object = None) -> str:
    if seconds <= 0:
        return "0"
    if seconds < 1e-3:
        return f"{seconds * 1e6:g} µs"
    return f"{seconds * 1e3:g} ms" if seconds < 1.0 else f"{seconds:g} s"
