"""The parser against prometheus_client's own output and parser, and against text it must refuse."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from trimtab_tuner.metrics.exposition import ExpositionError, Labels, parse

LABEL_VALUES = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters="\r\x85\u2028\u2029"), max_size=12
)


def reference(text: str) -> dict[str, dict[Labels, float]]:
    found: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


@given(
    values=st.dictionaries(
        st.tuples(LABEL_VALUES, LABEL_VALUES), st.floats(allow_nan=False), min_size=1, max_size=5
    )
)
def test_any_label_value_and_number_reads_as_the_client_library_reads_it(
    values: dict[tuple[str, str], float],
) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("depth", "of the queue", ["a", "b"], registry=registry)
    for labels, value in values.items():
        gauge.labels(*labels).set(value)
    text = generate_latest(registry).decode()
    assert parse(text) == reference(text)


def test_histograms_counters_and_timestamps_are_read() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("latency_seconds", "x", buckets=(0.1, 1.0), registry=registry)
    histogram.observe(0.5)
    Counter("requests", "x", ["reason"], registry=registry).labels('say "no"\\\n').inc(3)
    text = generate_latest(registry).decode()
    assert parse(text) == reference(text)
    assert parse('a{b="c"} 4 1700000000000\n')["a"] == {(("b", "c"),): 4.0}
    assert parse('a{le="1",} 4 # {trace="x"} 0.5 1.0\n')["a"] == {(("le", "1"),): 4.0}
    assert math.isnan(parse("a NaN\n")["a"][()])
    assert parse("a +Inf\n")["a"][()] == math.inf


@pytest.mark.parametrize(
    "line", ["a", "a{b=c} 1", 'a{b="c} 1', "a one", '{b="c"} 1', 'a{b="c" d="e"} 1', "a 1 2 3"]
)
def test_a_broken_line_is_named_by_number(line: str) -> None:
    with pytest.raises(ExpositionError, match="line 2"):
        parse(f"fine 1\n{line}\n")
