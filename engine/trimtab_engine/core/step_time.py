"""How long a step takes: the step-time model, what it knows of a step, and the questions that a policy asks of it.

    t = f(tokens) + a_seq·sequences + a_kv·Σ decode context + a_quad·Σ chunk·(context + chunk/2)

f is piecewise linear over `KNOTS` and never falls; no coefficient is negative. A straight line would miss CPU steps by 18
to 47 %, and without the quadratic term (attention of a prompt's chunk over itself and what came before) long prompts look
cheap. Fitted by `core.step_fit` in the engine loop; used by `core.deadlines`, the simulator and the tuner. Pure: no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from trimtab_engine.errors import ConfigError

if TYPE_CHECKING:
    from trimtab_engine.core.step import Step

KNOTS = (1, 2, 4, 6, 8, 16, 64, 256, 1024, 4096)
NUM_SLOPES = len(KNOTS) - 1  # the last slope goes on beyond the last knot
TERMS = (
    "base",
    *(f"tokens_from_{knot}" for knot in KNOTS[:-1]),
    "sequences",
    "decode_context",
    "prefill_attention",
)
FORMAT = 1


class StepFeatures(NamedTuple):
    """What the time of a step depends on."""

    tokens: int  # query tokens of all rows
    sequences: int  # rows
    decode_context: int  # tokens that decode rows attend to, summed
    prefill_attention: float  # Σ chunk·(context + chunk/2) over prompt rows


def features_of(step: Step) -> StepFeatures:
    """The features of a scheduled step."""
    context, chunk = step.context, step.chunk
    rows = range(step.num_decodes, len(chunk))
    return StepFeatures(
        tokens=step.num_tokens,
        sequences=len(chunk),
        decode_context=sum(context[: step.num_decodes]),
        prefill_attention=sum(chunk[i] * (context[i] + chunk[i] / 2) for i in rows),
    )


def basis(features: StepFeatures) -> list[float]:
    """The features as the vector that the coefficients multiply, in the order of `TERMS`."""
    tokens = features.tokens
    row = [1.0]
    for low, high in pairwise(KNOTS[:-1]):
        row.append(float(min(max(tokens - low, 0), high - low)))
    row.append(float(max(tokens - KNOTS[-2], 0)))
    row += (float(features.sequences), float(features.decode_context), float(features.prefill_attention))
    return row


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """Coefficients in seconds, in the order of `TERMS`, and how far held-out steps were off.

    `error_low` and `error_high` are the 5 % and 95 % quantiles of (measured / predicted - 1). `largest_tokens` is the
    largest step that ran: what lies beyond is extrapolated.
    """

    coefficients: tuple[float, ...]
    error_low: float = 0.0
    error_high: float = 0.0
    largest_tokens: float = math.inf

    def __post_init__(self) -> None:
        assert len(self.coefficients) == len(TERMS), f"{len(self.coefficients)} coefficients for {len(TERMS)}"

    def predict(self, features: StepFeatures) -> float:
        """Seconds that such a step takes; 0 for a step without tokens."""
        tokens, sequences, decode_context, prefill_attention = features
        if tokens <= 0:
            return 0.0
        c = self.coefficients
        total = c[0] + c[-3] * sequences + c[-2] * decode_context + c[-1] * prefill_attention
        for index in range(NUM_SLOPES):
            low = KNOTS[index]
            if tokens <= low:
                break
            reached = tokens if index == NUM_SLOPES - 1 else min(tokens, KNOTS[index + 1])
            total += c[1 + index] * (reached - low)
        return total

    def interval(self, features: StepFeatures) -> tuple[float, float]:
        """Seconds between which nine of ten such steps lie; wider, in proportion, beyond the largest step that ran."""
        seconds = self.predict(features)
        beyond = max(1.0, features.tokens / self.largest_tokens)
        return seconds * (1 + self.error_low) / beyond, seconds * (1 + self.error_high) * beyond

    def prefill_s(self, tokens: int, context: int, chunk: int) -> float:
        """Seconds to compute `tokens` of a prompt after `context` computed ones, alone, in steps of `chunk`.

        Σ chunk·(context + chunk/2) over the chunks of a prompt is tokens·(context + tokens/2), however it is cut.
        """
        if tokens <= 0:
            return 0.0
        whole, rest = divmod(tokens, max(1, chunk))
        seconds = whole * self.predict(StepFeatures(chunk, 1, 0, 0.0))
        seconds += self.predict(StepFeatures(rest, 1, 0, 0.0))
        return seconds + self.coefficients[-1] * tokens * (context + tokens / 2)

    def prompt_rates(self, chunk: int) -> tuple[float, float]:
        """(seconds a token, seconds a token of attention): a prompt of n tokens in steps of `chunk` takes about
        n·first + n²/2·second. A cheap `prefill_s` for comparing many."""
        chunk = max(1, chunk)
        return self.predict(StepFeatures(chunk, 1, 0, 0.0)) / chunk, self.coefficients[-1]

    def largest_chunk(self, rows: StepFeatures, context: int, most: int, limit_s: float) -> int:
        """How many tokens of one more prompt fit: the largest chunk up to `most` with which the step still takes, by the
        upper end of the interval, at most `limit_s`; 0 when none does. `rows` are already in the step."""

        def fits(chunk: int) -> bool:
            step = StepFeatures(
                rows.tokens + chunk,
                rows.sequences + 1,
                rows.decode_context,
                rows.prefill_attention + chunk * (context + chunk / 2),
            )
            return self.interval(step)[1] <= limit_s

        if most <= 0 or not fits(1):
            return 0
        if fits(most):
            return most
        low, high = 1, most  # low fits, high does not
        while high - low > 1:
            middle = (low + high) // 2
            if fits(middle):
                low = middle
            else:
                high = middle
        return low

    def to_json(self) -> dict[str, object]:
        """Plain JSON form; `from_json` reads it back to an equal value."""
        return {
            "format": FORMAT,
            "knots": list(KNOTS),
            "coefficients": dict(zip(TERMS, self.coefficients, strict=True)),
            "error_low": self.error_low,
            "error_high": self.error_high,
            "largest_tokens": None if math.isinf(self.largest_tokens) else self.largest_tokens,
        }

    @classmethod
    def from_json(cls, raw: object, path: str = "step_model") -> StepTimeModel:
        """Parse and check; ConfigError with path, value and allowed range. Further keys are ignored.

        `raw` may also be what `/admin/step-model` answers, which holds the model under "model".
        """
        data = _mapping(raw, path)
        if "coefficients" not in data and data.get("model") is not None:
            data, path = _mapping(data["model"], f"{path}.model"), f"{path}.model"
        if data.get("format") != FORMAT:
            raise ConfigError(f"{path}.format", data.get("format"), f"{FORMAT}")
        if data.get("knots") != list(KNOTS):
            raise ConfigError(f"{path}.knots", data.get("knots"), f"{list(KNOTS)}")
        coefficients = _mapping(data.get("coefficients"), f"{path}.coefficients")
        for name in coefficients:
            if name not in TERMS:
                raise ConfigError(
                    f"{path}.coefficients.{name}", coefficients[name], f"one of {', '.join(TERMS)}"
                )
        largest = data.get("largest_tokens")
        return cls(
            coefficients=tuple(_number(coefficients, f"{path}.coefficients", name, 0.0) for name in TERMS),
            error_low=_number(data, path, "error_low", -1.0),
            error_high=_number(data, path, "error_high", -1.0),
            largest_tokens=math.inf if largest is None else _number(data, path, "largest_tokens", 1.0),
        )


def _mapping(raw: object, path: str) -> Mapping[str, object]:
    if not isinstance(raw, Mapping):
        raise ConfigError(path, raw, "a JSON object")
    return raw


def _number(data: Mapping[str, object], path: str, key: str, low: float) -> float:
    value = data.get(key)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value < low
    ):
        raise ConfigError(f"{path}.{key}", value, f"a finite number of at least {low:g}")
    return float(value)
