"""Incremental text: never half a character, and the pieces add up to the one-shot text."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as RawTokenizer

from support.tiny_models import tiny_tokenizer
from trimtab_engine.errors import ModelLoadError
from trimtab_engine.server.text.tokenizer import Tokenizer

# Letters of several scripts, characters of 1 to 4 bytes, joined emoji and combining marks.
TEXT = st.text(
    alphabet=st.one_of(
        st.characters(codec="utf-8"),
        st.sampled_from("aé你好界🙂🚢👩‍👩‍👧‍👦🏳️‍🌈\u0301\u200d\n\t "),
    ),
    max_size=40,
)


@cache
def byte_level() -> Tokenizer:
    return Tokenizer(tiny_tokenizer())


def token_id(token: str) -> int:
    found = tiny_tokenizer().token_to_id(token)
    assert found is not None
    return found


@cache
def sentencepiece() -> Tokenizer:
    """A Llama-2-like vocabulary: words with ▁, and every byte as <0xNN>."""
    words = ["<unk>", "<s>", "</s>", "▁", "▁hello", "▁world", "hello", "wor", "ld", "a", "b", "é", "!"]
    vocab = {word: index for index, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    raw = RawTokenizer(
        models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(raw)


def streamed(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
    detokenizer = tokenizer.detokenizer(prompt)
    return "".join([*(detokenizer.push(i) for i in ids), detokenizer.finish()])


@given(TEXT)
def test_pieces_of_any_text_add_up_to_it(text: str) -> None:
    tokenizer = byte_level()
    assert streamed(tokenizer, tokenizer.encode(text)) == text


@given(TEXT.filter(bool))
def test_pieces_of_byte_fallback_tokens_add_up_to_the_text(text: str) -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode(text)
    # The prompt stands before, so the space that only starts a text is real here.
    assert streamed(tokenizer, ids, prompt=[1]) == " " + text.replace("▁", " ")


@given(st.lists(st.integers(0, 511), max_size=60))
def test_any_tokens_stream_to_what_they_decode_to_at_once(ids: list[int]) -> None:
    # What a random model says: broken characters, special tokens, ids without a token.
    tokenizer = byte_level()
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


@given(TEXT, st.data())
def test_output_continues_a_prompt_that_is_cut_anywhere(text: str, data: st.DataObject) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    whole = b"".join(tokenizer.pieces[token_id] for token_id in ids)
    before = b"".join(tokenizer.pieces[token_id] for token_id in ids[:cut])
    # Characters complete in the prompt belong to it; one that is cut belongs to the output.
    want = whole.decode()[len(before.decode("utf-8", "ignore")) :]
    assert streamed(tokenizer, ids[cut:], prompt=ids[:cut]) == want


@given(TEXT)
def test_nothing_but_the_unfinished_character_is_held_back(text: str) -> None:
    tokenizer = byte_level()
    detokenizer = tokenizer.detokenizer()
    sent, received = "", b""
    for token_id in tokenizer.encode(text):
        sent += detokenizer.push(token_id)
        received += tokenizer.pieces[token_id]
        complete = received.decode("utf-8", "ignore")
        assert sent == complete
        assert detokenizer.holds_back == (len(complete.encode()) < len(received))


def test_an_emoji_of_four_single_byte_tokens_comes_out_whole() -> None:
    tokenizer = byte_level()
    ids = [token_id(character) for character in "ðŁĻĤ"]  # 🙂, a token a byte
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push(i) for i in ids] == ["", "", "", "🙂"]


def test_a_character_that_never_ends_is_shown_as_replaced_at_the_finish() -> None:
    tokenizer = byte_level()
    assert streamed(tokenizer, [token_id("ð")]) == "\ufffd"


def test_special_tokens_are_skipped_or_shown_as_asked() -> None:
    tokenizer = byte_level()
    end = token_id("<|im_end|>")
    assert tokenizer.detokenizer().push(end) == ""
    assert tokenizer.detokenizer(skip_special_tokens=False).push(end) == "<|im_end|>"


def test_an_id_without_a_token_has_no_text() -> None:
    tokenizer = byte_level()
    assert tokenizer.detokenizer().push(tokenizer.vocab_size + 5) == ""


def test_a_decoder_without_fixed_bytes_per_token_is_refused_by_name() -> None:
    raw = RawTokenizer(models.WordPiece(vocab={"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    raw.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        Tokenizer(raw)


def test_a_broken_tokenizer_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        Tokenizer.from_file(path)
