"""Downloads from a hub that speaks the real one's HTTP: resumed, checked, once per cache, and each failure with its cause."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.hub import HubServer, Model, hub_server, wait_for
from trimtab_engine.errors import ConfigError, ModelLoadError
from trimtab_engine.hub.download import HubOptions, fetch
from trimtab_engine.model_files import HubReference, resolve

TINY = HubReference("trimtab/tiny")
NEEDED = {
    "config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors",
}  # fmt: skip
WEIGHTS = "model.safetensors"


class Fetched:
    """What `fetch` said while it worked."""

    def __init__(self) -> None:
        self.reports: list[tuple[float, int, str | None]] = []

    def __call__(self, fraction: float, total_bytes: int, waiting_for: str | None) -> None:
        self.reports.append((fraction, total_bytes, waiting_for))


def get(
    hub: HubServer,
    cache: Path,
    reference: HubReference = TINY,
    progress: Callable[[float, int, str | None], None] = lambda *words: None,
    **options: Any,
) -> Path:
    given = {"endpoint": hub.url, "ca_file": hub.ca_file, "patience_s": 20.0, **options}
    return fetch(reference, HubOptions(cache_dir=cache, **given), progress)


def equal(folder: Path, repository: Path) -> bool:
    return all((folder / name).read_bytes() == (repository / name).read_bytes() for name in NEEDED)


def test_what_is_needed_comes_and_nothing_else(hub: HubServer, repository: Path, tmp_path: Path) -> None:
    said = Fetched()
    folder = get(hub, tmp_path / "cache", progress=said)
    assert {path.name for path in folder.iterdir()} == NEEDED
    assert equal(folder, repository)
    assert resolve(str(folder)).chat_template is not None
    assert {Path(asked.path).name for asked in hub.downloads()} == NEEDED
    size = sum((repository / name).stat().st_size for name in NEEDED)
    assert said.reports[-1] == (1.0, size, None)


def test_what_is_in_the_cache_is_not_fetched_again(hub: HubServer, tmp_path: Path) -> None:
    folder = get(hub, tmp_path)
    hub.requests.clear()
    assert get(hub, tmp_path) == folder
    assert hub.downloads() == []
    # A commit never changes, so the hub is not even asked.
    hub.requests.clear()
    assert get(hub, tmp_path, revision=hub.models["trimtab/tiny"].commit) == folder
    assert hub.requests == []


def test_the_cache_is_one_that_huggingface_hub_reads(hub: HubServer, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    folder = get(hub, tmp_path)
    assert snapshot_download("trimtab/tiny", cache_dir=tmp_path, local_files_only=True) == str(folder)


def test_a_new_commit_is_fetched_and_shares_what_did_not_change(
    hub: HubServer, repository: Path, tmp_path: Path
) -> None:
    first = get(hub, tmp_path)
    (repository / "generation_config.json").write_text("{}")
    hub.requests.clear()
    second = get(hub, tmp_path)
    assert second != first
    assert [Path(asked.path).name for asked in hub.downloads()] == ["generation_config.json"]
    assert (second / "generation_config.json").read_text() == "{}"


def test_a_cut_connection_goes_on_where_it_was_cut(hub: HubServer, repository: Path, tmp_path: Path) -> None:
    hub.fault(WEIGHTS, cut_after=100_000)
    assert equal(get(hub, tmp_path), repository)
    starts = [asked.start for asked in hub.requests if asked.cdn and asked.path.endswith(WEIGHTS)]
    assert starts[0] == 0
    assert 0 < starts[1] <= 100_000


def test_a_download_that_was_ended_is_resumed_by_the_next(
    hub: HubServer, repository: Path, tmp_path: Path
) -> None:
    hub.fault(WEIGHTS, cut_after=100_000)
    with pytest.raises(ModelLoadError, match="gave up after 1 try"):
        get(hub, tmp_path, patience_s=0.0)
    assert not list((tmp_path / "models--trimtab--tiny").rglob(WEIGHTS))
    hub.requests.clear()
    assert equal(get(hub, tmp_path), repository)
    [asked] = [asked for asked in hub.requests if asked.cdn and asked.path.endswith(WEIGHTS)]
    assert 0 < asked.start <= 100_000
    assert not list(tmp_path.rglob("*partial*"))


@pytest.mark.parametrize("path", ["/api/models", "config.json", WEIGHTS])
@pytest.mark.parametrize(
    ("status", "headers"),
    [(429, {"Retry-After": "0"}), (503, {}), (500, {}), (408, {})],
)
def test_errors_that_pass_are_waited_out(
    hub: HubServer, repository: Path, tmp_path: Path, path: str, status: int, headers: dict[str, str]
) -> None:
    said = Fetched()
    fault = hub.fault(path, status=status, headers=headers, times=2)
    assert equal(get(hub, tmp_path, progress=said), repository)
    assert fault.times == 0
    assert any(cause is not None and f"HTTP {status}" in cause for _, _, cause in said.reports)


def test_a_server_that_cannot_resume_is_asked_for_everything(
    hub: HubServer, repository: Path, tmp_path: Path
) -> None:
    hub.fault(WEIGHTS, cut_after=100_000)
    hub.fault(WEIGHTS, no_ranges=True)
    assert equal(get(hub, tmp_path), repository)


def test_other_content_than_the_hub_lists_is_never_used(
    hub: HubServer, repository: Path, tmp_path: Path
) -> None:
    hub.fault(WEIGHTS, corrupt=True)
    assert equal(get(hub, tmp_path / "once"), repository)
    for name in (WEIGHTS, "config.json"):
        hub.fault(name, corrupt=True, times=2)
        with pytest.raises(ModelLoadError, match=f"{name} came 2 times with content that is not what"):
            get(hub, tmp_path / name)
        assert not list((tmp_path / name).rglob(name))


def test_a_hub_that_sends_on_and_on_fills_no_disk(hub: HubServer, repository: Path, tmp_path: Path) -> None:
    hub.fault(WEIGHTS, endless=True)
    assert equal(get(hub, tmp_path / "once"), repository)
    hub.fault(WEIGHTS, endless=True, times=2)
    with pytest.raises(ModelLoadError, match=f"{WEIGHTS} came 2 times with content that is not what"):
        get(hub, tmp_path / "twice")
    assert not list((tmp_path / "twice").rglob("*partial"))


@pytest.mark.parametrize(
    "lies",
    [{"size": -5}, {"size": "x"}, {"size": []}, {"size": 0}, {"size": 10}, {"size": 2**80}, {"blobId": 5, "lfs": None},
     {"blobId": "../../x", "lfs": None}, {"lfs": "x"}, {"lfs": {"sha256": [], "size": 1, "pointerSize": 1}}, {"rfilename": 5}],
)  # fmt: skip
def test_a_hub_that_lies_about_its_files_ends_in_one_line(
    hub: HubServer, tmp_path: Path, lies: dict[str, Any]
) -> None:
    hub.models["trimtab/tiny"].lies = lies
    with pytest.raises(ModelLoadError):
        get(hub, tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_part_of_something_else_does_not_get_into_the_file(
    hub: HubServer, repository: Path, tmp_path: Path
) -> None:
    digest = hashlib.sha256((repository / WEIGHTS).read_bytes()).hexdigest()
    part = tmp_path / "models--trimtab--tiny" / "blobs" / f"{digest}.trimtab-partial"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 5000)
    assert equal(get(hub, tmp_path), repository)


def test_while_the_hub_fails_the_cache_serves(hub: HubServer, tmp_path: Path) -> None:
    folder = get(hub, tmp_path)
    hub.fault("/api/models", status=503, times=1000)
    assert get(hub, tmp_path) == folder
    hub.stop()
    assert get(hub, tmp_path) == folder
    assert fetch(TINY, HubOptions(endpoint=hub.url, cache_dir=tmp_path), lambda *words: None) == folder


def test_sharded_weights_come_in_all_their_parts(hub: HubServer, repository: Path, tmp_path: Path) -> None:
    whole = (repository / WEIGHTS).read_bytes()
    (repository / WEIGHTS).unlink()
    shards = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    for number, name in enumerate(shards):
        (repository / name).write_bytes(whole[number * 1000 :])
    index = {"weight_map": {f"tensor{n}": name for n, name in enumerate(shards)}}
    (repository / "model.safetensors.index.json").write_text(json.dumps(index))
    folder = get(hub, tmp_path)
    for name in shards:
        assert (folder / name).read_bytes() == (repository / name).read_bytes()
    # One that is gone makes the snapshot incomplete, and comes again.
    (folder / shards[1]).unlink()
    hub.requests.clear()
    assert get(hub, tmp_path) == folder
    assert (folder / shards[1]).is_file()
    assert hub.downloads() == [], "its content was still there"


def test_a_shard_that_fails_ends_the_others(hub: HubServer, repository: Path, tmp_path: Path) -> None:
    (repository / WEIGHTS).unlink()
    for name in ("1.safetensors", "2.safetensors"):
        (repository / name).write_bytes(name.encode() * 50_000)
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (repository / "model.safetensors.index.json").write_text(json.dumps(index))
    held = hub.fault("1.safetensors", hold_at=1000)
    hub.fault("2.safetensors", corrupt=True, times=2)
    threading.Timer(1.0, held.released.set).start()
    with pytest.raises(ModelLoadError, match=r"2\.safetensors came 2 times"):
        get(hub, tmp_path)


def test_one_gguf_is_enough(hub: HubServer, repository: Path, tmp_path: Path) -> None:
    shutil.rmtree(repository)
    repository.mkdir()
    (repository / "README.md").write_text("a model")
    (repository / "tiny-q8.gguf").write_bytes(b"GGUF" * 10_000)
    path = get(hub, tmp_path)
    assert path.name == "tiny-q8.gguf"
    assert path.read_bytes() == (repository / "tiny-q8.gguf").read_bytes()
    (repository / "tiny-q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match="name one"):
        get(hub, tmp_path)
    named = HubReference("trimtab/tiny", "tiny-q4.gguf")
    assert get(hub, tmp_path, named).read_bytes() == b"GGUF"
    hub.requests.clear()
    assert get(hub, tmp_path, named).name == "tiny-q4.gguf"
    assert hub.downloads() == []


def test_a_file_system_without_links_holds_the_files_themselves(
    hub: HubServer, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(self: Path, target: str) -> None:
        raise PermissionError(1, "Operation not permitted", str(self))

    monkeypatch.setattr(Path, "symlink_to", no_links)
    folder = get(hub, tmp_path)
    assert equal(folder, repository)
    hub.requests.clear()
    assert get(hub, tmp_path) == folder
    assert hub.downloads() == []


def test_the_token_goes_to_the_hub_and_nowhere_else(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.models["trimtab/tiny"].token = "hf_secret"
    get(hub, tmp_path)
    assert {asked.token for asked in hub.requests if not asked.cdn} == {"hf_secret"}
    assert {asked.token for asked in hub.requests if asked.cdn} == {None}
    assert "hf_secret" not in caplog.text


def test_tags_and_commits_are_revisions(hub: HubServer, tmp_path: Path) -> None:
    model = hub.models["trimtab/tiny"]
    model.tags["refs/pr/1"] = model.commit
    assert get(hub, tmp_path, revision="refs/pr/1") == get(hub, tmp_path, revision=model.commit)
    with pytest.raises(ModelLoadError, match="is no branch, tag or commit"):
        get(hub, tmp_path, revision="../../x")


def _spoil_architecture(repository: Path) -> None:
    config = json.loads((repository / "config.json").read_text())
    (repository / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))


def _add_shard_index(repository: Path) -> None:
    (repository / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(lambda r: (r / "tokenizer.json").unlink(), "no tokenizer.json", id="tokenizer"),
        pytest.param(lambda r: (r / WEIGHTS).unlink(), "pytorch_model.bin", id="only pickles"),
        pytest.param(_spoil_architecture, "model_type is 'mamba'; supported are llama", id="architecture"),
        pytest.param(
            lambda r: (r / "config.json").write_text("{"), "config.json cannot be read", id="config"
        ),
        pytest.param(_add_shard_index, "names gone.safetensors", id="shard"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_before_its_weights_come(
    hub: HubServer, repository: Path, tmp_path: Path, spoil: Callable[[Path], Any], words: str
) -> None:
    spoil(repository)
    with pytest.raises(ModelLoadError) as caught:
        get(hub, tmp_path)
    assert str(caught.value).startswith("model hf://trimtab/tiny: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert hub.downloads(WEIGHTS) == []


@pytest.mark.parametrize("token", [None, "wrong"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"name": "trimtab/other"}, "no such model at http://127.0.0.1", id="missing"),
        pytest.param({"token": "right"}, "no such model at http://127.0.0.1", id="private"),
        pytest.param({"gated": "right"}, "access is gated", id="gated"),
        pytest.param({"revision": "no-such"}, "the hub has no revision 'no-such'", id="revision"),
    ],
)
def test_what_the_hub_refuses_is_said_with_what_helps(
    hub: HubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    token: str | None,
    change: dict[str, str],
    words: str,
) -> None:
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    model = hub.models["trimtab/tiny"]
    model.token, model.gated = change.get("token"), change.get("gated")
    with pytest.raises(ModelLoadError) as caught:
        get(hub, tmp_path, HubReference(change.get("name", "trimtab/tiny")), revision=change.get("revision"))
    message = str(caught.value)
    assert words in message
    if "revision" not in change:
        assert ("HF_TOKEN" in message) == (token is None), "a token is asked for where none was given"
    assert len(hub.requests) == 1, "not tried again"


def test_a_hub_that_cannot_be_reached_is_said_after_the_patience(hub: HubServer, tmp_path: Path) -> None:
    hub.stop()
    with pytest.raises(ModelLoadError, match=r"http://127\.0\.0\.1:\d+: .*refused.*gave up after"):
        get(hub, tmp_path, patience_s=0.05)


def test_something_that_is_no_hub_is_called_so(hub: HubServer, tmp_path: Path) -> None:
    hub.fault("/api/models", status=200, times=9)
    with pytest.raises(ModelLoadError, match="does not speak the hub's API"):
        get(hub, tmp_path)


def test_too_little_space_is_said_before_anything_comes(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelLoadError, match=r"needs .* KiB, and the cache may hold 100\.0 KiB"):
        get(hub, tmp_path, limit_bytes=100 * 1024)
    assert hub.downloads(WEIGHTS) == []
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        "trimtab_engine.hub.download.shutil.disk_usage", lambda path: usage._replace(free=200_000)
    )
    with pytest.raises(ModelLoadError, match=r"no space: .* are missing, .* has 195\.3 KiB free"):
        get(hub, tmp_path)
    assert hub.downloads(WEIGHTS) == []


def test_a_cache_that_cannot_be_written_is_named(hub: HubServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelLoadError, match=r"the cache cannot be written: .*file"):
        get(hub, tmp_path / "file")


def test_who_waits_for_another_download_says_so_and_then_has_it(hub: HubServer, tmp_path: Path) -> None:
    import filelock

    folder = get(hub, tmp_path)
    (folder / WEIGHTS).unlink()
    said = Fetched()
    lock = tmp_path / ".locks" / "models--trimtab--tiny" / "trimtab.lock"
    with filelock.FileLock(lock):
        waiting = threading.Thread(target=get, args=(hub, tmp_path, TINY, said))
        waiting.start()
        wait_for(lambda: bool(said.reports), "a word of who waits")
        assert said.reports[0][2] == "another engine downloads it into the same cache"
    waiting.join(60)
    assert (folder / WEIGHTS).is_file()


def test_tls_needs_the_hubs_own_authority(repository: Path, tmp_path: Path) -> None:
    with hub_server(pki=tmp_path / "pki") as hub:
        hub.models["trimtab/tiny"] = Model(repository)
        assert equal(get(hub, tmp_path / "cache"), repository)
        empty = tmp_path / "empty.pem"
        empty.write_text("\n")
        for ca_file in (None, empty):
            with pytest.raises(ModelLoadError, match=r"TLS: .* is not trusted .*--hub-ca-file"):
                get(hub, tmp_path / "other", ca_file=ca_file)
        broken = tmp_path / "broken.pem"
        broken.write_text("nonsense")
        for ca_file in (broken, tmp_path / "missing.pem"):
            with pytest.raises(ConfigError, match="--hub-ca-file"):
                get(hub, tmp_path / "other", ca_file=ca_file)
