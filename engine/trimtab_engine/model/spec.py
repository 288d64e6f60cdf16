"""What varies between the decoders that we run, read from a Hugging Face `config.json`.

`ModelSpec` is the only thing the decoder knows about a model's family. A field that asks for something else than we
compute raises ModelLoadError naming the field: a wrong model is worse than none. Pure; imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trimtab_engine.errors import ModelLoadError

# model_type → what transformers hard-codes for it: (bias on q/k/v, on the output projection, in the MLP, norm on q/k).
# None: a configuration field decides (attention_bias for both projections, mlp_bias).
_FAMILIES: dict[str, tuple[bool | None, bool | None, bool | None, bool]] = {
    "llama": (None, None, None, False),
    "mistral": (False, False, False, False),
    "qwen2": (True, False, False, False),
    "qwen3": (None, None, False, True),
}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding; the fields after `theta` are those of its scaling type."""

    theta: float
    scaling: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder of the Llama kind: pre-norm RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int  # tokens of one sequence; cut to the sliding window where there is one
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeSpec

    @property
    def kv_values_per_token(self) -> int:
        """Numbers that one token adds to the KV cache, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def spec_from_config(config: dict[str, object], where: str = "config.json") -> ModelSpec:
    """Read a `config.json`; raises ModelLoadError naming `where`, the field, its value and what is supported."""
    reader = _Reader(config, where)
    family = reader.choice("model_type", tuple(_FAMILIES))
    qkv_bias, output_bias, mlp_bias, qk_norm = _FAMILIES[family]
    attention_bias = reader.flag("attention_bias", False)
    reader.only("hidden_act", "silu", ("silu", "swish"))
    for field, meaning in (
        ("quantization_config", "quantised weights are not supported"),
        ("num_experts", "mixtures of experts are not supported"),
    ):
        if config.get(field):
            raise reader.error(field, meaning)
    hidden_size = reader.positive("hidden_size")
    num_heads = reader.positive("num_attention_heads")
    num_kv_heads = reader.positive("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise reader.error("num_key_value_heads", f"must divide num_attention_heads ({num_heads})")
    head_dim = reader.positive("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise reader.error("head_dim", "must be even: rotary positions turn pairs")
    max_positions = reader.positive("max_position_embeddings")
    window = _sliding_window(reader, family)
    if window is not None:
        # Up to the window's length, windowed attention *is* full attention; beyond it we would compute another model.
        max_positions = min(max_positions, window)
    return ModelSpec(
        family=family,
        vocab_size=reader.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.positive("intermediate_size"),
        num_layers=reader.positive("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=reader.number("rms_norm_eps"),
        max_positions=max_positions,
        tie_word_embeddings=reader.flag("tie_word_embeddings", False),
        qkv_bias=attention_bias if qkv_bias is None else qkv_bias,
        output_bias=attention_bias if output_bias is None else output_bias,
        mlp_bias=reader.flag("mlp_bias", False) if mlp_bias is None else mlp_bias,
        qk_norm=qk_norm,
        rope=_rope(reader, max_positions),
    )


class _Reader:
    """Typed access to a configuration; every complaint names the file and the field."""

    def __init__(self, config: dict[str, object], where: str) -> None:
        self.config = config
        self.where = where

    def error(self, field: str, expected: str) -> ModelLoadError:
        return ModelLoadError(f"{self.where}: {field} is {self.config.get(field)!r}; {expected}")

    def positive(self, field: str, default: int | None = None) -> int:
        value = self.config.get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(field, "expected an integer of at least 1")
        return value

    def number(self, field: str, default: float | None = None) -> float:
        value = self.config.get(field)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.error(field, "expected a number above 0")
        return float(value)

    def flag(self, field: str, default: bool) -> bool:
        value = self.config.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(field, "expected true or false")
        return value

    def choice(self, field: str, allowed: tuple[str, ...]) -> str:
        value = self.config.get(field)
        if value not in allowed:
            raise self.error(field, f"supported are {', '.join(allowed)}")
        return str(value)

    def only(self, field: str, default: str, allowed: tuple[str, ...]) -> None:
        if self.config.get(field, default) not in allowed:
            raise self.error(field, f"supported is {allowed[0]}")


def _sliding_window(reader: _Reader, family: str) -> int | None:
    if reader.config.get("sliding_window") is None:
        return None
    # Qwen configurations carry a window that is off unless this flag is set; Mistral's is on when it is there.
    if family.startswith("qwen") and not reader.flag("use_sliding_window", False):
        return None
    if family == "llama":
        return None  # transformers' Llama has no window; a stray field changes nothing there
    return reader.positive("sliding_window")


def _rope(reader: _Reader, max_positions: int) -> RopeSpec:
    # transformers 5 writes `rope_parameters` (theta inside), 4 wrote `rope_theta` and `rope_scaling`.
    field = "rope_parameters" if reader.config.get("rope_parameters") is not None else "rope_scaling"
    raw = reader.config.get(field)
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        raise reader.error(field, "expected an object")
    inner = _Reader(raw, f"{reader.where}: {field}")
    theta = inner.number("rope_theta", reader.number("rope_theta", 10000.0))
    if raw.get("partial_rotary_factor", reader.config.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise reader.error("partial_rotary_factor", "only whole heads are rotated (1.0)")
    kind = raw.get("rope_type", raw.get("type", "default"))
    if kind == "default":
        return RopeSpec(theta)
    if kind == "linear":
        return RopeSpec(theta, "linear", factor=inner.number("factor"))
    if kind == "llama3":
        return RopeSpec(
            theta,
            "llama3",
            factor=inner.number("factor"),
            low_freq_factor=inner.number("low_freq_factor"),
            high_freq_factor=inner.number("high_freq_factor"),
            original_max_positions=inner.positive("original_max_position_embeddings", max_positions),
        )
    raise reader.error(field, "supported rope types are default, linear, llama3")
