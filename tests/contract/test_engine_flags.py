"""The command line and the live document that the operator writes, read by the engine's own parser."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.services import BUDGET_PARAMETER, resource, service
from trimtab_engine import cli
from trimtab_engine.config import EngineConfig
from trimtab_engine.core.live import Ceilings, LiveConfig
from trimtab_engine.server.options import ServerOptions
from trimtab_operator import schema
from trimtab_operator.api import InferenceService
from trimtab_operator.plan.engine_flags import OWNED_FLAGS, Placement, engine_arguments
from trimtab_operator.plan.live import live_document, recommend
from trimtab_operator.plan.manifests import Context, deployment

EVERYTHING: dict[str, Any] = {
    "model.servedName": "m",
    "engine.ceilings": {"maxNumBatchedTokens": 1024, "maxNumSeqs": 32},
    "engine.maxNumBatchedTokens": 512,
    "engine.maxNumSeqs": 16,
    "engine.schedulingPolicy": "priority",
    "engine.longPrefillTokenThreshold": 128,
    "engine.priorityAging": "1m30s",
    "engine.maxModelLen": 4096,
    "engine.dtype": "float32",
    "engine.kvBlockSize": 32,
    "engine.kvCacheMemory": "1536Mi",
    "engine.enablePrefixCaching": False,
    "engine.maxQueuedRequests": 7,
    "engine.extraArgs": ["--seed=9", "--batch-invariant"],
    "slo.ttft": "2s",
    "slo.itl": "250ms",
    "slo.trustedHeaders": {"class": "X-Class", "tenant": "X-Tenant"},
    "rollout.drainTimeout": "1m30s",
    "security.apiKeySecretRef": {"name": "keys"},
}
PLACED = Placement(
    host="0.0.0.0", port=8000, admin_host="0.0.0.0", admin_port=8001, port_file="/tmp/ports.json",
    api_keys="/keys/keys.yaml", admin_public_key="/live/admin.pem", admin_audience="uid", leaving_time_s=5,
    log_format="json",
)  # fmt: skip


def read(arguments: list[str]) -> tuple[EngineConfig, ServerOptions, LiveConfig]:
    """What the engine makes of a command line; SystemExit when its parser refuses it."""
    engine, server, live, boot_error = cli.configuration(cli.build_parser().parse_args(arguments))
    assert boot_error is None
    return engine, server, live.config


def test_every_field_arrives_at_the_engine_under_its_own_meaning() -> None:
    engine, server, live = read(engine_arguments(service(**EVERYTHING).spec, PLACED, include_live=True))
    assert engine == EngineConfig(
        model="/models/tiny", dtype="float32", max_model_len=4096, block_size=32, kv_cache_bytes=1536 * 2**20,
        enable_prefix_caching=False, batch_invariant=True, ceilings=Ceilings(1024, 32), seed=9,
    )  # fmt: skip
    assert server == ServerOptions(
        "m", host="0.0.0.0", port=8000, admin_host="0.0.0.0", admin_port=8001, port_file=Path("/tmp/ports.json"),
        max_queued_requests=7, drain_timeout_s=90.0, leaving_time_s=5.0, api_keys=Path("/keys/keys.yaml"),
        admin_public_key=Path("/live/admin.pem"), admin_audience="uid", trusted_class_header="X-Class",
        trusted_tenant_header="X-Tenant", log_format="json",
    )  # fmt: skip
    assert (live.max_num_batched_tokens, live.max_num_seqs, live.scheduling_policy) == (512, 16, "priority")
    assert (live.long_prefill_token_threshold, live.priority_aging_s) == (128, 90.0)
    assert (live.slo.classes[0].ttft_s, live.slo.classes[0].itl_s) == (2.0, 0.25)


def test_gpu_memory_share_arrives() -> None:
    engine, _, _ = read(engine_arguments(service(**{"engine.gpuMemoryUtilization": 0.55}).spec))
    assert engine.gpu_memory_utilization == 0.55


def test_live_fields_change_no_argument_of_a_pod() -> None:
    first = service(**EVERYTHING).spec
    live = {"engine.maxNumBatchedTokens": 64, "engine.schedulingPolicy": "fcfs", "slo.itl": "1s"}
    second = service(**{**EVERYTHING, **live}).spec
    assert engine_arguments(first, PLACED) == engine_arguments(second, PLACED)


@pytest.mark.parametrize(
    ("tokens", "seqs"), list(itertools.product((1, 63, 2047, 100_000), (1, 64, 1_048_576)))
)
def test_an_engine_without_live_json_starts_under_any_ceilings(tokens: int, seqs: int) -> None:
    ceilings = {"maxNumBatchedTokens": tokens, "maxNumSeqs": seqs}
    built = service(engine={"ceilings": ceilings, "maxNumBatchedTokens": 1, "maxNumSeqs": 1})
    read(engine_arguments(built.spec))


def test_the_arguments_of_a_pod_are_read_by_the_engine() -> None:
    container = deployment(service(**EVERYTHING), Context())["spec"]["template"]["spec"]["containers"][0]
    arguments = cli.build_parser().parse_args(container["args"])
    assert arguments.admin_audience == "$(POD_UID)"
    assert {e["name"] for e in container["env"]} >= {"POD_UID"}


def test_every_flag_of_the_engine_is_either_ours_or_free_for_extra_arguments() -> None:
    parser = cli.build_parser()
    commands = next(a for a in parser._actions if a.dest == "command")
    assert isinstance(commands.choices, dict)
    flags = {
        option.removeprefix("--")
        for action in commands.choices["serve"]._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    for_other_runtimes = {"enable-prefix-caching", "tensor-parallel-size", "scheduler-cls"}
    assert set(OWNED_FLAGS) - for_other_runtimes <= flags
    free = flags - set(OWNED_FLAGS)
    assert free == {
        "help", "device", "prefill-first", "batch-invariant", "num-threads", "seed", "cache-dir", "stall-timeout",
        "record-steps", "shed-late", "swap-memory", "fair-tenants", "client-stall-timeout", "step-model",
        "hub-endpoint", "hub-patience",
    }  # fmt: skip


@st.composite
def services(draw: st.DrawFn) -> InferenceService:
    """Valid services that vary in everything live."""
    ceiling = draw(st.integers(1, 1_048_576))
    seq_ceiling = draw(st.integers(1, 1_048_576))
    budget = draw(st.integers(1, ceiling))
    names = draw(st.lists(st.sampled_from(["default", "chat", "batch", "x.y_z-1"]), unique=True, max_size=4))
    spans = st.sampled_from(["1ms", "800ms", "1.5s", "2m", "1h", "59m59s"])
    changes: dict[str, Any] = {
        "engine.ceilings": {"maxNumBatchedTokens": ceiling, "maxNumSeqs": seq_ceiling},
        "engine.maxNumBatchedTokens": budget,
        "engine.maxNumSeqs": draw(st.integers(1, min(budget, seq_ceiling))),
        "engine.schedulingPolicy": draw(st.sampled_from(["fcfs", "priority", "sla-aware"])),
        "engine.longPrefillTokenThreshold": draw(st.integers(0, ceiling)),
        "engine.priorityAging": draw(st.sampled_from(["0", "0s", "30s", "24h"])),
        "slo.ttft": draw(spans),
        "slo.itl": draw(spans),
        "slo.objective": draw(st.sampled_from([50, 99, 99.9, 99.999])),
        "slo.classes": [{"name": name, "ttft": draw(spans)} for name in names],
        "slo.defaultClass": draw(st.sampled_from(["default", "interactive", "chat"])),
    }
    return schema.parse_service(resource(**changes))


@given(services())
def test_the_engine_takes_every_live_document_we_write(built: InferenceService) -> None:
    document = json.loads(json.dumps(live_document(built.spec, 7)))
    ceilings = Ceilings(
        built.spec.engine.ceilings.max_num_batched_tokens, built.spec.engine.ceilings.max_num_seqs
    )
    config = LiveConfig.from_json(document["config"], ceilings)
    assert config.to_json() == document["config"]
    assert (document["generation"], document["source"]) == (7, "Spec")


def test_the_engine_reads_our_live_json_at_start(tmp_path: Path) -> None:
    built = service(**{**EVERYTHING, "slo.classes": [{"name": "batch", "ttft": "60s"}]})
    path = tmp_path / "live.json"
    path.write_text(json.dumps(live_document(built.spec, 12)))
    arguments = engine_arguments(built.spec, Placement(live_config=str(path)))
    _, _, live, boot_error = cli.configuration(cli.build_parser().parse_args(arguments))
    assert boot_error is None
    assert (live.generation, live.source) == (12, "Spec")
    assert {c.name: c.ttft_s for c in live.config.slo.classes} == {"default": 2.0, "batch": 60.0}


def test_the_engine_takes_a_live_document_with_a_recommendation() -> None:
    built = service(tuning={"mode": "Apply", "parameters": [BUDGET_PARAMETER]})
    found = recommend(built.spec, {"max_num_batched_tokens": 256})
    document = live_document(built.spec, 2, found)
    assert document["source"] == "Recommendation"
    assert LiveConfig.from_json(document["config"], Ceilings()).max_num_batched_tokens == 256
