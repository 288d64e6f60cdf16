"""The router of the OpenAI surface: reads bodies, checks keys, classes and models, starts requests, answers errors.

`main` includes it in the serving app. Request ids and the gate while the model loads are the access middleware's matter.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from trimtab_engine.errors import NotReady, RequestError, TrimtabError
from trimtab_engine.server.openai import chat, completions
from trimtab_engine.server.openai.auth import ApiKeys
from trimtab_engine.server.openai.chat import ChatFormat
from trimtab_engine.server.openai.completions import CompletionFormat
from trimtab_engine.server.openai.errors import HttpError, error_response, json_response
from trimtab_engine.server.openai.generation import Plan, Prompt, start
from trimtab_engine.server.openai.params import (
    Limits,
    check_model,
    check_stream,
    num_choices,
    own_targets,
    refuse,
    sampling_params,
    stop_strings,
)
from trimtab_engine.server.openai.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TokenizeBody,
    parse,
)
from trimtab_engine.server.openai.stream import ClientGone, EventStream, Format, buffered
from trimtab_engine.server.openai.tokenize import detokenize, tokenize
from trimtab_engine.server.state import AppState
from trimtab_engine.server.text.model_text import ModelText

MAX_BODY_BYTES = 32 << 20
GENERATION_HEADER = "x-trimtab-generation"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_CLIENT_CLOSED_REQUEST = 499  # nginx's number, for the access log; nobody receives it

Handler = Callable[[Request, str | None, bytes, float], Awaitable[Response]]


def build_router(state: AppState) -> APIRouter:
    """All routes of this surface. Raises ConfigError when the API-key file is unusable."""
    router = APIRouter()
    keys = None if state.options.api_keys is None else ApiKeys(state.options.api_keys)
    served = state.options.served_model_name
    started = int(time.time())

    def text() -> ModelText:
        if state.text is None:
            raise NotReady("the model is still loading", retry_after_s=2)
        return state.text

    def limits() -> Limits:
        info = state.client.info
        return Limits(max_model_len=info.max_model_len, vocab_size=info.vocab_size)

    async def answer(request: Request, handler: Handler) -> Response:
        try:
            tenant = None if keys is None else keys.tenant(request.headers.get("authorization"))
            raw = await _read(request)
            return await handler(request, tenant, raw, time.monotonic())
        except TrimtabError as error:
            return error_response(error)
        except (ClientGone, ClientDisconnect):
            return Response(status_code=_CLIENT_CLOSED_REQUEST)

    async def run(
        request: Request,
        body: CompletionBody | ChatBody,
        tenant: str | None,
        arrival_s: float,
    ) -> Response:
        check_model(body.model, served)
        check_stream(body)
        model, room = text(), limits()
        n = num_choices(body)
        sampling = sampling_params(body, defaults=model.sampling_defaults, limits=room)
        stops = stop_strings(body)
        slo_class = _slo_class(state, request, body)
        ttft_s, itl_s = own_targets(body)
        listed: list[Prompt]
        shape: Format
        reply_id, created = _reply_id(body), int(time.time())
        if isinstance(body, ChatBody):
            listed = [await chat.prompt(body, model, room)]
            shape = ChatFormat(
                body, reply_id=reply_id, created=created, model=served, tokenizer=model.tokenizer
            )
        else:
            completions.check(body)
            listed = await completions.prompts(body, model.tokenizer, room)
            shape = CompletionFormat(
                body, reply_id=reply_id, created=created, model=served, tokenizer=model.tokenizer
            )
        plan = Plan(
            id=reply_id,
            arrival_s=arrival_s,
            prompts=listed,
            n=n,
            sampling=sampling,
            stops=stops,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            slo_class=slo_class,
            ttft_s=ttft_s,
            itl_s=itl_s,
            tenant=_trusted(request, state.options.trusted_tenant_header) or tenant,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
        )
        if plan.priority and state.live.in_force.config.scheduling_policy == "fcfs":
            state.ledger.ignored_priority_total += 1
        choices = start(state.client, state.ledger, model.tokenizer, plan)
        headers = {GENERATION_HEADER: str(state.ledger.generation)}
        if not body.stream:
            return await buffered(choices, shape, n, request.receive, headers)
        options = body.stream_options
        return EventStream(
            choices,
            shape,
            n,
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
            headers=headers,
            stall_timeout_s=state.options.client_stall_timeout_s,
            hold_status=state.options.shed_late,
        )

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        async def handler(request: Request, tenant: str | None, raw: bytes, arrival_s: float) -> Response:
            return await run(request, parse(raw, CompletionBody), tenant, arrival_s)

        return await answer(request, handler)

    @router.post("/v1/chat/completions")
    async def create_chat_completion(request: Request) -> Response:
        async def handler(request: Request, tenant: str | None, raw: bytes, arrival_s: float) -> Response:
            return await run(request, parse(raw, ChatBody), tenant, arrival_s)

        return await answer(request, handler)

    @router.post("/tokenize")
    async def tokenize_text(request: Request) -> Response:
        async def handler(request: Request, tenant: str | None, raw: bytes, arrival_s: float) -> Response:
            body = parse(raw, TokenizeBody)
            check_model(body.model, served)
            return json_response(await tokenize(body, text(), limits()))

        return await answer(request, handler)

    @router.post("/detokenize")
    async def detokenize_ids(request: Request) -> Response:
        async def handler(request: Request, tenant: str | None, raw: bytes, arrival_s: float) -> Response:
            body = parse(raw, DetokenizeBody)
            check_model(body.model, served)
            return json_response(await detokenize(body, text(), limits()))

        return await answer(request, handler)

    def card() -> dict[str, object]:
        return {
            "id": served,
            "object": "model",
            "created": started,
            "owned_by": "trimtab",
            "max_model_len": state.client.info.max_model_len,
        }

    @router.get("/v1/models")
    async def list_models(request: Request) -> Response:
        async def handler(request: Request, tenant: str | None, raw: bytes, arrival_s: float) -> Response:
            return json_response({"object": "list", "data": [card()]})

        return await answer(request, handler)

    @router.get("/load")
    async def load(request: Request) -> Response:
        return json_response({"server_load": state.client.num_open})

    @router.get("/v1/models/{name:path}")
    async def show_model(request: Request, name: str) -> Response:
        async def handler(request: Request, tenant: str | None, raw: bytes, arrival_s: float) -> Response:
            check_model(name, served)
            return json_response(card())

        return await answer(request, handler)

    return router


async def _read(request: Request) -> bytes:
    """The whole body; raises HttpError 413 as soon as it is too long, ClientDisconnect when the client leaves."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES:
            raise HttpError(413, f"the body is longer than {MAX_BODY_BYTES} bytes", code="body_too_large")
        chunks.append(chunk)
    return b"".join(chunks)


def _trusted(request: Request, header: str | None) -> str | None:
    """Value of a header that the operator of this server trusts; None when none is, or it is absent."""
    return (request.headers.get(header) or None) if header else None


def _slo_class(state: AppState, request: Request, body: GenerationBody) -> str:
    """Class of the request: the trusted header's word, else the body's, else the default; unknown names are refused."""
    slo = state.ledger.slo
    name = _trusted(request, state.options.trusted_class_header) or body.slo_class
    if name is None and body.vllm_xargs is not None:
        name = body.vllm_xargs.get("slo_class")
    if name is None:
        return slo.default_class
    if not isinstance(name, str) or slo.by_name(name) is None:
        raise refuse("slo_class", name, f"one of {', '.join(c.name for c in slo.classes)}")
    return name


def _reply_id(body: CompletionBody | ChatBody) -> str:
    given = body.request_id
    if given is not None and not _REQUEST_ID.fullmatch(given):
        raise RequestError(
            f"request_id: {given[:80]!r} is not allowed; 1 to 128 printable characters without spaces",
            param="request_id",
        )
    return f"{'chatcmpl' if isinstance(body, ChatBody) else 'cmpl'}-{given or uuid.uuid4().hex}"
