"""Tokens to pieces: text, token counts and stops belong together."""

from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from support.tiny_models import tiny_tokenizer
from trimtab_engine.server.text.output import OutputText, Piece
from trimtab_engine.server.text.stop import StopMatcher
from trimtab_engine.server.text.tokenizer import Tokenizer


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer())


def token_id(token: str) -> int:
    found = tiny_tokenizer().token_to_id(token)
    assert found is not None
    return found


def output(*stops: str, min_tokens: int = 0, include: bool = False) -> OutputText:
    matcher = StopMatcher(stops, include_in_output=include)
    return OutputText(tokenizer().detokenizer(), matcher, min_tokens=min_tokens)


def run(text: OutputText, ids: list[int]) -> list[Piece]:
    pieces = []
    for token_id in ids:
        if (piece := text.push(token_id)) is not None:
            pieces.append(piece)
            if piece.stop is not None:
                return pieces
    return [*pieces, text.finish()]


@given(
    st.lists(st.integers(0, 511), max_size=40),
    st.lists(st.text("abet 🙂", min_size=1, max_size=3), max_size=3),
)
def test_pieces_count_every_token_once_and_make_the_text(ids: list[int], stops: list[str]) -> None:
    pieces = run(output(*stops), ids)
    text = "".join(piece.text for piece in pieces)
    whole = tokenizer().decode(ids)
    if pieces[-1].stop is None:
        assert text == whole
        assert sum(piece.num_tokens for piece in pieces) == len(ids)
        assert not any(stop in whole for stop in stops)
    else:
        assert whole.startswith(text + pieces[-1].stop)
        assert not any(stop in text for stop in stops)


def test_a_token_waits_for_its_text() -> None:
    ids = [token_id(character) for character in "ðŁĻĤ"]
    text = output()
    assert [text.push(i) for i in ids] == [None, None, None, Piece("🙂", 4)]


def test_a_token_without_text_does_not_wait() -> None:
    end = token_id("<|im_end|>")
    assert output("stop").push(end) == Piece("", 1)


def test_a_stop_string_that_a_dying_character_completes_counts() -> None:
    text = output("a\ufffd")
    ids = [*tokenizer().encode("a"), token_id("ð")]
    assert run(text, ids)[-1] == Piece("", 2, "a\ufffd")


def test_a_stop_before_min_tokens_is_text_and_one_after_ends_it() -> None:
    a, b = tokenizer().encode("!"), tokenizer().encode("?")
    text = output("!", min_tokens=3)
    assert run(text, a + b + a + b) == [Piece("!", 1), Piece("?", 1), Piece("", 1, "!")]


def test_a_silent_token_counts_but_says_nothing() -> None:
    assert output().push(tokenizer().encode("!")[0], silent=True) == Piece("", 1)
