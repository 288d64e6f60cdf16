"""Configurations and files that we cannot run are refused by name; those that we can are read right."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.tiny_models import save_tiny_model, tiny_model
from trimtab_engine.errors import ModelLoadError
from trimtab_engine.model.spec import ModelSpec, RopeSpec, spec_from_config
from trimtab_engine.model.weights import DecoderWeights, checkpoint_dtype, load_weights

CPU = torch.device("cpu")
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}


def spec(**changes: Any) -> ModelSpec:
    return spec_from_config({k: v for k, v in {**LLAMA, **changes}.items() if v is not ...})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; supported are llama, mistral, qwen2, qwen3"),
        ({"model_type": ...}, "model_type is None"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is silu"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config is .*quantised weights"),
        ({"num_key_value_heads": 4}, r"num_key_value_heads is 4; must divide num_attention_heads \(6\)"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; expected an integer of at least 1"),
        ({"vocab_size": "big"}, "vocab_size is 'big'"),
        ({"head_dim": 7}, "head_dim is 7; must be even"),
        ({"rms_norm_eps": ...}, "rms_norm_eps is None; expected a number above 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; expected true or false"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_scaling is .*supported rope types are",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is None"),
        ({"rope_scaling": [1]}, "rope_scaling is .*; expected an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
)
def test_what_we_do_not_compute_is_refused_by_field(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"config\.json: {says}"):
        spec(**changes)


def test_both_spellings_of_rotary_parameters_are_read() -> None:
    old = spec(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}).rope
    new = spec(rope_parameters={"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}).rope
    assert old == new == RopeSpec(5e5, "linear", factor=2.0)
    assert spec().rope == RopeSpec(10000.0)


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({"model_type": "mistral", "sliding_window": 128}, 128),
        ({"model_type": "mistral", "sliding_window": None}, 512),
        ({"model_type": "mistral", "sliding_window": 4096}, 512),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": False}, 512),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True}, 128),
    ],
)
def test_lengths_are_cut_to_the_window_up_to_which_attention_is_full(
    changes: dict[str, Any], want: int
) -> None:
    assert spec(**changes).max_positions == want


def test_kv_of_a_token_counts_keys_and_values_of_all_layers() -> None:
    assert spec().kv_values_per_token == 2 * 3 * 2 * 8


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "model", "llama")


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def load(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return load_weights(
        folder, spec_from_config(json.loads((folder / "config.json").read_text())), dtype, CPU
    )


def test_projections_are_fused_in_order(folder: Path) -> None:
    weights = load(folder)
    layer = tiny_model("llama").model.layers[1]
    attention, mlp = layer.self_attn, layer.mlp
    want = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert torch.equal(weights.layers[1].qkv, want)
    assert torch.equal(weights.layers[1].gate_up, torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]))


def test_sharded_and_single_files_hold_the_same(folder: Path, tmp_path: Path) -> None:
    sharded = save_tiny_model(tmp_path / "sharded", "llama", sharded=True)
    assert len(list(sharded.glob("*.safetensors"))) > 3
    one, many = load(folder), load(sharded)
    assert torch.equal(one.lm_head, many.lm_head)
    assert all(torch.equal(a.down, b.down) for a, b in zip(one.layers, many.layers, strict=True))
    assert one.num_bytes == sum(p.numel() * 4 for p in tiny_model("llama").parameters())


def test_tied_embeddings_are_one_tensor(tmp_path: Path) -> None:
    weights = load(save_tiny_model(tmp_path / "tied", "smollm2"))
    assert weights.lm_head is weights.embedding
    assert weights.num_bytes == sum(p.numel() * 4 for p in tiny_model("smollm2").parameters())


def test_weights_are_cast(folder: Path) -> None:
    assert checkpoint_dtype(folder) is torch.float32
    weights = load(folder, torch.bfloat16)
    assert weights.layers[0].qkv.dtype is torch.bfloat16
    assert torch.equal(weights.embedding, load(folder).embedding.bfloat16())


def test_a_missing_tensor_is_named(folder: Path) -> None:
    change_tensors(folder, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(ModelLoadError, match=r"tensor model\.layers\.2\.mlp\.up_proj\.weight is missing"):
        load(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name][:8].clone()}))
    with pytest.raises(
        ModelLoadError, match=r"k_proj\.weight has shape \(8, 48\), the configuration says \(16, 48\)"
    ):
        load(folder)


def test_a_tensor_that_nothing_uses_is_refused(folder: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(48)}))
    with pytest.raises(ModelLoadError, match=r"does not use: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(folder)


def test_whole_numbers_are_refused_as_weights(folder: Path) -> None:
    change_tensors(
        folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)})
    )
    with pytest.raises(ModelLoadError, match=r"tensor model\.norm\.weight has dtype torch\.int8"):
        load(folder)


def test_broken_and_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    sharded = save_tiny_model(tmp_path / "sharded", "llama", sharded=True)
    victim = sorted(sharded.glob("*.safetensors"))[1]
    victim.write_bytes(b"not safetensors at all")
    with pytest.raises(ModelLoadError, match=f"{victim.name} cannot be read as safetensors"):
        load(sharded)
    victim.unlink()
    with pytest.raises(ModelLoadError, match=f"names {victim.name}, which does not exist"):
        load(sharded)
    (sharded / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"index\.json cannot be read"):
        load(sharded)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="only safetensors are read"):
        load(folder)
