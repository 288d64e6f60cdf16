"""One table of every engine knob: the field of spec, the engine's flag, defaults and bounds. Each pair is held on both sides.

The engine's word is taken from its own command line and its own live document, by trying values at the edge and just beyond it,
so that a bound that moves in one place alone fails here. A knob of the engine that is in no row, or a field of spec that is in
none, fails too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest

from support.crd_fields import leaves
from support.services import service
from trimtab_engine import cli
from trimtab_engine.config import EngineConfig
from trimtab_engine.core.live import Ceilings, LiveConfig
from trimtab_engine.errors import ConfigError
from trimtab_engine.server.options import ServerOptions
from trimtab_operator import names
from trimtab_operator.api import service as api
from trimtab_operator.api.parse import wire_name
from trimtab_operator.errors import InvalidResource
from trimtab_operator.quantities import parse_duration

FIELDS = leaves(names.SERVICE_KIND)
LARGEST = 1_048_576
ROOM = ("--ceiling-max-num-batched-tokens", str(LARGEST), "--ceiling-max-num-seqs", str(LARGEST))


class Engine:
    """What the engine makes of a command line; raises ConfigError or SystemExit when it refuses it."""

    def __init__(self, *words: str) -> None:
        arguments = cli.build_parser().parse_args(["serve", "m", *words])
        self.config, self.server, versioned, _ = cli.configuration(arguments)
        self.live = versioned.config


@dataclass(frozen=True)
class Row:
    """`read` finds the knob in the engine. `beside` are words that a value at the edge needs. `wider` says why the engine takes
    more than the CRD does; empty when both take the same."""

    knob: str  # of EngineConfig, ServerOptions or LiveConfig
    flag: str
    read: Callable[[Engine], Any]
    beside: tuple[str, ...] = ()
    wider: str = ""


DRAIN = "an engine without Kubernetes may drain for a day, or not at all; a pod's grace period should not"
TABLE = {
    "engine.maxNumBatchedTokens": Row(
        "max_num_batched_tokens",
        "--max-num-batched-tokens",
        lambda e: e.live.max_num_batched_tokens,
        (*ROOM, "--max-num-seqs", "1"),
    ),
    "engine.maxNumSeqs": Row(
        "max_num_seqs",
        "--max-num-seqs",
        lambda e: e.live.max_num_seqs,
        (*ROOM, "--max-num-batched-tokens", str(LARGEST)),
    ),
    "engine.schedulingPolicy": Row(
        "scheduling_policy", "--scheduling-policy", lambda e: e.live.scheduling_policy
    ),
    "engine.longPrefillTokenThreshold": Row(
        "long_prefill_token_threshold",
        "--long-prefill-token-threshold",
        lambda e: e.live.long_prefill_token_threshold,
        ROOM,
    ),
    "engine.priorityAging": Row("priority_aging_s", "--priority-aging", lambda e: e.live.priority_aging_s),
    "engine.ceilings.maxNumBatchedTokens": Row(
        "ceilings", "--ceiling-max-num-batched-tokens", lambda e: e.config.ceilings.max_num_batched_tokens
    ),
    "engine.ceilings.maxNumSeqs": Row(
        "ceilings", "--ceiling-max-num-seqs", lambda e: e.config.ceilings.max_num_seqs
    ),
    "engine.maxModelLen": Row("max_model_len", "--max-model-len", lambda e: e.config.max_model_len),
    "engine.dtype": Row("dtype", "--dtype", lambda e: e.config.dtype),
    "engine.kvBlockSize": Row("block_size", "--block-size", lambda e: e.config.block_size),
    "engine.kvCacheMemory": Row("kv_cache_bytes", "--kv-cache-memory", lambda e: e.config.kv_cache_bytes),
    "engine.gpuMemoryUtilization": Row(
        "gpu_memory_utilization", "--gpu-memory-utilization", lambda e: e.config.gpu_memory_utilization
    ),
    "engine.enablePrefixCaching": Row(
        "enable_prefix_caching", "--no-enable-prefix-caching", lambda e: e.config.enable_prefix_caching
    ),
    "engine.maxQueuedRequests": Row(
        "max_queued_requests", "--max-queued-requests", lambda e: e.server.max_queued_requests
    ),
    "slo.ttft": Row("slo", "--slo-ttft", lambda e: e.live.slo.classes[0].ttft_s),
    "slo.itl": Row("slo", "--slo-itl", lambda e: e.live.slo.classes[0].itl_s),
    "slo.trustedHeaders.class": Row(
        "trusted_class_header", "--trusted-class-header", lambda e: e.server.trusted_class_header
    ),
    "slo.trustedHeaders.tenant": Row(
        "trusted_tenant_header", "--trusted-tenant-header", lambda e: e.server.trusted_tenant_header
    ),
    "rollout.drainTimeout": Row(
        "drain_timeout_s", "--drain-timeout", lambda e: e.server.drain_timeout_s, wider=DRAIN
    ),
}
#: Only in the live document; their bounds are tried in it (test_bounds).
DOCUMENT = ("slo.objective", "slo.defaultClass", *(p for p in FIELDS if p.startswith("slo.classes[].")))
#: Fields of these sections that an engine of ours never hears of.
NOT_THE_ENGINES = (
    "engine.runtime", "engine.image", "engine.imagePullPolicy", "engine.imagePullSecrets[].name", "engine.extraArgs",
    "engine.tensorParallelSize", "slo.window",
)  # fmt: skip
#: Knobs of the engine that the operator sets by where the engine runs, or that extraArgs may set.
PLACEMENT = {
    "model", "served_model_name", "host", "port", "admin_host", "admin_port", "port_file", "live_config", "api_keys",
    "admin_public_key", "admin_audience", "leaving_time_s", "log_format", "revision", "hub_ca_file", "hub_limit_bytes",
}  # fmt: skip
FREE = {
    "device", "swap_bytes", "prefill_first", "shed_late", "fair_tenants", "batch_invariant", "num_threads", "seed",
    "record_steps", "cache_dir", "stall_timeout_s", "client_stall_timeout_s", "hub_endpoint", "hub_patience_s", "step_model",
}  # fmt: skip


def owner(path: str) -> tuple[Any, Any]:
    """(dataclass field, its default) of a field of spec, by its path on the wire."""
    value: Any = api.ServiceSpec(model=api.Model("file:///m"))
    found = None
    for step in path.split("."):
        if value is None:  # an optional object: its class says it
            value = {"trustedHeaders": api.TrustedHeaders()}[step]
        found = next(f for f in fields(value) if wire_name(f.name, f.metadata) == step)
        value = getattr(value, found.name)
    return found, value


def takes(row: Row, text: str) -> bool:
    """Whether the engine starts with this value."""
    try:
        Engine(*row.beside, row.flag, text)
    except (ConfigError, SystemExit):
        return False
    return True


def test_every_field_of_engine_and_slo_is_in_one_table() -> None:
    ours = [p for p in FIELDS if p.startswith(("engine.", "slo."))] + ["rollout.drainTimeout"]
    assert sorted((*TABLE, *DOCUMENT, *NOT_THE_ENGINES)) == sorted(ours)


def test_every_knob_of_the_engine_is_in_one_table() -> None:
    knobs = {f.name for cls in (EngineConfig, ServerOptions, LiveConfig) for f in fields(cls)}
    assert {row.knob for row in TABLE.values()} | PLACEMENT | FREE == knobs
    assert not PLACEMENT & FREE


@pytest.mark.parametrize("path", TABLE)
def test_the_default_is_one_in_three_places(path: str) -> None:
    field, ours = owner(path)
    theirs = TABLE[path].read(Engine())
    written = FIELDS[path].get("default")
    if field.metadata.get("text") == "duration" and written is not None:
        written = parse_duration(written)
    assert ours == written
    if written is None and theirs is not None:
        assert f"Absent means {theirs}" in FIELDS[path]["description"]
    else:
        assert theirs == ours


def edges(path: str) -> tuple[list[str], list[str]]:
    """(values that both sides take, values that neither takes), as words of a command line."""
    schema, metadata = FIELDS[path], owner(path)[0].metadata
    if "enum" in schema:
        return [str(choice) for choice in schema["enum"]], ["nonsense", "7", "-1"]
    if metadata.get("text") == "duration":
        low, high = metadata["low"], metadata["high"]
        return [f"{low}", f"{high}"], [f"{low * 0.999:.9f}"] * bool(low) + [f"{high * 1.001}"]
    if metadata.get("text") == "size":
        return ["1", str(2**40)], ["0", "-1", "lots"]
    if schema["type"] == "integer":
        low, high = schema["minimum"], schema["maximum"]
        return [f"{low}", f"{high}"], [f"{low - 1}", f"{high + 1}", "1.5"]
    if schema["type"] == "number":
        low, high = schema["minimum"], schema["maximum"]
        return [f"{low}", f"{high}"], [f"{low - 0.001}", f"{high + 0.001}"]
    return [], []


@pytest.mark.parametrize("path", TABLE)
def test_the_engine_takes_what_the_crd_takes_and_refuses_just_beyond(path: str) -> None:
    row = TABLE[path]
    inside, beyond = edges(path)
    assert [text for text in inside if not takes(row, text)] == []
    taken = [text for text in beyond if takes(row, text)]
    if row.wider:
        assert taken, f"{path} is no wider in the engine any more: {row.wider}"
    else:
        assert taken == []


@pytest.mark.parametrize("path", TABLE)
def test_the_crd_refuses_just_beyond(path: str) -> None:
    schema = FIELDS[path]
    for text in edges(path)[1]:
        value: Any = text
        if schema["type"] in ("integer", "number"):
            value = float(text) if "." in text else int(text) if text.lstrip("-").isdigit() else text
        elif owner(path)[0].metadata.get("text") == "duration":
            value = f"{text}s"
        with pytest.raises(InvalidResource, match=path):
            service(**{path: value})


def test_ceilings_bound_both_sides_alike() -> None:
    small = Ceilings(max_num_batched_tokens=128, max_num_seqs=8)
    words = ("--ceiling-max-num-batched-tokens", "128", "--ceiling-max-num-seqs", "8")
    engine = {
        "ceilings": {"maxNumBatchedTokens": 128, "maxNumSeqs": 8},
        "maxNumBatchedTokens": 64,
        "maxNumSeqs": 4,
    }
    assert Engine(*words, "--max-num-batched-tokens", "128", "--max-num-seqs", "8").config.ceilings == small
    service(engine={**engine, "maxNumBatchedTokens": 128, "maxNumSeqs": 8})
    for field, flag, value in (
        ("maxNumBatchedTokens", "--max-num-batched-tokens", 129),
        ("maxNumSeqs", "--max-num-seqs", 9),
        ("longPrefillTokenThreshold", "--long-prefill-token-threshold", 129),
    ):
        with pytest.raises(ConfigError):
            Engine(*words, flag, str(value))
        with pytest.raises(InvalidResource, match="must not exceed"):
            service(engine={**engine, field: value})
