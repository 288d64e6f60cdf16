"""What a replay asks the server before and after: its model, limits, usable token ids, and which live config is in force.

Called by `replay.py` outside the measured time. Everything but the model list is optional, so any OpenAI-compatible server will do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import InputError, ServerError
from .prompts import ASSUMED_IDS, MIN_POOL, SAMPLE
from .slo import Slo
from .wire import Endpoint, call

_LIVE_CONFIG = re.compile(r"^trimtab_live_config_info\{(.*)\}\s+1(?:\.0)?\s*$", re.MULTILINE)
_SLO_TARGET = re.compile(r"^trimtab_slo_target_seconds\{(.*)\}\s+([0-9.e+-]+)\s*$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What the server says of itself. `token_ids` is the pool for prompts, `token_ids_from` says how it was found."""

    model: str
    max_model_len: int | None
    version: Any
    token_ids: tuple[int, ...]
    token_ids_from: str


def api_headers(key: str | None) -> dict[str, str]:
    """Headers that carry an API key, if there is one."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


async def inspect(
    endpoint: Endpoint, headers: Mapping[str, str], model: str | None, id_range: tuple[int, int] | None
) -> ServerInfo:
    """Ask for models, version and token ids. Raises ServerError, or InputError for an unknown model."""
    reply = await call(endpoint, "GET", "/v1/models", headers)
    document = reply.json
    if reply.status != 200 or not isinstance(document, dict) or not isinstance(document.get("data"), list):
        raise ServerError(
            f"GET {endpoint.url}/v1/models: expected 200 with a list of models, got {_said(reply.status, reply.body)}"
        )
    models = {str(each.get("id")): each for each in document["data"] if isinstance(each, dict)}
    if not models:
        raise ServerError(f"GET {endpoint.url}/v1/models: the server offers no model")
    chosen = next(iter(models)) if model is None else model
    if chosen not in models:
        raise InputError("--model", model, f"one that the server offers: {', '.join(models)}")
    limit = models[chosen].get("max_model_len")
    version = await call(endpoint, "GET", "/version", headers)
    ids, origin = await _token_ids(endpoint, headers, chosen, id_range)
    return ServerInfo(
        model=chosen,
        max_model_len=limit if isinstance(limit, int) and limit > 0 else None,
        version=version.json if version.status == 200 else None,
        token_ids=ids,
        token_ids_from=origin,
    )


async def _token_ids(
    endpoint: Endpoint, headers: Mapping[str, str], model: str, id_range: tuple[int, int] | None
) -> tuple[tuple[int, ...], str]:
    if id_range is not None:
        return tuple(range(*id_range)), f"given range {id_range[0]}:{id_range[1]}"
    document = {"model": model, "prompt": SAMPLE, "add_special_tokens": False}
    reply = await call(endpoint, "POST", "/tokenize", headers, document)
    found = reply.json.get("tokens") if reply.status == 200 and isinstance(reply.json, dict) else None
    if (
        isinstance(found, list)
        and all(isinstance(each, int) for each in found)
        and len(set(found)) >= MIN_POOL
    ):
        return tuple(sorted(set(found))), "the server's /tokenize of a sample text"
    return tuple(
        range(*ASSUMED_IDS)
    ), f"assumed range {ASSUMED_IDS[0]}:{ASSUMED_IDS[1]} (no usable /tokenize)"


async def served_slo(endpoint: Endpoint, headers: Mapping[str, str]) -> Slo | None:
    """Targets in force by `trimtab_slo_target_seconds`; None where the server has no such metric.

    Requests of the class named default, or else of the first, are judged as those without a class.
    """
    try:
        reply = await call(endpoint, "GET", "/metrics", headers)
    except ServerError:
        return None  # whoever measures then says so
    text = reply.body.decode("utf-8", "replace") if reply.status == 200 else ""
    targets: dict[str, dict[str, float]] = {}
    for raw, value in _SLO_TARGET.findall(text):
        labels = dict(_LABEL.findall(raw))
        targets.setdefault(labels.get("slo_class", ""), {})[labels.get("slo", "")] = float(value)
    classes = {name: Slo(t["ttft"], t["itl"]) for name, t in targets.items() if {"ttft", "itl"} <= t.keys()}
    if not classes:
        return None
    standard = classes.pop("default", None) or classes.pop(next(iter(classes)))
    return Slo(standard.ttft_s, standard.itl_s, classes)


async def live_config(endpoint: Endpoint, headers: Mapping[str, str]) -> dict[str, str] | None:
    """Labels of `trimtab_live_config_info` at `/metrics`, or None when the server has no such metric."""
    try:
        reply = await call(endpoint, "GET", "/metrics", headers)
    except ServerError:
        return None
    match = _LIVE_CONFIG.search(reply.body.decode("utf-8", "replace")) if reply.status == 200 else None
    return dict(_LABEL.findall(match[1])) if match else None


def _said(status: int, body: bytes) -> str:
    return f"{status}: {body[:200].decode('utf-8', 'replace')}"
