"""Tiny models for tests: random weights in a Hugging Face folder, small enough to run in milliseconds.

`tiny_chat_model` needs numpy and tokenizers alone (no torch): a folder that the server can serve, with a real
byte-level BPE tokenizer and a ChatML template. `save_tiny_model` builds one model of each supported family with
transformers, the reference that our own decoder is compared with.

Two things make the models useful. The final norm's weight is scaled up, which scales the logits, so that the margin
between the best two tokens is wide and rounding does not flip it. Weights are drawn wide, so that attention matters:
what a model says depends on tokens far back, and a wrong cache cannot hide.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGIT_SCALE = 6.0
WEIGHT_STD = 0.15
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_VOCAB_SIZE = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool', 'developer'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_TRAINING_TEXT = (
    "A trim tab is the small surface that steers a big rudder. The engine reads requests, plans a step, and runs it.",
    "The quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs, said the old sailor.",
    "Tell me about the weather in Paris. What is the capital of France? Write a story about a ship and the sea.",
    "user assistant system hello world, please answer the question: one two three four five six seven eight nine ten",
    "Grüße aus Köln, déjà vu, naïve café, привет мир, 你好世界, こんにちは, 🙂 🚢 🌊 emoji and text in one line.",
    "def schedule(now): return step  # for i in range(10): print(i, x[i], y == z)",
)


def tiny_tokenizer() -> Tokenizer:
    """A byte-level BPE of at most `CHAT_VOCAB_SIZE` tokens: any text encodes, and round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CHAT_VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_TEXT, trainer)
    return tokenizer


def tiny_chat_model(path: Path, *, seed: int = 0, max_position_embeddings: int = 2048) -> Path:
    """Write a Llama of two layers with tokenizer and chat template to the folder `path` (made if missing); return it.

    Greedy decoding runs on until a limit: the output rows of the special tokens are zero, so they never win. To see
    an end by EOS (`<|im_end|>`), raise it with `logit_bias`; to see a stop, use `stop_token_ids` or stop strings.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer()
    tokenizer.save(str(path / "tokenizer.json"))
    bos, eos = (tokenizer.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>"))
    hidden, heads, kv_heads, head_dim, mlp, layers = 64, 4, 2, 16, 128, 2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": CHAT_VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": "float32",
    }
    _write_json(path / "config.json", config)
    _write_json(path / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos})
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "pad_token": "<|im_end|>",
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return (rng.standard_normal(shape) * WEIGHT_STD).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": weight(CHAT_VOCAB_SIZE, hidden),
        "model.norm.weight": np.full(hidden, LOGIT_SCALE, np.float32),
        "lm_head.weight": weight(CHAT_VOCAB_SIZE, hidden),
    }
    for token in SPECIAL_TOKENS:
        tensors["lm_head.weight"][tokenizer.token_to_id(token)] = 0.0
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": np.ones(hidden, np.float32),
            prefix + "post_attention_layernorm.weight": np.ones(hidden, np.float32),
            prefix + "self_attn.q_proj.weight": weight(heads * head_dim, hidden),
            prefix + "self_attn.k_proj.weight": weight(kv_heads * head_dim, hidden),
            prefix + "self_attn.v_proj.weight": weight(kv_heads * head_dim, hidden),
            prefix + "self_attn.o_proj.weight": weight(hidden, heads * head_dim),
            prefix + "mlp.gate_proj.weight": weight(mlp, hidden),
            prefix + "mlp.up_proj.weight": weight(mlp, hidden),
            prefix + "mlp.down_proj.weight": weight(hidden, mlp),
        }
    save_file(tensors, str(path / "model.safetensors"), metadata={"format": "pt"})
    return path


_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "initializer_range": WEIGHT_STD,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# name → (configuration class in transformers, what differs from `_COMMON`). Group sizes 3, 1 and 6 occur.
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "llama-rope-llama3": (
        "LlamaConfig",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama-rope-linear": (
        "LlamaConfig",
        {
            "num_key_value_heads": 6,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        },
    ),
    "smollm2": (
        "LlamaConfig",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        },
    ),
    "mistral": (
        "MistralConfig",
        {
            "sliding_window": None,
            "head_dim": 16,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "qwen2": (
        "Qwen2Config",
        {
            "use_sliding_window": False,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "qwen3": (
        "Qwen3Config",
        {
            "use_sliding_window": False,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
}
FAMILIES = tuple(_FAMILIES)


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """The reference model of one family in transformers: float32, eval mode; `overrides` are configuration fields."""
    import torch
    import transformers

    class_name, differences = _FAMILIES[family]
    config = getattr(transformers, class_name)(**{**_COMMON, **differences, **overrides})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
        # Norm weights and biases start as constants in transformers; random ones show whether each is applied.
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.5)
        model.model.norm.weight.mul_(LOGIT_SCALE)
    model.eval()
    typed: PreTrainedModel = model
    return typed


def save_tiny_model(
    path: Path, family: str = "llama", *, seed: int = 0, sharded: bool = False, **overrides: Any
) -> Path:
    """Write `tiny_model(family)` to the folder `path` as transformers does, in several files if `sharded`; return it."""
    model = tiny_model(family, seed=seed, **overrides)
    model.save_pretrained(path, max_shard_size="40KB" if sharded else "1GB")
    return path


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
