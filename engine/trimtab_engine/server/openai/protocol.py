"""Request bodies of the OpenAI surface: which fields exist and of which type. pydantic lives here and nowhere else.

`parse` turns bytes into a model or a RequestError that names the parameter. Fields we do not know are ignored (SDKs send
extras); fields we know and cannot serve are refused by name. Ranges are `params`' matter, meaning that of the handlers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, ValidationError

from trimtab_engine.errors import RequestError
from trimtab_engine.server.openai.errors import short


class StreamOptions(BaseModel):
    """Usage in streams."""

    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(BaseModel):
    """What completions and chat have in common; None is OpenAI's "not given"."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    # Extensions, as vLLM names them.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    slo_class: str | None = None
    vllm_xargs: dict[str, Any] | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions. Messages stay plain objects: the model's template decides what it needs."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(BaseModel):
    """POST /tokenize: a prompt or messages."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    tokens: list[int]


def _given(value: object) -> bool:
    return bool(value)


# Parameter → whether its value asks for something that we do not do (null, empty and neutral values do not).
_UNSUPPORTED: Mapping[str, Callable[[Any], bool]] = {
    "tools": _given,
    "functions": _given,
    "tool_choice": lambda value: value not in (None, "none", "auto"),
    "function_call": lambda value: value not in (None, "none", "auto"),
    "response_format": lambda value: value is not None and value != {"type": "text"},
    "modalities": lambda value: value not in (None, [], ["text"]),
    "audio": _given,
    "prediction": _given,
    "web_search_options": lambda value: value is not None,
    "suffix": _given,
    "guided_json": lambda value: value is not None,
    "guided_regex": lambda value: value is not None,
    "guided_choice": lambda value: value is not None,
    "guided_grammar": lambda value: value is not None,
    "structured_outputs": lambda value: value is not None,
    "use_beam_search": _given,
    "prompt_embeds": lambda value: value is not None,
    "mm_processor_kwargs": _given,
    "chat_template": lambda value: value is not None,
    "documents": _given,
}

BodyT = TypeVar("BodyT", bound=BaseModel)


def parse(raw: bytes, model: type[BodyT]) -> BodyT:
    """Decode and type-check a body; raises RequestError."""
    try:
        data = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise RequestError(f"the body must be a JSON object, not {_json_type(data)}")
    for name, asks in _UNSUPPORTED.items():
        if name in data and asks(data[name]):
            raise RequestError(
                f"{name}: {short(data[name])} is not supported by this server; leave it out",
                param=name,
                code="unsupported_parameter",
            )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        # Members of a union appear in the location ("prompt", "list[int]", 1): only the path is for the reader.
        path = [str(first["loc"][0]), *(str(part) for part in first["loc"][1:] if isinstance(part, int))]
        name = ".".join(path)
        if first["type"] == "missing":
            raise RequestError(f"{name}: missing; it is required", param=name) from error
        raise RequestError(
            f"{name}: {short(first['input'])} is not allowed; {first['msg']}", param=path[0]
        ) from error


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
