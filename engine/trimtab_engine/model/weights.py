"""Reads safetensors files into the tensors that the decoder computes with.

Called by the runner at start. Projections that share their input are fused (q, k, v; gate and up): one large matrix
product is faster than several small ones. Every tensor is copied out of the file, so nothing stays mapped: a page that
the system dropped would be read from disk again in the middle of a step. Knows nothing of attention or positions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trimtab_engine.errors import ModelLoadError
from trimtab_engine.model.spec import ModelSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer. Matrices are (out, in), as `torch.nn.functional.linear` takes them."""

    input_norm: torch.Tensor  # (hidden,)
    qkv: torch.Tensor  # ((heads + 2·kv_heads)·head_dim, hidden): q rows, then k, then v
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # (head_dim,)
    k_norm: torch.Tensor | None  # (head_dim,)
    output: torch.Tensor  # (hidden, heads·head_dim)
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor  # (hidden,)
    gate_up: torch.Tensor  # (2·intermediate, hidden): gate rows, then up
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # (hidden, intermediate)
    down_bias: torch.Tensor | None


@dataclass(slots=True)
class DecoderWeights:
    """All weights of a decoder, one dtype, one device."""

    embedding: torch.Tensor  # (vocab, hidden)
    layers: list[LayerWeights]
    final_norm: torch.Tensor  # (hidden,)
    lm_head: torch.Tensor  # (vocab, hidden); the embedding itself when tied

    @property
    def num_bytes(self) -> int:
        """Memory they take; tied weights count once."""
        tensors = {id(self.embedding): self.embedding, id(self.lm_head): self.lm_head}
        for layer in self.layers:
            for name in LayerWeights.__slots__:
                tensor = getattr(layer, name)
                if tensor is not None:
                    tensors[id(tensor)] = tensor
        return sum(t.numel() * t.element_size() for t in tensors.values()) + self.final_norm.nbytes


def checkpoint_dtype(folder: Path) -> torch.dtype:
    """The dtype that the embedding is stored in; raises ModelLoadError like `load_weights`."""
    with ExitStack() as stack:
        return _Checkpoint(folder, stack).read("model.embed_tokens.weight").dtype


def load_weights(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[float], None] = lambda fraction: None,
) -> DecoderWeights:
    """Load `folder`'s safetensors (one file, or several behind an index) in `dtype` onto `device`.

    Raises ModelLoadError naming the file or tensor: missing, of another shape than the configuration says, or present
    although the decoder would not use it (then the model is another one than its configuration claims).
    """
    with ExitStack() as stack:
        checkpoint = _Checkpoint(folder, stack)
        loader = _Loader(checkpoint, dtype, device)
        embedding = loader.tensor("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        layers = []
        for index in range(spec.num_layers):
            layers.append(_layer(loader, spec, f"model.layers.{index}."))
            progress((index + 1) / (spec.num_layers + 1))
        final_norm = loader.tensor("model.norm.weight", spec.hidden_size)
        if spec.tie_word_embeddings:
            lm_head = embedding
            loader.used.add("lm_head.weight")  # some files store the tied copy too
        else:
            lm_head = loader.tensor("lm_head.weight", spec.vocab_size, spec.hidden_size)
        loader.refuse_unused()
    return DecoderWeights(embedding, layers, final_norm, lm_head)


def _layer(loader: _Loader, spec: ModelSpec, prefix: str) -> LayerWeights:
    hidden, mlp = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = prefix + "self_attn."
    qkv = [(attention + "q_proj", q_rows), (attention + "k_proj", kv_rows), (attention + "v_proj", kv_rows)]
    gate_up = [(prefix + "mlp.gate_proj", mlp), (prefix + "mlp.up_proj", mlp)]
    return LayerWeights(
        input_norm=loader.tensor(prefix + "input_layernorm.weight", hidden),
        qkv=loader.fused([(name + ".weight", rows) for name, rows in qkv], hidden),
        qkv_bias=loader.fused([(name + ".bias", rows) for name, rows in qkv]) if spec.qkv_bias else None,
        q_norm=loader.tensor(attention + "q_norm.weight", spec.head_dim) if spec.qk_norm else None,
        k_norm=loader.tensor(attention + "k_norm.weight", spec.head_dim) if spec.qk_norm else None,
        output=loader.tensor(attention + "o_proj.weight", hidden, q_rows),
        output_bias=loader.tensor(attention + "o_proj.bias", hidden) if spec.output_bias else None,
        mlp_norm=loader.tensor(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=loader.fused([(name + ".weight", rows) for name, rows in gate_up], hidden),
        gate_up_bias=loader.fused([(name + ".bias", rows) for name, rows in gate_up])
        if spec.mlp_bias
        else None,
        down=loader.tensor(prefix + "mlp.down_proj.weight", hidden, mlp),
        down_bias=loader.tensor(prefix + "mlp.down_proj.bias", hidden) if spec.mlp_bias else None,
    )


class _Checkpoint:
    """The safetensors files of a folder, opened for as long as `stack` lives."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._by_name: dict[str, Any] = {}
        for path in _files(folder):
            try:
                file = stack.enter_context(safe_open(str(path), framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ModelLoadError(f"{path} cannot be read as safetensors: {error}") from error
            self._by_name.update(dict.fromkeys(file.keys(), file))

    @property
    def names(self) -> set[str]:
        return set(self._by_name)

    def read(self, name: str) -> torch.Tensor:
        file = self._by_name.get(name)
        if file is None:
            raise ModelLoadError(f"{self.folder}: tensor {name} is missing")
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        single = folder / SINGLE
        if not single.is_file():
            raise ModelLoadError(f"{folder} holds neither {SINGLE} nor {INDEX}; only safetensors are read")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelLoadError(f"{index} cannot be read: {error!r}") from error
    for name in names:
        if not (folder / name).is_file():
            raise ModelLoadError(f"{index} names {name}, which does not exist in {folder}")
    return [folder / name for name in names]


class _Loader:
    """Copies tensors out of a checkpoint, checked and cast; remembers which were used."""

    def __init__(self, checkpoint: _Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint = checkpoint
        self.dtype = dtype
        self.device = device
        self.used: set[str] = set()

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """One tensor of exactly `shape`."""
        target = torch.empty(shape, dtype=self.dtype, device=self.device)
        target.copy_(self._checked(name, shape))
        return target

    def fused(self, parts: list[tuple[str, int]], *tail: int) -> torch.Tensor:
        """Several tensors (rows, *tail), one under the other."""
        target = torch.empty((sum(rows for _, rows in parts), *tail), dtype=self.dtype, device=self.device)
        start = 0
        for name, rows in parts:
            target[start : start + rows].copy_(self._checked(name, (rows, *tail)))
            start += rows
        return target

    def refuse_unused(self) -> None:
        """Raise when the files hold tensors that nothing read."""
        unused = sorted(
            name for name in self.checkpoint.names - self.used if not name.endswith("rotary_emb.inv_freq")
        )
        if unused:
            more = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
            raise ModelLoadError(
                f"{self.checkpoint.folder}: the files hold tensors that this configuration does not use: "
                f"{', '.join(unused[:3])}{more}"
            )

    def _checked(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self.checkpoint.read(name)
        self.used.add(name)
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"{self.checkpoint.folder}: tensor {name} has shape {tuple(tensor.shape)}, "
                f"the configuration says {shape}"
            )
        if not tensor.is_floating_point():
            raise ModelLoadError(
                f"{self.checkpoint.folder}: tensor {name} has dtype {tensor.dtype}; expected a float type"
            )
        return tensor
