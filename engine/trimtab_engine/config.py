"""Static engine configuration: what is fixed at start, its bounds and its JSON form.

Built from the command line by `cli`, sent to the engine process in `messages.Init`, and produced by the operator as
container arguments (`tests/contract` holds the two together). Live knobs are in `core.live`. Imports no torch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from trimtab_engine.core.live import Ceilings
from trimtab_engine.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
MAX_MODEL_LEN = 16_777_216


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that needs a restart to change. Units are in the names."""

    model: str  # local folder, .gguf file, package://module/file, or hf://organisation/name
    revision: str | None = None  # branch, tag or commit at the hub; None: main
    hub_endpoint: str | None = None  # None: HF_ENDPOINT, else the public hub
    hub_ca_file: str | None = None  # authorities for the hub's certificate, beside the system's
    hub_patience_s: float = 300.0  # how long the hub may give nothing but errors
    hub_limit_bytes: int | None = None  # most that a download may take in the cache; None: what the disk has
    device: str = "auto"  # auto: cuda when there is one
    dtype: str = "auto"  # auto: float32 on cpu, the checkpoint's on cuda
    max_model_len: int | None = None  # None: the model's own, cut to what the KV pool holds
    block_size: int = 16
    swap_bytes: int = 0  # CPU memory for KV of preempted requests; 0: they are computed again
    kv_cache_bytes: int | None = None  # None: 1 GiB on cpu, gpu_memory_utilization on cuda
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    prefill_first: bool = False  # benchmark baseline: chunking off, prompts before decodes
    shed_late: bool = False  # under sla-aware: 503 for what can no longer be in time
    fair_tenants: bool = False  # between tenants by virtual token counters, within one by policy
    batch_invariant: bool = False  # one reduction path: outputs bitwise equal under any batching
    ceilings: Ceilings = field(default_factory=Ceilings)
    num_threads: int | None = None  # None: cores - 1, at least 1
    seed: int = 0  # draws seeds of requests that bring none
    record_steps: str | None = None  # path of a step record that the simulator can replay
    step_model: dict[str, object] | None = None  # a step-time model to start with, in its JSON form
    cache_dir: str | None = None  # converted GGUF weights; None: ~/.cache/trimtab/models

    def __post_init__(self) -> None:
        _check(self.device in DEVICES, "device", self.device, f"one of {', '.join(DEVICES)}")
        _check(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        _check(
            self.block_size in (8, 16, 32, 64, 128),
            "block_size",
            self.block_size,
            "one of 8, 16, 32, 64, 128",
        )
        _check(
            0 <= self.hub_patience_s <= 86_400,
            "hub_patience_s",
            self.hub_patience_s,
            "seconds from 0 to 86400",
        )
        if self.hub_endpoint is not None:
            _check(
                self.hub_endpoint.startswith(("https://", "http://")),
                "hub_endpoint",
                self.hub_endpoint,
                "an address that begins with https:// or http://",
            )
        if not self.model.startswith("hf://"):
            _check(self.revision is None, "revision", self.revision, "left out: only hf:// models have one")
        if self.max_model_len is not None:
            _check(
                2 <= self.max_model_len <= MAX_MODEL_LEN,
                "max_model_len",
                self.max_model_len,
                f"an integer from 2 to {MAX_MODEL_LEN}",
            )
        if self.kv_cache_bytes is not None:
            _check(self.kv_cache_bytes > 0, "kv_cache_bytes", self.kv_cache_bytes, "more than 0")
        _check(self.swap_bytes >= 0, "swap_bytes", self.swap_bytes, "at least 0")
        _check(
            0.05 <= self.gpu_memory_utilization <= 0.99,
            "gpu_memory_utilization",
            self.gpu_memory_utilization,
            "a number from 0.05 to 0.99",
        )
        if self.num_threads is not None:
            # torch crashes when it cannot start as many as it was told.
            _check(
                1 <= self.num_threads <= 1024, "num_threads", self.num_threads, "at least 1 and at most 1024"
            )
        _check(-(2**63) <= self.seed < 2**63, "seed", self.seed, "an integer of 64 bits")
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            value = getattr(self.ceilings, name)
            _check(1 <= value <= 1_048_576, f"ceilings.{name}", value, "an integer from 1 to 1048576")

    def to_json(self) -> dict[str, object]:
        """Plain JSON form for `messages.Init`."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> EngineConfig:
        """Inverse of `to_json`; raises ConfigError on an unknown field."""
        known = {f.name for f in fields(cls)}
        for key in raw:
            _check(key in known, key, raw[key], f"known fields are {', '.join(sorted(known))}")
        return cls(**{**raw, "ceilings": Ceilings(**raw.get("ceilings", {}))})


def _check(holds: bool, path: str, value: object, allowed: str) -> None:
    if not holds:
        raise ConfigError(path, value, allowed)
