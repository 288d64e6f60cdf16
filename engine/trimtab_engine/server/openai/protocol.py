"""Request bodies of the OpenAI surface: which fields exist and of which type. pydantic lives here and nowhere else.

`parse` turns bytes into a model or a RequestError that names the parameter, in time that a stream beside it can wait:
lists are checked whole and by their first fault (pydantic would judge each item by each member of a union and keep every
error: 20 s for a wrong body of 30 MB). Fields we do not know are ignored (SDKs send
extras); fields we know and cannot serve are refused by name. Ranges are `params`' matter, meaning that of the handlers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from trimtab_engine.errors import RequestError
from trimtab_engine.server import strict_json
from trimtab_engine.server.openai.errors import short

_NOUNS: Mapping[type, tuple[str, str]] = {
    str: ("a string", "strings"),
    int: ("an integer", "integers"),
    dict: ("an object", "objects"),
    list: ("a list", "lists"),
}


def _list_of(kind: type, value: object) -> Any:
    """`value` as it is, a list of plain `kind`s; raises the error that names its first other item."""
    one, many = _NOUNS[kind]
    if not isinstance(value, list):
        raise PydanticCustomError("list", "a list of {many} is wanted", {"many": many})
    if not set(map(type, value)) <= {kind}:
        place, item = next((i, item) for i, item in enumerate(value) if type(item) is not kind)
        raise PydanticCustomError(
            "item", "item {place} is {item}, not {one}", {"place": place, "item": short(item), "one": one}
        )
    return value


def _integers(value: object) -> Any:
    return _list_of(int, value)


def _objects(value: object) -> Any:
    return _list_of(dict, value)


def _strings(value: object) -> Any:
    return value if isinstance(value, str) else _list_of(str, value)


def _prompt(value: object) -> Any:
    first = value[0] if isinstance(value, list) and value else ""
    if isinstance(first, list):
        for ids in _list_of(list, value):
            _list_of(int, ids)
        return value
    return _list_of(int, value) if type(first) is int else _strings(value)


_Strings = Annotated[str | list[str], PlainValidator(_strings)]
_Integers = Annotated[list[int], PlainValidator(_integers)]
_Objects = Annotated[list[dict[str, Any]], PlainValidator(_objects)]
_Prompt = Annotated[str | list[str] | list[int] | list[list[int]], PlainValidator(_prompt)]


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
    stop: _Strings | None = None
    # Extensions, as vLLM names them.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: _Integers | None = None
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
    slo_ttft_s: float | None = None
    slo_itl_s: float | None = None
    vllm_xargs: dict[str, Any] | None = None


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: _Prompt | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions. Messages stay plain objects: the model's template decides what it needs."""

    messages: _Objects
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
    messages: _Objects | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    tokens: _Integers


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
        data = strict_json.decode(raw)
    except ValueError as error:
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
