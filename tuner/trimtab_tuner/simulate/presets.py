"""Step-time models of GPUs and models that are not at hand: rooflines from data sheets, in the engine's own formula.

    f(tokens) = launch + max(weight bytes / bandwidth, matmul FLOPs per token / FLOP rate · tokens) + all-reduce
    a_seq     = LM head FLOPs of one sampled row / FLOP rate
    a_kv      = KV bytes per token / bandwidth
    a_quad    = attention FLOPs per (query, key) pair / attention FLOP rate
    swap      = KV bytes of a block / bandwidth to CPU memory

f is taken at the formula's knots and straight between them, so it lies up to a quarter above the roofline near its knee;
a device does not overlap reading and computing perfectly there either. These are estimates for comparing configurations with
one another, not predictions of a device: fit a step-time model on the device for that (`--cost`).
Used by `trimtab-tuner simulate --preset` and benchmarks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from trimtab_engine.core.step_time import KNOTS, StepTimeModel
from trimtab_tuner.errors import InputError

BLOCK_SIZE = 16
BYTES_PER_VALUE = 2  # bf16 weights and KV

# Shares of the data sheet's peaks that serving reaches. Assumptions, the same for every preset.
MATMUL_EFFICIENCY = (
    0.65  # large bf16 matmuls reach 0.6 to 0.8 of the dense peak in cuBLAS; a whole layer somewhat less
)
ATTENTION_EFFICIENCY = (
    0.5  # FlashAttention-2 reports up to 0.73 forward on an A100; chunks over paged KV are below
)
BANDWIDTH_EFFICIENCY = 0.85  # STREAM-like reads reach 0.85 to 0.92 of the HBM data-sheet rate
HOST_LINK_EFFICIENCY = (
    0.8  # copies from and to pinned memory reach 25 to 26 of 32 GB/s on Gen4 x16 (CUDA's bandwidthTest)
)
LAUNCH_S = (
    2e-3  # host work and kernel launches of a step; vLLM's `schedule` and input preparation take 1 to 3 ms
)
ALL_REDUCE_LATENCY_S = 10e-6  # of one small NVLink all-reduce between two devices (NCCL tests: 8 to 12 µs)
MEMORY_SHARE = 0.9  # vLLM's default gpu_memory_utilization
ACTIVATION_BYTES = 2e9  # left for activations and workspaces, each device


@dataclass(frozen=True, slots=True)
class Device:
    """Peaks of one accelerator, from its data sheet."""

    name: str
    flops: float  # dense bf16 FLOP/s, without sparsity
    bandwidth: float  # HBM bytes/s
    memory: float  # bytes
    link: float  # NVLink bytes/s in one direction
    host_link: float  # PCIe bytes/s in one direction
    source: str


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Dimensions from the model's config.json. Weights of LM head and embedding are untied in all of these."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    max_model_len: int
    source: str

    @property
    def layer_weights(self) -> int:
        """Parameters of all layers: q, k, v, o and the gated MLP. Norms are left out (under 0.01 %)."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def head_weights(self) -> int:
        """Parameters of the LM head; the embedding has as many, but a step reads only its tokens' rows."""
        return self.hidden * self.vocabulary

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES_PER_VALUE

    @property
    def attention_flops_per_pair(self) -> int:
        """One query token against one key token in all layers and heads: q·k and the weighted sum of v, 2 FLOPs each."""
        return 4 * self.layers * self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Preset:
    """A simulated server: how long steps take, and how much KV it holds."""

    name: str
    model: StepTimeModel
    num_blocks: int
    block_size: int
    max_model_len: int
    swap_block_s: float  # to copy a block to CPU memory or back
    sources: tuple[str, ...]


DEVICES = {
    "a100-80gb": Device(
        "a100-80gb", 312e12, 2.039e12, 80e9, 300e9, 32e9, "NVIDIA A100 80GB SXM data sheet (2021): 312 TFLOPS bf16, 2,039 GB/s, NVLink 600 and PCIe Gen4 64 GB/s both ways"
    ),
    "h100": Device(
        "h100", 989.4e12, 3.35e12, 80e9, 450e9, 64e9, "NVIDIA H100 SXM data sheet (2023): 1,979 TFLOPS bf16 with sparsity, 3.35 TB/s, NVLink 900 and PCIe Gen5 128 GB/s both ways"
    ),
    "h200": Device(
        "h200", 989.4e12, 4.8e12, 141e9, 450e9, 64e9, "NVIDIA H200 SXM data sheet (2024): 1,979 TFLOPS bf16 with sparsity, 4.8 TB/s, 141 GB, NVLink 900 and PCIe Gen5 128 GB/s both ways"
    ),
}  # fmt: skip
SHAPES = {
    "mistral-7b": ModelShape(
        "mistral-7b", 4096, 32, 32, 8, 128, 14_336, 32_000, 32_768, "mistralai/Mistral-7B-v0.1 config.json; its 4,096-token sliding window is not modelled (v0.2 has none)"
    ),
    "llama-3-8b": ModelShape("llama-3-8b", 4096, 32, 32, 8, 128, 14_336, 128_256, 8192, "meta-llama/Meta-Llama-3-8B config.json"),
    "yi-34b": ModelShape("yi-34b", 7168, 60, 56, 8, 128, 20_480, 64_000, 4096, "01-ai/Yi-34B config.json"),
}  # fmt: skip
TENSOR_PARALLEL = {"mistral-7b": 1, "llama-3-8b": 1, "yi-34b": 2}  # devices a replica
NAMES = tuple(
    f"{device}/{shape}" + (f"-tp{TENSOR_PARALLEL[shape]}" if TENSOR_PARALLEL[shape] > 1 else "")
    for device in DEVICES
    for shape in SHAPES
)


def preset(name: str) -> Preset:
    """The preset of that name, e.g. `a100-80gb/mistral-7b`. Raises InputError listing all."""
    if name not in NAMES:
        raise InputError("--preset", name, f"one of {', '.join(NAMES)}")
    device_name, _, shape_name = name.partition("/")
    device, shape = DEVICES[device_name], SHAPES[shape_name.removesuffix("-tp2")]
    devices = TENSOR_PARALLEL[shape.name]
    return Preset(
        name=name,
        model=roofline(device, shape, devices),
        num_blocks=kv_blocks(device, shape, devices),
        block_size=BLOCK_SIZE,
        max_model_len=shape.max_model_len,
        swap_block_s=swap_block_s(device, shape, BLOCK_SIZE, devices),
        sources=(device.source, shape.source),
    )


def roofline(device: Device, shape: ModelShape, devices: int = 1) -> StepTimeModel:
    """The step-time model of a shape on so many devices (tensor parallel)."""
    flops = device.flops * MATMUL_EFFICIENCY * devices
    bandwidth = device.bandwidth * BANDWIDTH_EFFICIENCY * devices
    read_s = (shape.layer_weights + shape.head_weights) * BYTES_PER_VALUE / bandwidth
    token_s = 2 * shape.layer_weights / flops
    launch_s, reduce_s = LAUNCH_S, 0.0
    if devices > 1:
        # Two all-reduces a layer; in a ring each device sends 2·(n-1)/n of the activations.
        sent = 2 * (devices - 1) / devices * shape.hidden * BYTES_PER_VALUE
        reduce_s = 2 * shape.layers * sent / device.link
        launch_s += 2 * shape.layers * ALL_REDUCE_LATENCY_S
    at = [launch_s + max(read_s, token_s * tokens) + reduce_s * tokens for tokens in KNOTS]
    slopes = [
        (b - a) / (high - low) for (low, high), (a, b) in zip(pairwise(KNOTS), pairwise(at), strict=True)
    ]
    return StepTimeModel(
        coefficients=(
            at[0],
            *slopes,
            2 * shape.head_weights / flops,
            shape.kv_bytes_per_token / bandwidth,
            shape.attention_flops_per_pair / (device.flops * ATTENTION_EFFICIENCY * devices),
        )
    )


def swap_block_s(device: Device, shape: ModelShape, block_size: int, devices: int = 1) -> float:
    """Seconds to copy one block of KV to CPU memory or back; each device has its own link and its share of the block."""
    return shape.kv_bytes_per_token * block_size / (device.host_link * HOST_LINK_EFFICIENCY * devices)


def kv_blocks(device: Device, shape: ModelShape, devices: int = 1) -> int:
    """Blocks of KV that fit beside weights (embedding included) and activations."""
    weights = (shape.layer_weights + 2 * shape.head_weights) * BYTES_PER_VALUE
    free = devices * (device.memory * MEMORY_SHARE - ACTIVATION_BYTES) - weights
    return int(free // (shape.kv_bytes_per_token * BLOCK_SIZE))
