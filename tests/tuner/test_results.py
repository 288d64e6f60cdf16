"""Result files: what was saved is what is loaded, and a wrong file is named down to the field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.replay_results import replay_result, request_result
from trimtab_tuner.errors import InputError
from trimtab_tuner.result import ReplayResult
from trimtab_tuner.slo import Slo
from trimtab_tuner.stats import summarise


@pytest.mark.parametrize("name", ["r.json", "r.json.gz"])
def test_results_survive_saving_and_loading(tmp_path: Path, name: str) -> None:
    requests = [
        request_result(0, 0.25, cached_tokens=3, generation=4),
        request_result(1, 0.5, ttft_s=None, status="failed", error="boom", http_status=500, sent_s=None),
    ]
    result = replay_result(requests, Slo(0.8, 0.06, {"batch": Slo(9.0, 1.0)}), mode="gamma:3")
    result.save(tmp_path / name, summarise(result).to_json())
    again = ReplayResult.load(tmp_path / name)
    assert again.requests == result.requests
    assert again.slo == result.slo
    assert again.meta == result.meta
    assert summarise(again) == summarise(result)
    assert [path.name for path in tmp_path.iterdir()] == [name]


BROKEN: list[tuple[object, str]] = [
    ([1], "schema"),
    ({"schema": "other/9"}, "other/9"),
    ({"schema": "trimtab.replay/1", "meta": {}, "slo": {}}, "requests"),
    ({"schema": "trimtab.replay/1", "meta": {}, "slo": {"ttft_s": 1}, "requests": []}, "slo.itl_s"),
    (
        {"schema": "trimtab.replay/1", "meta": {}, "slo": {"ttft_s": 1, "itl_s": 1}, "requests": [3]},
        "requests[0]",
    ),
    (
        {
            "schema": "trimtab.replay/1",
            "meta": {},
            "slo": {"ttft_s": 1, "itl_s": 1},
            "requests": [{"index": 0}],
        },
        "requests[0].intended_s",
    ),
]


@pytest.mark.parametrize(("document", "named"), BROKEN)
def test_a_file_that_is_no_result_is_refused_naming_file_and_field(
    tmp_path: Path, document: object, named: str
) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError) as caught:
        ReplayResult.load(path)
    assert str(path) in str(caught.value)
    assert named in str(caught.value)


def test_a_damaged_or_absent_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "r.json.gz").write_bytes(b"\x1f\x8b nonsense")
    (tmp_path / "r.json").write_text("{")
    for name in ("r.json.gz", "r.json", "absent.json"):
        with pytest.raises(InputError, match="cannot be read as a replay result"):
            ReplayResult.load(tmp_path / name)
