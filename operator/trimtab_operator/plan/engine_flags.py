"""spec → the command line of one engine. The same function serves pods and local processes.

The words are exactly what `trimtab-engine serve` takes (`tests/contract` parses them with the engine's own parser). Where an
engine runs (ports, paths, keys) comes in as a `Placement`; everything else comes from spec, restart-only fields first.

Live fields stay out of a pod's arguments, since the pod template is their hash: the mounted live.json brings them. Without a
readable live.json the engine starts from its own defaults, which it cuts to the ceilings.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import unquote

from trimtab_operator.api.service import Model, ServiceSpec

#: Flags that extraArgs may not repeat; the CRD's rule lists the same (tests/contract).
OWNED_FLAGS = (
    "host", "port", "port-file", "admin-host", "admin-port", "served-model-name", "live-config",
    "max-num-batched-tokens", "max-num-seqs", "scheduling-policy", "long-prefill-token-threshold", "priority-aging",
    "slo-ttft", "slo-itl", "ceiling-max-num-batched-tokens", "ceiling-max-num-seqs", "max-model-len", "dtype", "block-size",
    "kv-cache-memory", "gpu-memory-utilization", "enable-prefix-caching", "no-enable-prefix-caching", "tensor-parallel-size",
    "max-queued-requests", "drain-timeout", "leaving-time", "api-keys", "admin-public-key", "admin-audience",
    "trusted-class-header", "trusted-tenant-header", "log-format", "scheduler-cls", "revision", "hub-ca-file", "hub-limit",
)  # fmt: skip

PVC_MOUNT = "/models"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one engine runs: what differs between a pod and a local process. None leaves the flag out."""

    host: str = "127.0.0.1"
    port: int = 0
    admin_host: str = "127.0.0.1"
    admin_port: int = 0
    live_config: str | None = None  # path of live.json
    port_file: str | None = None
    api_keys: str | None = None  # path of the file of API keys
    admin_public_key: str | None = None
    admin_audience: str | None = None
    hub_ca_file: str | None = None  # authorities of the hub; only for hf:// models
    leaving_time_s: float | None = None  # how long endpoints take to spread
    log_format: str | None = None


def engine_arguments(
    spec: ServiceSpec, placement: Placement = Placement(), *, include_live: bool = False
) -> list[str]:  # fmt: skip
    """The words after `trimtab-engine`. `include_live`: start from spec's live values even without a live.json (for
    processes, whose arguments are no template).

    `spec.model` must be set (`support.check`).
    """
    if spec.model is None:
        raise ValueError("spec.model is not set: the service is a targetRef, which has no engine of ours")
    flags = _model(spec.model) + _static(spec)
    flags += _live(spec) if include_live else []
    flags += _placed(spec, placement)
    return ["serve", model_reference(spec.model), *flags, *spec.engine.extra_args]


def model_reference(model: Model) -> str:
    """The engine's own word for the weights: a path, package://module/file, or hf://organisation/name."""
    scheme, _, rest = model.uri.partition("://")
    if scheme == "file":
        return unquote(rest)
    if scheme == "pvc":
        _, _, path = rest.partition("/")
        return str(PurePosixPath(PVC_MOUNT, path))
    return model.uri


def served_name(model: Model) -> str:
    """The model name that clients send: servedName, or the last part of the uri without .gguf."""
    if model.served_name:
        return model.served_name
    last = model.uri.rstrip("/").rpartition("/")[2]
    return last.removesuffix(".gguf") or model.uri


def from_hub(spec: ServiceSpec) -> bool:
    """Whether the engines download their model."""
    return spec.model is not None and spec.model.uri.startswith("hf://")


def _model(model: Model) -> list[str]:
    flags = ["--served-model-name", served_name(model)]
    if model.revision is not None:
        flags += ["--revision", model.revision]
    if model.uri.startswith("hf://") and model.cache.size_limit_bytes is not None:
        # A kubelet would evict the pod in the middle of the download, again and again.
        flags += ["--hub-limit", str(model.cache.size_limit_bytes)]
    return flags


def _static(spec: ServiceSpec) -> list[str]:
    engine = spec.engine
    flags = [
        "--dtype", engine.dtype,
        "--block-size", str(engine.kv_block_size),
        "--ceiling-max-num-batched-tokens", str(engine.ceilings.max_num_batched_tokens),
        "--ceiling-max-num-seqs", str(engine.ceilings.max_num_seqs),
        "--max-queued-requests", str(engine.max_queued_requests),
        "--drain-timeout", _number(spec.rollout.drain_timeout_s),
    ]  # fmt: skip
    if engine.max_model_len is not None:
        flags += ["--max-model-len", str(engine.max_model_len)]
    if engine.kv_cache_memory_bytes is not None:
        flags += ["--kv-cache-memory", str(engine.kv_cache_memory_bytes)]
    if engine.gpu_memory_utilization is not None:
        flags += ["--gpu-memory-utilization", _number(engine.gpu_memory_utilization)]
    if not engine.enable_prefix_caching:
        flags.append("--no-enable-prefix-caching")
    headers = spec.slo.trusted_headers
    if headers.slo_class:
        flags += ["--trusted-class-header", headers.slo_class]
    if headers.tenant:
        flags += ["--trusted-tenant-header", headers.tenant]
    return flags


def _live(spec: ServiceSpec) -> list[str]:
    engine = spec.engine
    default = next(c for c in spec.slo.resolved_classes() if c.name == spec.slo.default_class)
    return [
        "--max-num-batched-tokens", str(engine.max_num_batched_tokens),
        "--max-num-seqs", str(engine.max_num_seqs),
        "--scheduling-policy", engine.scheduling_policy,
        "--long-prefill-token-threshold", str(engine.long_prefill_token_threshold),
        "--priority-aging", _number(engine.priority_aging_s),
        "--slo-ttft", _number(default.ttft_s),
        "--slo-itl", _number(default.itl_s),
    ]  # fmt: skip


def _placed(spec: ServiceSpec, placement: Placement) -> list[str]:
    flags = [
        "--host", placement.host,
        "--port", str(placement.port),
        "--admin-host", placement.admin_host,
        "--admin-port", str(placement.admin_port),
    ]  # fmt: skip
    optional = (
        ("--live-config", placement.live_config),
        ("--port-file", placement.port_file),
        ("--api-keys", placement.api_keys if spec.security.api_key_secret_ref else None),
        ("--admin-public-key", placement.admin_public_key),
        ("--admin-audience", placement.admin_audience),
        ("--hub-ca-file", placement.hub_ca_file if from_hub(spec) else None),
        ("--leaving-time", None if placement.leaving_time_s is None else _number(placement.leaving_time_s)),
        ("--log-format", placement.log_format),
    )
    for flag, value in optional:
        if value is not None:
            flags += [flag, value]
    return flags


def _number(value: float) -> str:
    """`60.0` as 60, `0.8` as 0.8: stable text, since arguments are hashed."""
    return f"{value:.10g}"
