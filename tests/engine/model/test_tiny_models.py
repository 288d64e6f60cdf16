"""The test models themselves: they load in transformers, and what they say depends on the whole prompt."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.tiny_models import FAMILIES, tiny_chat_model, tiny_model, tiny_tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_logits_depend_on_the_first_token_and_have_a_wide_margin(family: str) -> None:
    model = tiny_model(family)
    tokens = torch.randint(3, 256, (1, 40), generator=torch.Generator().manual_seed(5))
    other = tokens.clone()
    other[0, 0] = (other[0, 0] + 1) % 256
    with torch.no_grad():
        logits, changed = model(tokens).logits[0, -1], model(other).logits[0, -1]
    best = logits.topk(2).values
    assert (logits - changed).abs().max() > 0.05
    assert best[0] - best[1] > 1e-2


def test_chat_model_loads_in_transformers_and_its_template_renders(tmp_path: Path) -> None:
    path = tiny_chat_model(tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi 🙂"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nhi 🙂<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    said = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30, pad_token_id=0
    )
    new = said[0, ids.shape[1] :].tolist()
    assert len(new) == 30
    assert len(set(new)) > 5


def test_tiny_tokenizer_round_trips_any_text() -> None:
    tokenizer = tiny_tokenizer()
    text = "Ünïcödé 👩‍🚀 <b>\t\x00 日本"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() <= 512
