"""Comparisons and reports: what is matched with what, what is said first, and a page that stands alone."""

from __future__ import annotations

import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from support.replay_results import replay_result, request_result
from support.study import make_config, make_reading
from trimtab_engine.core.live import LiveConfig
from trimtab_tuner import page
from trimtab_tuner import report as reports
from trimtab_tuner.audit import plain
from trimtab_tuner.cli import main
from trimtab_tuner.commands.report import load
from trimtab_tuner.compare import Comparison, Row, compare
from trimtab_tuner.errors import InputError
from trimtab_tuner.evaluate import Measurement
from trimtab_tuner.metrics.reading import Block
from trimtab_tuner.plots import to_png, to_svg
from trimtab_tuner.result import ReplayResult
from trimtab_tuner.run import RunResult, result_document
from trimtab_tuner.score import score
from trimtab_tuner.slo import Slo
from trimtab_tuner.stats import summarise
from trimtab_tuner.trial import Decision, Trial


def replayed(
    mode: str = "recorded", slow: float = 1.0, budget: int = 2048, n: int = 60, failed: int = 0
) -> ReplayResult:
    requests = [
        request_result(
            i, float(i), ttft_s=0.1 * slow * (1 + i % 3), gaps_s=[0.02, 0.018 * slow * (1 + i % 5)]
        )
        for i in range(n)
    ]
    requests += [
        request_result(n + i, float(n + i), ttft_s=None, status="failed", error="boom") for i in range(failed)
    ]
    live = {"max_num_batched_tokens": str(budget), "generation": str(budget)}
    return replay_result(
        requests, mode=mode, live_config=live, live_config_after=live, trace_hash=mode, lengths_hash="same"
    )


def tuning() -> dict[str, Any]:
    def trial(number: int, budget: int, policy: str, over: int, p99: float | None) -> dict[str, object]:
        return {
            "number": number,
            "role": "explore",
            "config": {"max_num_batched_tokens": budget, "scheduling_policy": policy},
            "n": 60,
            "violations": {"ttft": 3, "itl": over},
            "itl_p99_s": p99,
            "decision": "improves",
            "reason": "",
        }

    trials = [
        trial(0, 2048, "fcfs", 20, 0.3),
        trial(1, 256, "priority", 2, 0.05),
        trial(2, 512, "fcfs", 9, None),
    ]
    return {
        "schema": "trimtab.tuning/1",
        "meta": {"slo": {"ttft_s": 1.0, "itl_s": 0.1}, "seed": 0},
        "trials": trials,
        "verdict": {"outcome": "Applied", "reason": "2 violated of 60 against 20 of 60"},
        "diagnosis": {"state": "prefill-bound", "because": "<most> of the time is prompts"},
    }


def row(comparison: Comparison, name: str) -> Row:
    return next(each for each in comparison.rows if each.name == name)


def test_a_comparison_shows_both_sides_their_ratio_and_an_interval_that_pairs_time_blocks() -> None:
    before, after = replayed(slow=4.0), replayed(slow=1.0)
    found = compare(("before", "after"), before, after)
    assert found.paired
    ttft = row(found, "TTFT p50")
    assert ttft.before == pytest.approx(0.8)
    assert ttft.after == pytest.approx(0.2)
    assert ttft.change == pytest.approx(0.25)
    assert ttft.interval is not None
    # Every request became four times as fast, so paired blocks leave no doubt about the ratio of medians.
    assert [ttft.interval.low, ttft.interval.high] == pytest.approx([0.25, 0.25])
    assert row(found, "TTFT p99").before is None
    over = row(found, "requests over the ITL target")
    assert over.before == pytest.approx(0.8)
    assert over.after == 0.0
    assert over.change == pytest.approx(-0.8)


def test_failures_make_a_comparison_infinite_rather_than_better() -> None:
    found = compare(("a", "b"), replayed(), replayed(failed=30))
    assert row(found, "TTFT p90").after == math.inf
    assert row(found, "TTFT p90").change == math.inf
    assert (row(found, "goodput (both targets met)").after or 1.0) < 0.67


def pairs(report: reports.Report) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    return [(c.before, c.after) for c in report.bursts], [(c.before, c.after) for c in report.tuned]


def test_results_are_matched_by_label_or_by_what_they_sent_and_under_which_config() -> None:
    even, bursty, tuned = replayed("uniform"), replayed(), replayed(budget=256)
    named = reports.build({"uniform": even, "bursty": bursty, "after": tuned})
    assert pairs(named) == ([("uniform", "bursty")], [("bursty", "after")])
    unnamed = reports.build({"x": even, "y": bursty, "z": tuned})
    assert pairs(unnamed) == ([("x", "y")], [("y", "z")])
    assert pairs(reports.build({"only": bursty})) == ([], [])
    with pytest.raises(InputError):
        reports.build({})


def test_four_replays_around_a_tuning_run_give_four_comparisons_bursts_first() -> None:
    labels = ["uniform, before", "bursty, before", "uniform, after", "bursty, after"]
    results = dict(
        zip(labels, [replayed("uniform"), replayed(), replayed("uniform"), replayed()], strict=True)
    )
    # The configs are equal, as when tuning kept the incumbent: the labels alone say which is which.
    assert pairs(reports.build(results)) == (
        [("uniform, before", "bursty, before"), ("uniform, after", "bursty, after")],
        [("bursty, before", "bursty, after"), ("uniform, before", "uniform, after")],
    )


def test_what_limits_the_conclusions_is_said() -> None:
    troubled = replayed(failed=3)
    troubled.requests[0].sent_s = 0.9
    troubled.requests[1].output_tokens = 99
    meta = dict(troubled.meta) | {
        "interrupted": True,
        "n": 100,
        "live_config_after": {},
        "token_ids_from": "assumed range 1:2",
    }
    other = replay_result(troubled.requests, lengths_hash="other", mode="uniform")
    caveats = "\n".join(
        reports.build(
            {"uniform": other, "bursty": ReplayResult(meta, Slo(1.0, 0.1), troubled.requests)}
        ).caveats
    )
    for said in (
        "p99 needs 300 requests: not shown (n = 63)",
        "3 of 63 requests failed (3 failed)",
        "37 never sent",
        "the sender itself was late",
        "1 answers or prompts were not as long",
        "assumed range",
        "live config changed during",
        "did not send the same requests",
        "shared one machine",
    ):
        assert said in caveats


class _Page(HTMLParser):
    """Collects what a page would fetch or run, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.tags: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            refers = name in ("src", "href", "xlink:href") and not (value or "").startswith(("#", "data:"))
            if tag == "script" or refers or name.startswith("on"):
                self.outside.append(f"<{tag} {name}={value}>")

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_stands_alone_says_caveats_first_and_has_a_json_twin(tmp_path: Path) -> None:
    results = {
        "uniform": replayed("uniform"),
        "bursty": replayed(slow=2.0, failed=2),
        "after": replayed(budget=256),
    }
    report = reports.build(results, reports.check_tuning(tuning(), "t"), title="Chat <service>")
    html, twin = page.write(report, tmp_path / "out" / "r.html")
    parsed = _Page()
    parsed.feed(html.read_text())
    assert parsed.outside == []
    assert parsed.tags.count("svg") == len(page.figures(report)) == 7
    assert (
        parsed.text.index("Read this first") < parsed.text.index("In short") < parsed.text.index("Provenance")
    )
    for said in (
        "Chat <service>",
        "<most> of the time is prompts",
        "2 violated of 60",
        "p99 needs 300 requests",
        "62",
    ):
        assert said in parsed.text
    document = json.loads(twin.read_text())
    assert document["schema"] == "trimtab.report/1"
    assert document["results"]["bursty"]["summary"] == summarise(results["bursty"]).to_json()
    assert document["comparisons"]["before_to_after"][0]["rows"][0]["n_before"] == 62
    assert document["tuning"]["verdict"]["outcome"] == "Applied"
    assert document["caveats"] == list(report.caveats)


@pytest.mark.parametrize("n", [0, 1, 2, 500])
def test_pictures_can_be_drawn_of_hardly_anything_and_of_much(n: int) -> None:
    report = reports.build({"some": replayed(n=n), "failed": replayed(n=0, failed=max(1, n // 2))})
    for figure in page.figures(report).values():
        assert to_svg(figure).startswith("<svg")
        assert to_png(figure, dpi=20).startswith(b"\x89PNG")


def test_a_tuning_run_alone_is_a_report() -> None:
    report = reports.build({}, reports.check_tuning(tuning(), "t"))
    assert set(page.figures(report)) == {"budget"}
    assert "Applied" in page.render(report)


def test_a_run_that_measured_nothing_has_no_picture_and_still_its_table() -> None:
    found = tuning()
    for trial in found["trials"]:
        trial |= {"n": 0, "itl_p99_s": None, "violations": None}
    report = reports.build({}, reports.check_tuning(found, "t"))
    assert page.figures(report) == {}
    assert '<table class="trials">' in page.render(report)


def test_the_document_of_a_tuning_run_is_what_a_report_reads() -> None:
    before, after = make_config(max_num_batched_tokens=2048), make_config(max_num_batched_tokens=256)

    def trial(number: int, config: LiveConfig, violated: int, decision: Decision) -> Trial:
        found = make_reading(n=60, violated_itl=violated)
        measured = Measurement("measured", config, number, 0.0, 60.0, found, (Block(violated, 60),))
        return Trial(
            number, "explore" if number else "incumbent", measured, score(found, config.slo), decision
        )

    trials = (trial(0, before, 20, "incumbent"), trial(1, after, 2, "improves"))
    result = RunResult("Applied", "2 of 60 against 20", before, after, trials, None, None, None, 3)
    document = reports.check_tuning(plain(result_document(result, {"seed": 4})), "result.json")
    report = reports.build({}, document)
    (figure,) = page.figures(report).values()
    drawn = to_svg(figure)
    for said in ("2,048", "256", "target", before.scheduling_policy):
        assert said in drawn
    assert page.trial_rows(document)[1][2:7] == ["256", before.scheduling_policy, "60", "0", "2"]
    assert "Applied. 2 of 60 against 20" in page.headlines(report)[0]


def test_the_command_takes_labels_compressed_results_and_a_tuning_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replayed("uniform").save(tmp_path / "even.json.gz")
    replayed().save(tmp_path / "bursty.json")
    (tmp_path / "result.json").write_text(json.dumps(tuning()))
    out = tmp_path / "r.html"
    arguments = [
        f"uniform={tmp_path}/even.json.gz",
        f"{tmp_path}/bursty.json",
        "--run",
        f"{tmp_path}/result.json",
    ]
    assert main(["report", *arguments, "--out", str(out)]) == 0
    assert out.exists()
    assert "60 of 60 ok" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["t.json", "t.json", "a.json"], "only one tuning run"),
        (["absent.json"], "cannot be read as a replay result"),
        (["=x.json"], "LABEL=FILE"),
        (["a.json", "a.json"], "a label that is not taken"),
        (["t.json", "t.json"], "only one tuning run"),
        (["b.json"], "trials[0].config"),
    ],
)
def test_wrong_arguments_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    replayed().save(tmp_path / "a.json")
    (tmp_path / "t.json").write_text(json.dumps(tuning()))
    (tmp_path / "b.json").write_text(json.dumps(tuning() | {"trials": [{"config": {}}]}))
    with pytest.raises(InputError) as caught:
        load(arguments)
    assert said in str(caught.value)


def test_a_page_that_is_not_html_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.html"):
        page.write(reports.build({"a": replayed()}), tmp_path / "r.txt")
    assert list(tmp_path.iterdir()) == []
