"""Trace files: every format as published, and broken lines named with file, line, value and what was expected."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from support.broken_json import BROKEN_JSON
from trimtab_tuner import trace as traces
from trimtab_tuner.burstiness import interarrival_cv
from trimtab_tuner.errors import InputError, TraceError

AZURE_2023 = (
    b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    b"2023-11-16 18:17:03.9799600,4808,10\r\n"
    b"2023-11-16 18:17:04.0319600,3180,8\r\n"
    b"2023-11-16 18:17:04.0319601,110,27"  # the last line of the published file has no line end
)
AZURE_2024 = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:00.017335+00:00,2399,6\n"
BURST_1 = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n118,GPT-4,417,276,693,API log\n"
BURST_3 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n0.5,7,1.2,ChatGPT,30,12,42,Conversation log\n2.25,7,0.3,ChatGPT,31,13,44,Conversation log\n"


def write(tmp_path: Path, name: str, content: bytes | str) -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def mooncake_line(at_ms: int, prompt: int = 1000, output: int = 20, ids: list[int] | None = None) -> str:
    return json.dumps(
        {
            "timestamp": at_ms,
            "input_length": prompt,
            "output_length": output,
            "hash_ids": [1, 2] if ids is None else ids,
        }
    )


def test_azure_2023_keeps_all_seven_digits_of_a_file_with_crlf_and_no_last_line_end(tmp_path: Path) -> None:
    trace = traces.load(write(tmp_path, "azure.csv", AZURE_2023))
    assert trace.format == "azure"
    assert [(r.prompt_tokens, r.output_tokens) for r in trace.requests] == [(4808, 10), (3180, 8), (110, 27)]
    assert [r.arrival_s for r in trace.requests] == pytest.approx([0.0, 0.052, 0.0520001], abs=1e-9)


def test_azure_2024_with_utc_offsets_is_read_alike(tmp_path: Path) -> None:
    trace = traces.load(write(tmp_path, "azure.csv", AZURE_2024))
    assert [r.arrival_s for r in trace.requests] == pytest.approx([0.0, 0.007405], abs=1e-9)


@pytest.mark.parametrize(
    ("content", "want"),
    [(BURST_1, [(0.0, 472, 18), (113.0, 417, 276)]), (BURST_3, [(0.0, 30, 12), (1.75, 31, 13)])],
)
def test_burstgpt_is_read_by_column_name_and_failed_requests_are_counted(
    tmp_path: Path, content: str, want: list[tuple[float, int, int]]
) -> None:
    trace = traces.load(write(tmp_path, "burst.csv", content))
    assert trace.format == "burstgpt"
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in trace.requests] == want
    assert any("left out 1 requests" in change for change in trace.changes) == (content is BURST_1)


def test_mooncake_has_milliseconds_and_prefix_blocks(tmp_path: Path) -> None:
    lines = [mooncake_line(0, ids=[46, 47]), mooncake_line(3000, ids=[46, 9])]
    trace = traces.load(write(tmp_path, "m.jsonl", "\n".join(lines)))
    assert trace.format == "mooncake"
    assert trace.prefix_block_tokens == 512
    assert [(r.arrival_s, r.prefix_block_ids) for r in trace.requests] == [(0.0, (46, 47)), (3.0, (46, 9))]


def test_mooncake_jitter_breaks_up_instants_inside_their_bin_and_keeps_the_order(tmp_path: Path) -> None:
    lines = [mooncake_line(3000 * (n // 10), prompt=100 + n) for n in range(100)]
    path = write(tmp_path, "m.jsonl", "\n".join(lines))
    plain, jittered = traces.load(path), traces.load(path, jitter_seed=5)
    assert [r.prompt_tokens for r in jittered.requests] == [r.prompt_tokens for r in plain.requests]
    assert len({r.arrival_s for r in jittered.requests}) == 100
    shift = plain.requests[-1].arrival_s - jittered.requests[-1].arrival_s
    assert abs(shift) < 3.0
    assert (
        (interarrival_cv([r.arrival_s for r in jittered.requests]) or 9)
        < 1.5
        < (interarrival_cv([r.arrival_s for r in plain.requests]) or 0)
    )
    assert traces.load(path, jitter_seed=5).hash == jittered.hash != traces.load(path, jitter_seed=6).hash


def test_own_records_survive_saving_and_loading(tmp_path: Path) -> None:
    trace = traces.Trace(
        (
            traces.TraceRequest(0.0, 40, 3, "interactive", (1, "b"), "acme"),
            traces.TraceRequest(1.5, 9, 1),
        ),
        "made here",
        "records",
        16,
    )
    traces.save(trace, tmp_path / "t.jsonl")
    again = traces.load(tmp_path / "t.jsonl")
    assert again.requests == trace.requests
    assert again.prefix_block_tokens == 16
    assert again.hash == trace.hash


def test_a_whole_workload_reply_of_an_engine_is_a_trace_and_is_put_in_order(tmp_path: Path) -> None:
    records = [
        {
            "arrival_s": 1700000002.5,
            "prompt_tokens": 7,
            "output_tokens": 3,
            "outcome": "length",
            "prefix_block_ids": [11],
        },
        {
            "arrival_s": 1700000001.0,
            "prompt_tokens": 5,
            "output_tokens": 0,
            "max_tokens": 9,
            "outcome": "server_abort",
        },
        {"arrival_s": 1700000001.5, "prompt_tokens": 5, "output_tokens": 0, "outcome": "client_abort"},
    ]
    trace = traces.load(write(tmp_path, "w.json", json.dumps({"records": records, "next": 3, "dropped": 0})))
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [
        (0.0, 5, 9),
        (1.5, 7, 3),
    ]
    assert trace.prefix_block_tokens == 16
    assert len(trace.changes) == 2  # one left out, and sorted


def test_compressed_files_and_byte_order_marks_are_read(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf" + AZURE_2023))
    assert len(traces.load(path)) == 3


@pytest.mark.parametrize("damage", ["cut", "spoiled", "empty"])
def test_a_compressed_file_that_is_damaged_anywhere_is_named(tmp_path: Path, damage: str) -> None:
    rng = random.Random(0)
    lines = [
        json.dumps({"arrival_s": n, "prompt_tokens": rng.randrange(1, 9999), "output_tokens": 1})
        for n in range(20_000)
    ]
    whole = gzip.compress("\n".join(lines).encode())
    path = tmp_path / "trace.jsonl.gz"
    middle = len(whole) * 3 // 4
    spoiled = whole[:middle] + bytes(64) + whole[middle + 64 :]
    path.write_bytes({"cut": whole[:-20], "spoiled": spoiled, "empty": b"\x1f\x8b"}[damage])
    # Spoiled data may also come out as a line that is broken.
    with pytest.raises(InputError, match=r"trace\.jsonl\.gz"):
        traces.load(path)


def test_of_a_broken_line_only_the_beginning_is_said(tmp_path: Path) -> None:
    for value in ("s" * 30_000, list(range(9_999))):
        path = write(
            tmp_path, "w.jsonl", json.dumps({"arrival_s": value, "prompt_tokens": 1, "output_tokens": 1})
        )
        with pytest.raises(TraceError, match="…") as caught:
            traces.load(path)
        assert len(str(caught.value)) < 400 + len(str(path))


BROKEN = [
    (
        "azure.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,4808,10\n2023-11-16 18:17:04,many,8\n",
        3,
        "many",
        "ContextTokens",
    ),
    ("azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,1,1\n", 2, "yesterday", "TIMESTAMP"),
    (
        "azure.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-13-16 18:17:04,1,1\n",
        2,
        "2023-13-16 18:17:04",
        "TIMESTAMP",
    ),
    (
        "azure.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:04,1\n",
        2,
        "2023-11-16 18:17:04,1",
        "3 comma-separated",
    ),
    ("azure.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n\n2023-11-16 18:17:04,-1,1\n", 3, "-1", "≥ 0"),
    (
        "azure.csv",
        b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:04,\xff,1\n",
        2,
        "\udcff",
        "ContextTokens",
    ),
    ("burst.csv", BURST_1 + "nan,ChatGPT,1,1,2,API log\n", 5, "nan", "Timestamp"),
    ("burst.csv", BURST_1 + "1,ChatGPT,1.5,1,2,API log\n", 5, "1.5", "Request tokens"),
    ("m.jsonl", mooncake_line(0) + "\n{'timestamp': 1}\n", 2, "{'timestamp': 1}", "one JSON object"),
    (
        "m.jsonl",
        mooncake_line(0) + '\n{"timestamp": 1, "input_length": 5}\n',
        2,
        ["input_length", "timestamp"],
        "missing: output_length",
    ),
    (
        "m.jsonl",
        mooncake_line(0) + '\n{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": 7}\n',
        2,
        7,
        "hash_ids",
    ),
    (
        "m.jsonl",
        mooncake_line(0) + '\n{"timestamp": true, "input_length": 5, "output_length": 1}\n',
        2,
        True,
        "timestamp",
    ),
    (
        "own.jsonl",
        '{"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 1}\n[1]\n',
        2,
        "[1]",
        "one JSON object",
    ),
    (
        "own.jsonl",
        '{"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 1, "slo_class": 3}\n',
        1,
        3,
        "slo_class",
    ),
    ("what.txt", "hello\n", 1, "hello", "Azure"),
    ("empty.csv", "", 1, "", "Azure"),
]


@pytest.mark.parametrize(("name", "content", "line", "value", "expected"), BROKEN)
def test_a_broken_line_is_named_with_file_line_value_and_what_was_expected(
    tmp_path: Path, name: str, content: bytes | str, line: int, value: object, expected: str
) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(TraceError) as caught:
        traces.load(path)
    assert caught.value.line == line
    assert caught.value.path == f"{path}:{line}"
    assert caught.value.value == value
    assert expected in caught.value.allowed


@pytest.mark.parametrize(
    "broken", [*BROKEN_JSON, '{"arrival_s": 0, "prompt_tokens": 1' + "0" * 400 + "}"], ids=range(7)
)
def test_what_only_looks_like_json_is_a_broken_line_too(tmp_path: Path, broken: str) -> None:
    path = write(tmp_path, "own.jsonl", '{"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 1}\n' + broken)
    with pytest.raises(TraceError) as caught:
        traces.load(path)
    assert caught.value.line == 2


def test_a_prompt_of_absurd_length_is_a_broken_line_and_no_full_memory(tmp_path: Path) -> None:
    path = write(tmp_path, "own.jsonl", '{"arrival_s": 0, "prompt_tokens": 1e30, "output_tokens": 1}\n')
    with pytest.raises(TraceError, match="at most 10000000"):
        traces.load(path)


def test_a_header_without_a_needed_column_says_which_columns_are_needed(tmp_path: Path) -> None:
    path = write(tmp_path, "azure.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:17:04,1\n")
    with pytest.raises(TraceError, match="GeneratedTokens"):
        traces.load(path, format="azure")


@pytest.mark.parametrize("name", ["absent.csv", "."])
def test_an_unreadable_file_is_a_clear_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="cannot be read as a trace"):
        traces.load(tmp_path / name)


def test_a_broken_line_after_the_limit_is_not_reached(tmp_path: Path) -> None:
    path = write(tmp_path, "azure.csv", AZURE_2023 + b"\r\nbroken")
    assert len(traces.load(path, limit=2)) == 2
    with pytest.raises(TraceError):
        traces.load(path)
