"""From a checked body to `SamplingParams`: defaults, ranges, what goes together, what fits into the model.

Pure. Each error names parameter, value and allowed range; nothing has been started when it is raised. The ranges are those
of vLLM's documentation, where OpenAI's are narrower or absent.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab_engine.core.request import SamplingParams
from trimtab_engine.errors import RequestError, RequestTooLarge
from trimtab_engine.server.openai.errors import HttpError, short
from trimtab_engine.server.openai.protocol import ChatBody, CompletionBody, GenerationBody

MAX_CHOICES = 128
MAX_SEQUENCES = 1024  # prompts × n of one request
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024  # characters; bounds what a stream can be held back by
MAX_LOGPROBS = 20
COMPLETION_MAX_TOKENS = 16  # OpenAI's default for /v1/completions
MAX_TEXT_LENGTH = (
    1 << 20
)  # characters that are encoded whatever the model's length: /tokenize counts long documents
INT64 = 1 << 63


@dataclass(frozen=True, slots=True)
class Limits:
    """What the served model can take."""

    max_model_len: int
    vocab_size: int


def refuse(name: str, value: object, allowed: str) -> RequestError:
    """The error of a wrong parameter, to be raised."""
    return RequestError(f"{name}: {short(value)} is not allowed; {allowed}", param=name)


def _number(name: str, value: float, low: float, high: float, *, above: bool = False) -> float:
    if not math.isfinite(value) or not (low < value if above else low <= value) or not value <= high:
        lower = f"more than {low:g}" if above else f"at least {low:g}"
        upper = "" if high == float("inf") else f" and at most {high:g}"
        raise refuse(name, value, f"a number of {lower}{upper}")
    return float(value)


def _integer(name: str, value: int, low: int, high: int | None = None) -> int:
    if value < low or (high is not None and value > high):
        raise refuse(
            name, value, f"an integer of at least {low}" + ("" if high is None else f" and at most {high}")
        )
    return value


def own_targets(body: GenerationBody) -> tuple[float | None, float | None]:
    """The request's own (TTFT, ITL) targets in seconds, within the bounds of a class's; None: those of its class."""

    def target(name: str, value: float | None) -> float | None:
        return None if value is None else _number(name, value, 0.001, 3600.0)

    return target("slo_ttft_s", body.slo_ttft_s), target("slo_itl_s", body.slo_itl_s)


def check_model(name: str | None, served: str) -> None:
    """Whether the request names the model that is served here; HTTP 404 else."""
    if name is not None and name != served:
        raise HttpError(
            404,
            f"model: {name!r} does not exist here; this server has {served!r}",
            param="model",
            code="model_not_found",
        )


def check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Whether all ids are in the vocabulary: an id outside reads or writes a neighbour's row in many engines."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        position = next(i for i, token in enumerate(token_ids) if not 0 <= token < vocab_size)
        raise RequestError(
            f"{name}[{position}]: {token_ids[position]} is not allowed; a token id from 0 to {vocab_size - 1}",
            param=name,
        )


def check_text(name: str, text: str, longest_token: int, limits: Limits) -> None:
    """Whether a text is worth encoding, which costs its length in time and 200 times its length in memory.

    One that is longer than the model's length in the longest tokens of its vocabulary cannot fit.
    """
    allowed = max(MAX_TEXT_LENGTH, limits.max_model_len * longest_token)
    if len(text) > allowed:
        raise RequestTooLarge(
            f"{name}: {len(text)} characters are not allowed; at most {allowed} (the model's length is "
            f"{limits.max_model_len} tokens, its longest token has {longest_token} characters)",
            param=name,
            code="context_length_exceeded",
        )


def num_choices(body: GenerationBody) -> int:
    """`n`."""
    return _integer("n", 1 if body.n is None else body.n, 1, MAX_CHOICES)


def stop_strings(body: GenerationBody) -> tuple[str, ...]:
    """`stop`, as a list."""
    stops = [body.stop] if isinstance(body.stop, str) else (body.stop or [])
    if len(stops) > MAX_STOPS:
        raise refuse("stop", f"{len(stops)} strings", f"at most {MAX_STOPS}")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise refuse(
                "stop",
                stop,
                f"1 to {MAX_STOP_LENGTH} characters each",
            )
    return tuple(dict.fromkeys(stops))


def check_stream(body: GenerationBody) -> None:
    """What streaming excludes."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: only allowed with stream: true", param="stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs: not allowed with stream: true", param="prompt_logprobs")


def sampling_params(body: GenerationBody, *, defaults: Mapping[str, float], limits: Limits) -> SamplingParams:
    """Everything but `max_tokens`, which depends on the prompt (`fit`). `defaults` are the model's own."""

    def given(name: str, fallback: float) -> float:
        value: float | None = getattr(body, name)
        return defaults.get(name, fallback) if value is None else value

    top_k = int(given("top_k", 0))
    prompt_logprobs = body.prompt_logprobs
    if isinstance(body, CompletionBody) and body.echo and body.logprobs is not None:
        prompt_logprobs = max(prompt_logprobs or 0, body.logprobs)
    stop_token_ids = body.stop_token_ids or []
    check_token_ids("stop_token_ids", stop_token_ids, limits.vocab_size)
    if body.seed is not None and not -INT64 <= body.seed < INT64:
        raise refuse("seed", body.seed, "an integer of 64 bits")
    if body.priority is not None and not -INT64 <= body.priority < INT64:
        raise refuse("priority", body.priority, "an integer of 64 bits")
    if prompt_logprobs is not None:
        _integer("prompt_logprobs", prompt_logprobs, 0, MAX_LOGPROBS)
    return SamplingParams(
        min_tokens=_integer("min_tokens", body.min_tokens or 0, 0),
        temperature=_number("temperature", given("temperature", 1.0), 0.0, 100.0),
        top_p=_number("top_p", given("top_p", 1.0), 0.0, 1.0, above=True),
        top_k=0 if top_k == -1 else min(_integer("top_k", top_k, 0), limits.vocab_size),
        min_p=_number("min_p", given("min_p", 0.0), 0.0, 1.0),
        presence_penalty=_number("presence_penalty", body.presence_penalty or 0.0, -2.0, 2.0),
        frequency_penalty=_number("frequency_penalty", body.frequency_penalty or 0.0, -2.0, 2.0),
        repetition_penalty=_number(
            "repetition_penalty", given("repetition_penalty", 1.0), 0.0, float("inf"), above=True
        ),
        logit_bias=_logit_bias(body.logit_bias or {}, limits.vocab_size),
        seed=body.seed,
        stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
        ignore_eos=bool(body.ignore_eos),
        num_logprobs=_num_logprobs(body),
        prompt_logprobs=prompt_logprobs,
    )


def _logit_bias(raw: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    bias: dict[int, float] = {}
    for key, value in raw.items():
        # int() alone takes "1_0" and digits of any script.
        if not (key.isascii() and key.isdigit() and len(key) <= 18 and (token_id := int(key)) < vocab_size):
            raise refuse("logit_bias", key, f"token ids from 0 to {vocab_size - 1} as keys")
        bias[token_id] = _number("logit_bias", value, -100.0, 100.0)
    return tuple(bias.items())


def _num_logprobs(body: GenerationBody) -> int | None:
    if isinstance(body, ChatBody):
        if not body.logprobs:
            if body.top_logprobs:
                raise RequestError("top_logprobs: only allowed with logprobs: true", param="top_logprobs")
            return None
        return _integer("top_logprobs", body.top_logprobs or 0, 0, MAX_LOGPROBS)
    assert isinstance(body, CompletionBody), "there are two kinds of bodies"
    return None if body.logprobs is None else _integer("logprobs", body.logprobs, 0, MAX_LOGPROBS)


@dataclass(frozen=True, slots=True)
class Fitted:
    """A prompt that fits, and how many tokens may follow (None: until the model's length)."""

    prompt_token_ids: list[int]
    max_tokens: int | None


def fit(body: GenerationBody, prompt_token_ids: list[int], limits: Limits) -> Fitted:
    """Truncate the prompt if asked to and settle `max_tokens`; raises RequestTooLarge with the real numbers.

    Too large is only a prompt without room for one token, or an explicit limit without room for all of them.
    `max_tokens` of 0 is allowed with echo alone, and is settled as 0.
    """
    name, asked = "max_tokens", body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        name, asked = "max_completion_tokens", body.max_completion_tokens
    echo = isinstance(body, CompletionBody) and bool(body.echo)
    if asked is not None:
        _integer(name, asked, 0 if echo else 1)
    room = max(1, asked or 1)
    ids = prompt_token_ids
    if (keep := body.truncate_prompt_tokens) is not None:
        if keep != -1 and keep < 1:
            raise refuse("truncate_prompt_tokens", keep, "an integer of at least 1, or -1 for what fits")
        keep = limits.max_model_len - room if keep == -1 else keep
        ids = ids[-keep:] if keep > 0 else ids
    if not ids:
        raise RequestError("prompt: empty; at least one token is needed", param="prompt")
    where = "messages" if isinstance(body, ChatBody) else "prompt"
    if len(ids) + 1 > limits.max_model_len:
        raise RequestTooLarge(
            f"{where}: {len(ids)} tokens are not allowed; the model's length is {limits.max_model_len} tokens, "
            f"so a prompt may have at most {limits.max_model_len - 1}",
            param=where,
            code="context_length_exceeded",
        )
    if len(ids) + room > limits.max_model_len:
        raise RequestTooLarge(
            f"{name}: {asked} is not allowed; the model's length is {limits.max_model_len} tokens and the prompt "
            f"has {len(ids)}, so at most {limits.max_model_len - len(ids)}",
            param=name,
            code="context_length_exceeded",
        )
    max_tokens = asked
    if asked is None and isinstance(body, CompletionBody):
        max_tokens = min(COMPLETION_MAX_TOKENS, limits.max_model_len - len(ids))
    minimum = body.min_tokens or 0
    most = limits.max_model_len - len(ids) if max_tokens is None else max_tokens
    if minimum > most:
        raise refuse("min_tokens", minimum, f"at most the number of tokens that may be generated ({most})")
    return Fitted(list(ids), max_tokens)
