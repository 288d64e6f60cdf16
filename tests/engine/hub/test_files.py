"""What is needed of a repository, and when to give a hub up: decisions without a hub."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from trimtab_engine.errors import ModelLoadError
from trimtab_engine.hub.files import HubFile, complete, first_files, weight_files
from trimtab_engine.hub.patience import LONGEST_PAUSE_S, Patience, Transient
from trimtab_engine.model_files import HubReference, hub_reference

FOLDER = {"config.json", "tokenizer.json", "model.safetensors"}


@pytest.mark.parametrize(
    ("names", "gguf", "want"),
    [
        pytest.param(FOLDER, None, ("config.json", "tokenizer.json"), id="the least"),
        pytest.param(
            FOLDER | {"README.md", "pytorch_model.bin", "onnx/model.onnx", "consolidated.safetensors", "x.gguf"},
            None,
            ("config.json", "tokenizer.json"),
            id="what nobody reads",
        ),
        pytest.param(
            FOLDER | {"generation_config.json", "tokenizer_config.json", "chat_template.jinja"},
            None,
            ("config.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja", "tokenizer.json"),
            id="everything",
        ),
        pytest.param(
            {"config.json", "tokenizer.json", "model.safetensors.index.json"},
            None,
            ("config.json", "tokenizer.json", "model.safetensors.index.json"),
            id="sharded",
        ),
        pytest.param({"README.md", "m.gguf"}, None, ("m.gguf",), id="the only GGUF"),
        pytest.param({"a.gguf", "q/b.gguf"}, "q/b.gguf", ("q/b.gguf",), id="the GGUF named"),
    ],
)  # fmt: skip
def test_only_what_an_engine_reads_is_fetched(
    names: set[str], gguf: str | None, want: tuple[str, ...]
) -> None:
    assert first_files(names, gguf) == want


@pytest.mark.parametrize(
    ("names", "gguf", "words"),
    [
        ({"config.json", "model.safetensors"}, None, "no tokenizer.json; a slow tokenizer"),
        ({"tokenizer.json", "model.safetensors"}, None, "no config.json"),
        ({"config.json", "tokenizer.json", "pytorch_model.bin"}, None, "pytorch_model.bin"),
        ({"a.gguf", "b.gguf"}, None, "several .gguf files (it has a.gguf, b.gguf); name one"),
        ({"a.gguf"}, "b.gguf", "no b.gguf (it has a.gguf)"),
    ],
)
def test_what_is_lacking_is_named(names: set[str], gguf: str | None, words: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        first_files(names, gguf)
    assert words in str(caught.value)


def test_shards_come_from_the_index_and_stay_inside_the_repository() -> None:
    assert weight_files(None) == ("model.safetensors",)
    assert weight_files(
        {"weight_map": {"a": "2.safetensors", "b": "1.safetensors", "c": "2.safetensors"}}
    ) == (
        "1.safetensors",
        "2.safetensors",
    )
    broken: list[dict[str, object]] = [
        {},
        {"weight_map": {}},
        {"weight_map": {"a": 1}},
        {"weight_map": {"a": "../x"}},
        {"weight_map": {"a": "/x"}},
    ]
    for index in broken:
        with pytest.raises(ModelLoadError, match=r"model\.safetensors\.index\.json"):
            weight_files(index)


def test_a_folder_counts_as_complete_only_with_all_its_weights(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    assert complete(tmp_path, None) is None
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "1", "b": "2"}}))
    (tmp_path / "1").touch()
    assert complete(tmp_path, None) is None
    (tmp_path / "2").touch()
    assert complete(tmp_path, None) == tmp_path
    (tmp_path / "tokenizer.json").unlink()
    assert complete(tmp_path, None) is None


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("hf://org/name", HubReference("org/name")),
        ("hf://org/Name_1.5-x/q4/file.gguf", HubReference("org/Name_1.5-x", "q4/file.gguf")),
        ("/models/x", None),
        ("package://a/b", None),
    ],
)
def test_references_to_a_hub(text: str, want: HubReference | None) -> None:
    assert hub_reference(text) == want
    assert want is None or str(want) == text


@pytest.mark.parametrize(
    "text",
    [
        "hf://name",
        "hf://org/name/x",
        "hf://org/name/",
        "hf://org/../x.gguf",
        "hf://o/n/../x.gguf",
        "hf://ö/n",
    ],
)
def test_broken_references_are_refused(text: str) -> None:
    with pytest.raises(ModelLoadError, match="the form is hf://organisation/name"):
        hub_reference(text)


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now_s += seconds


def patience(clock: Clock, limit_s: float = 300.0) -> Patience:
    return Patience(limit_s, now=clock.now, sleep=clock.sleep, random=Random(0))


def test_pauses_grow_to_a_bound_and_end_with_the_last_cause() -> None:
    clock = Clock()

    def attempt() -> None:
        raise Transient("HTTP 503")

    with pytest.raises(ModelLoadError, match=r"HTTP 503 \(gave up after \d+ tries\)"):
        patience(clock).run(attempt)
    assert clock.now_s <= 300
    assert clock.now_s > 300 - LONGEST_PAUSE_S
    bounds = [min(LONGEST_PAUSE_S, 2.0**n) for n in range(len(clock.pauses))]
    assert all(bound / 2 <= pause <= bound for pause, bound in zip(clock.pauses, bounds, strict=True))


def test_what_the_hub_asks_for_is_waited_and_does_not_count_as_impatience() -> None:
    clock = Clock()
    answers = [Transient("HTTP 429", 250.0), Transient("HTTP 429", 250.0), None]

    def attempt() -> str:
        answer = answers.pop(0)
        if answer is not None:
            raise answer
        return "done"

    assert patience(clock, limit_s=100).run(attempt) == "done"
    assert clock.pauses == [250.0, 250.0]


def test_news_starts_the_patience_again() -> None:
    clock = Clock()
    held = patience(clock, limit_s=10)
    count = 0

    def attempt() -> str:
        nonlocal count
        count += 1
        clock.now_s += 8
        held.news()
        if count < 20:
            raise Transient("cut")
        return "done"

    assert held.run(attempt) == "done"
    assert max(clock.pauses) <= 1.0


def test_content_is_named_by_what_git_or_lfs_call_it() -> None:
    assert HubFile("a", 1, "git").etag == "git"
    assert HubFile("a", 1, "git", "sha").etag == "sha"
