"""Durations and quantities, as Kubernetes and Go write them."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab_operator.quantities import format_duration, parse_bytes, parse_duration, parse_quantity


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("800ms", 0.8),
        ("60s", 60.0),
        ("1.5s", 1.5),
        ("1h30m", 5400.0),
        ("0", 0.0),
        ("0s", 0.0),
        ("0.1ms", 0.0001),
    ],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "s", "5 s", "-5s", "1h30", "1s\n", "5d", "1e3s", ".5s", "ms5"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


@given(st.integers(0, 10**9))
def test_a_written_duration_is_read_back_to_the_millisecond(milliseconds: int) -> None:
    assert parse_duration(format_duration(milliseconds / 1000)) == milliseconds / 1000


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4Gi", 4 * 2**30), ("1.5Ki", 1536), ("500m", Decimal("0.5")), ("1000m", 1), ("2", 2), (2, 2), ("1e3", 1000),
        ("3E", 3 * 10**18), ("1Ei", 2**60), ("2k", 2000), ("1E2", 100),
    ],
)  # fmt: skip
def test_quantities_are_read_exactly(text: str | int, value: int | Decimal) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "Gi", "1 Gi", "1GB", "1ki", "0x10", "1Gi\n4"])
def test_what_is_no_quantity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"quantity|suffix"):
        parse_quantity(text)


def test_bytes_round_up_as_kubernetes_does() -> None:
    assert parse_bytes("1500m") == 2
    assert parse_bytes("1.5Gi") == 1536 * 2**20
