"""What a person sees of a run."""

import io

import pytest

from support.study import make_config, make_reading
from trimtab_tuner.evaluate import Measurement
from trimtab_tuner.metrics.reading import Unknown
from trimtab_tuner.run_view import RunView
from trimtab_tuner.trial import Trial


def trial(number: int, role: str, **changes: object) -> Trial:
    reading = make_reading(n=60, violated_ttft=1, violated_itl=7, itl_p99_s=0.21)
    measurement = Measurement("measured", make_config(**changes), number, 0.0, 60.0, reading, ())
    return Trial(number, role, measurement, None, "incumbent" if role == "incumbent" else "improves")  # type: ignore[arg-type]


def test_without_a_terminal_each_trial_is_one_plain_line() -> None:
    stream = io.StringIO()
    with RunView(stream) as view:
        show = view.begin("incumbent", 1, 5)
        show(0.5)
        view.end(trial(0, "incumbent"))
        view.begin("256 tokens · fcfs", 2, 5)
        view.end(trial(1, "explore", max_num_batched_tokens=256, max_num_seqs=16))
        view.note("verdict", "Applied [really]: 256 tokens")
    lines = [" ".join(line.split()) for line in stream.getvalue().splitlines()]
    assert lines == [
        "tune trial 1 of 5 · incumbent",
        "trial 1 2,048 tokens · fcfs · 60 requests · violated TTFT 1, ITL 7 · ITL p99 210 ms · incumbent",
        "tune trial 2 of 5 · 256 tokens · fcfs",
        "trial 2 256 tokens · fcfs · 16 sequences · 60 requests · violated TTFT 1, ITL 7 · ITL p99 210 ms · improves",
        "verdict Applied [really]: 256 tokens",
    ]


def test_an_unknown_trial_says_why_and_shows_no_number() -> None:
    stream = io.StringIO()
    measurement = Measurement("unknown", make_config(), 1, 0.0, 1.0, Unknown("stale"), (), "stale")
    with RunView(stream) as view:
        view.end(Trial(0, "explore", measurement, None, "unknown", "the sample is stale"))
    assert (
        stream.getvalue().split(maxsplit=2)[2].strip()
        == "2,048 tokens · fcfs · unknown · the sample is stale"
    )


def test_on_a_terminal_there_is_a_bar_and_the_lines_stay() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with RunView(stream) as view:
        show = view.begin("incumbent", 1, 5)
        assert "trial 1 of 5 · incumbent · settling" in stream.getvalue()
        stream.truncate(0)
        show(0.5)
        assert "trial 1 of 5 · incumbent" in stream.getvalue()
        assert "settling" not in stream.getvalue()
        view.end(trial(0, "incumbent"))
    assert "━" in stream.getvalue()
    assert "violated TTFT 1, ITL 7" in stream.getvalue()


def test_on_a_narrow_terminal_lines_break_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    words = [f"word{n}" for n in range(30)]
    with RunView(stream) as view:
        view.note("verdict", " ".join(words))
    lines = [line.removeprefix("\x1b[2K") for line in stream.getvalue().splitlines() if "word" in line]
    assert len(lines) > 1
    assert max(map(len, lines)) <= 60
    assert " ".join(lines).replace("verdict", "").split() == words
