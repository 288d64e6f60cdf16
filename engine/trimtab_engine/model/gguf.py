"""Converts a GGUF file, once, into a folder in Hugging Face layout that is loaded like any other.

`ensure_converted` is called by the engine process at start. The work runs in a child process
(`python -m trimtab_engine.model.gguf SOURCE FOLDER`), because it needs transformers: 4 s and 700 MB that a server
would carry for ever. Weights are dequantised to float32; the tokenizer goes through transformers' own conversion. The
folder appears under its final name in one rename, and a lock makes two starts at once convert once.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trimtab_engine.errors import ModelLoadError
from trimtab_engine.model_files import ModelFiles, converted_folder, locate, resolve

if TYPE_CHECKING:
    from gguf import GGUFReader

_SHARD_BYTES = 2 << 30
_ERROR_MARK = "conversion failed: "

# GGUF's general.architecture → model_type, and whether llama.cpp stores q and k with interleaved rotary pairs.
_ARCHITECTURES = {"llama": ("llama", True), "qwen2": ("qwen2", False), "qwen3": ("qwen3", False)}
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

# How text is cut before byte-pair merging, by tokenizer.ggml.pre. transformers' conversion knows only GPT-2's way;
# with another one, some texts would get other tokens than the model was trained on.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITTINGS = ("default", "gpt-2", "smollm", "llama-bpe", "llama3", "qwen2")
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def ensure_converted(
    reference: str,
    cache_dir: Path | None = None,
    progress: Callable[[float], None] = lambda fraction: None,
    *,
    need_tokenizer: bool = True,
) -> ModelFiles:
    """`model_files.resolve`, after converting the reference if it is a GGUF that was not converted before.

    Raises ModelLoadError naming the file and the reason; then the cache is as it was.
    """
    source = locate(reference)
    if source.is_file():
        folder = converted_folder(source, cache_dir)
        if not folder.is_dir():
            try:
                folder.parent.mkdir(parents=True, exist_ok=True)
                with _locked(folder.with_name(folder.name + ".lock")):
                    if not folder.is_dir():  # another process may have done it while we waited
                        _convert_in_child(source, folder, progress)
            except OSError as error:
                raise ModelLoadError(f"{source} cannot be converted into {folder}: {error}") from error
    return resolve(reference, cache_dir, need_tokenizer=need_tokenizer)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_in_child(source: Path, folder: Path, progress: Callable[[float], None]) -> None:
    for leftover in folder.parent.glob(
        folder.name + ".tmp-*"
    ):  # of a process that was killed; we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    command = [sys.executable, "-P", "-m", __spec__.name, str(source), str(temporary)]
    try:
        # The open stdin is a leash: when this process dies, the child reads end of file and ends too.
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None, "a pipe was asked for"
            assert child.stderr is not None, "a pipe was asked for"
            errors: list[str] = []
            stderr = child.stderr
            reader = threading.Thread(target=lambda: errors.extend(stderr), daemon=True)
            reader.start()
            for line in child.stdout:
                progress(float(line))
            reader.join()
        if child.returncode != 0:
            said = [line.strip() for line in errors if line.strip()]
            marked = [line.removeprefix(_ERROR_MARK) for line in said if line.startswith(_ERROR_MARK)]
            reason = (marked or said[-1:] or [f"converter exited with status {child.returncode}"])[-1]
            raise ModelLoadError(f"{source} cannot be converted: {reason}")
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def convert(source: Path, folder: Path, progress: Callable[[float], None] = lambda fraction: None) -> None:
    """Write `folder` (new) from the GGUF file `source`; raises ModelLoadError. Runs in the child process."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise ModelLoadError(f"not a readable GGUF file: {error}") from error
    metadata = {
        key: field.contents()
        for key, field in reader.fields.items()
        if not key.startswith("tokenizer.ggml.tok")
    }
    config = _config(metadata, {tensor.name: tensor for tensor in reader.tensors})
    _check_splitting(metadata)  # before transformers is imported, which takes seconds
    folder.mkdir(parents=True)
    _write_json(folder / "config.json", config)
    _write_tokenizer(source, folder, metadata)
    _write_json(folder / "generation_config.json", _generation_config(metadata))
    _write_weights(reader, folder, config, progress)


# --- configuration ---


def _config(metadata: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise ModelLoadError(
            f"general.architecture is {architecture!r}; supported are {', '.join(_ARCHITECTURES)}"
        )
    if "rope_freqs.weight" in tensors:
        raise ModelLoadError(
            "tensor rope_freqs.weight (scaled rotary frequencies as numbers) is not supported; "
            "use the model's safetensors folder"
        )
    model_type, _ = _ARCHITECTURES[architecture]

    def field(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{name}", default)
        if value is None:
            raise ModelLoadError(f"metadata {architecture}.{name} is missing")
        return value

    heads, hidden = int(field("attention.head_count")), int(field("embedding_length"))
    scaling = str(field("rope.scaling.type", "none"))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(field("rope.freq_base", 10000.0))}
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": float(field("rope.scaling.factor"))}
    elif scaling != "none":
        raise ModelLoadError(
            f"metadata {architecture}.rope.scaling.type is {scaling!r}; supported are none, linear"
        )
    config = {
        "architectures": [_CLASSES[model_type]],
        "model_type": model_type,
        "dtype": "float32",
        "vocab_size": int(tensors["token_embd.weight"].shape[1]) if "token_embd.weight" in tensors else 0,
        "hidden_size": hidden,
        "intermediate_size": int(field("feed_forward_length")),
        "num_hidden_layers": int(field("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(field("attention.head_count_kv", heads)),
        "head_dim": int(field("attention.key_length", hidden // heads)),
        "hidden_act": "silu",
        "max_position_embeddings": int(field("context_length")),
        "rms_norm_eps": float(field("attention.layer_norm_rms_epsilon")),
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
    }
    if (window := metadata.get(f"{architecture}.attention.sliding_window")) is not None:
        config |= {"sliding_window": int(window), "use_sliding_window": True}
    return config


def _generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    # End of turn and end of message end a reply as much as end of text does.
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ids = sorted({int(token) for token in ends if token is not None})
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ids[0] if len(ids) == 1 else ids or None,
    }


# --- tokenizer ---


def _write_tokenizer(source: Path, folder: Path, metadata: dict[str, Any]) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    kind, pre = metadata.get("tokenizer.ggml.model"), _splitting(metadata)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    except (OSError, ValueError, KeyError, NotImplementedError, ImportError) as error:
        raise ModelLoadError(f"tokenizer of kind {kind!r} cannot be converted: {error}") from error
    if template := metadata.get("tokenizer.chat_template"):
        tokenizer.chat_template = template
    tokenizer.save_pretrained(str(folder))
    path = str(folder / "tokenizer.json")
    fast = Tokenizer.from_file(path)
    if kind == "gpt2":
        _set_word_splitting(fast, pre)
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama" or pre in ("llama3", "llama-bpe"))
    _set_bos(fast, tokenizer.bos_token if add_bos else None)
    fast.save(path)
    if pre in ("llama3", "llama-bpe"):
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
        raw["model"]["ignore_merges"] = True  # Llama 3 takes a word that is a token whole
        _write_json(Path(path), raw)


def _splitting(metadata: dict[str, Any]) -> str:
    return str(metadata.get("tokenizer.ggml.pre", "default"))


def _check_splitting(metadata: dict[str, Any]) -> None:
    pre = _splitting(metadata)
    if metadata.get("tokenizer.ggml.model") == "gpt2" and pre not in _SPLITTINGS:
        raise ModelLoadError(f"tokenizer.ggml.pre is {pre!r}; supported are {', '.join(_SPLITTINGS)}")


def _set_word_splitting(tokenizer: Any, pre: str) -> None:
    from tokenizers import Regex, normalizers, pre_tokenizers

    def words(pattern: str) -> Any:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in ("default", "gpt-2"):
        tokenizer.pre_tokenizer = gpt2
    elif pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), gpt2]
        )
    elif pre in ("llama3", "llama-bpe"):
        tokenizer.pre_tokenizer = words(_LLAMA3_WORDS)
    else:
        assert pre == "qwen2", "the only one left in _SPLITTINGS"
        tokenizer.pre_tokenizer = words(_QWEN2_WORDS)
        tokenizer.normalizer = normalizers.NFC()


def _set_bos(tokenizer: Any, bos: str | None) -> None:
    from tokenizers import processors

    if bos is None:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    else:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )


# --- weights ---


def _write_weights(
    reader: GGUFReader, folder: Path, config: dict[str, Any], progress: Callable[[float], None]
) -> None:
    from gguf import dequantize
    from safetensors.numpy import save_file

    architecture = reader.fields["general.architecture"].contents()
    _, interleaved = _ARCHITECTURES[str(architecture)]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    shards: list[list[str]] = []
    pending: dict[str, np.ndarray[Any, Any]] = {}

    def flush() -> None:
        if pending:
            shards.append(sorted(pending))
            save_file(
                pending, str(folder / f"model-{len(shards):05d}.safetensors"), metadata={"format": "pt"}
            )
            pending.clear()

    for index, tensor in enumerate(reader.tensors):
        stem, name = _hf_name(tensor.name)
        array = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if interleaved and stem in heads:
            array = _uninterleave(array, heads[stem])
        pending[name] = array
        if sum(a.nbytes for a in pending.values()) >= _SHARD_BYTES:
            flush()
        progress((index + 1) / len(reader.tensors))
    flush()
    if len(shards) == 1:
        (folder / "model-00001.safetensors").rename(folder / "model.safetensors")
        return
    files = {name: f"model-{n:05d}.safetensors" for n, names in enumerate(shards, 1) for name in names}
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": files})


def _hf_name(name: str) -> tuple[str, str]:
    """GGUF tensor name → (its name within the layer, Hugging Face's full name); raises ModelLoadError if unknown."""
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return parts[2], f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    if len(parts) == 2 and parts[0] in _TOP_NAMES:
        return parts[0], f"{_TOP_NAMES[parts[0]]}.{parts[1]}"
    raise ModelLoadError(f"tensor {name} has no place in a supported decoder")


def _uninterleave(array: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undo llama.cpp's row order of q and k: pairs (0, 1), (2, 3) … of a head become its two halves."""
    per_head = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(per_head.swapaxes(1, 2).reshape(array.shape))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _main() -> int:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
    try:
        convert(source, folder, lambda fraction: print(f"{fraction:.4f}", flush=True))
    except (ModelLoadError, OSError) as error:
        print(f"{_ERROR_MARK}{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
