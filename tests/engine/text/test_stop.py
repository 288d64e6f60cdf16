"""Stop strings: found wherever the stream is cut, with as little text held back as can be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_engine.server.text.stop import StopMatcher

# A small alphabet makes overlapping and self-overlapping stops common.
SMALL = st.text(alphabet="ab🙂", min_size=0, max_size=24)
STOPS = st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=4), min_size=1, max_size=4, unique=True)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition, character by character: the first prefix that ends in a stop; the longest such stop."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def cut(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@given(SMALL, STOPS, st.data())
def test_the_earliest_stop_wins_however_the_text_is_cut(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    matcher = StopMatcher(stops)
    sent, stop = "", None
    for chunk in cut(text, data):
        piece, stop = matcher.push(chunk)
        sent += piece
        if stop is not None:
            break
    else:
        sent += matcher.finish()
    assert (sent, stop) == reference(text, stops)


@given(SMALL, STOPS, st.data())
def test_held_back_is_only_what_may_still_become_a_stop(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    matcher = StopMatcher(stops)
    received, sent = "", ""
    for chunk in cut(text, data):
        piece, stop = matcher.push(chunk)
        if stop is not None:
            return
        received += chunk
        sent += piece
        held = received[len(sent) :]
        proper = [length for s in stops for length in range(1, len(s)) if received.endswith(s[:length])]
        assert len(held) == max(proper, default=0)
        assert matcher.holds_back == bool(held)


def test_an_overlapping_false_start_is_not_missed() -> None:
    matcher = StopMatcher(["aab"])
    assert [matcher.push(c) for c in "aaab"] == [("", None), ("", None), ("a", None), ("", "aab")]


def test_the_stop_string_is_kept_when_asked_for_and_what_follows_is_not() -> None:
    matcher = StopMatcher(["END"], include_in_output=True)
    assert matcher.push("the EN") == ("the ", None)
    assert matcher.push("D of it") == ("END", "END")


def test_a_stop_in_the_first_tokens_is_plain_text_and_stays_so() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("xab", may_stop=False) == ("xab", None)
    assert matcher.push("y") == ("y", None)


@pytest.mark.parametrize("stops", [[], ["zz"]])
def test_text_without_a_stop_passes_at_once(stops: list[str]) -> None:
    assert StopMatcher(stops).push("hello") == ("hello", None)
