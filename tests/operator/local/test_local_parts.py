"""The small parts of local mode: file watch, state folder, events, the terminal's picture."""

import io
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from trimtab_operator.local.events import EventLog
from trimtab_operator.local.state_dir import StateDir, StateDirInUse
from trimtab_operator.local.view import View, describe_live, fitting, panel
from trimtab_operator.local.watch import FileWatch


def touch(path: Path, text: str, second: int) -> None:
    path.write_text(text)
    os.utime(path, (second, second))


def test_edit_is_seen_once_it_has_settled(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    touch(file, "one", 1)
    watch = FileWatch(file)
    assert watch.read() == b"one"
    assert watch.poll() is None
    touch(file, "", 2)  # an editor truncates …
    assert watch.poll() is None
    touch(file, "two", 3)  # … and writes
    assert watch.poll() is None
    assert watch.poll() == b"two"
    assert watch.poll() is None


def test_saving_without_a_change_is_no_edit(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    touch(file, "one", 1)
    watch = FileWatch(file)
    watch.read()
    touch(file, "one", 2)
    assert [watch.poll() for _ in range(3)] == [None] * 3


def test_file_that_was_replaced_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    touch(file, "one", 1)
    watch = FileWatch(file)
    watch.read()
    file.unlink()
    with pytest.raises(FileNotFoundError):
        watch.poll()
    other = tmp_path / "b.yaml"
    touch(other, "two", 2)
    other.rename(file)
    watch.poll()
    assert watch.poll() == b"two"


def test_state_survives_and_belongs_to_one_operator(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    assert state.load_state() == {}
    state.save_state({"highest_generation": 4})
    state.save_live({"generation": 3})
    with pytest.raises(StateDirInUse, match=f"pid {os.getpid()}"):
        StateDir(tmp_path / "state")
    state.close()
    again = StateDir(tmp_path / "state")
    assert again.load_state() == {"highest_generation": 4}
    assert json.loads(again.live_file.read_text()) == {"generation": 3}
    again.close()


def test_folders_of_replicas_that_are_gone_are_kept_for_a_while(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    for number in range(12):
        folder = state.replica_folder(f"chat-{number}")
        folder.mkdir(parents=True)
        (folder / "engine.log").touch()
        os.utime(folder, (number, number))
    state.delete_old_replicas({"chat-0", "chat-11"})
    left = {folder.name for folder in tmp_path.glob("replicas/*")}
    assert left == {"chat-0", "chat-11", *(f"chat-{number}" for number in range(6, 11))}
    state.delete_old_replicas({"chat-0", "chat-11"})
    assert len(list(tmp_path.glob("replicas/*"))) == 7
    state.close()


def test_damaged_state_is_empty_not_fatal(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{")
    state = StateDir(tmp_path)
    assert state.load_state() == {}
    state.close()


def test_equal_events_in_a_row_are_counted() -> None:
    log = EventLog()
    heard: list[str] = []
    log.listener = lambda event: heard.append(event.reason)
    for _ in range(3):
        log.warning("Crashed", "chat-0")
    log.normal("Started", "chat-0")
    assert [(event.reason, event.count) for event in log.last(9)] == [("Crashed", 3), ("Started", 1)]
    assert heard == ["Crashed", "Started"]


STATUS: dict[str, Any] = {
    "name": "chat",
    "url": "http://127.0.0.1:8000",
    "controlUrl": "http://127.0.0.1:8080",
    "model": "tiny",
    "conditions": [
        {"type": "Ready", "status": "True", "reason": "Serving", "message": "2 of 2"},
        {"type": "Stalled", "status": "False", "reason": "AsExpected", "message": ""},
        {
            "type": "ConfigApplied",
            "status": "False",
            "reason": "EngineRejected",
            "message": "chat-1 refused it",
        },
    ],
    "replicas": [
        {
            "name": "chat-0",
            "phase": "Ready",
            "generation": 3,
            "outstanding": 2,
            "restarts": 1,
            "pid": 42,
            "url": "http://127.0.0.1:32855",
        },
        {
            "name": "chat-1",
            "phase": "Starting",
            "generation": None,
            "outstanding": 0,
            "restarts": 0,
            "pid": None,
            "url": None,
        },
    ],
    "live": {
        "incumbent": {
            "generation": 3,
            "source": "Spec",
            "config": {"max_num_batched_tokens": 2048, "max_num_seqs": 64, "scheduling_policy": "fcfs"},
        },
        "candidate": {
            "generation": 4,
            "source": "Recommendation",
            "config": {"max_num_batched_tokens": 512},
            "until": 0.0,
        },
        "applied": "1/2",
    },
    "tuning": {"mode": "Apply", "state": "active"},
    "file": {"path": "chat.yaml", "error": "spec.replicas: -1 is not allowed"},
    "events": [{"type": "Warning", "reason": "Crashed", "message": "first\nsecond", "time": 0.0}],
}


def test_panel_shows_what_a_person_asks_for() -> None:
    STATUS["live"]["candidate"]["until"] = time.time() + 28.4
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(panel(STATUS))
    shown = console.export_text()
    for wanted in (
        "service chat",
        "True (Serving)",
        "False (EngineRejected) chat-1 refused it",
        "http://127.0.0.1:8000/v1",
        "generation 3 (Spec) · 2,048 tokens a step · 64 requests · fcfs · applied 1/2",
        "generation 4 (Recommendation) · 512 tokens a step · 28 s left",
        "spec.replicas: -1 is not allowed",
        "chat-0",
        "Crashed first",
    ):
        assert wanted in shown
    assert "Stalled" not in shown
    assert "second" not in shown


def test_panel_fits_a_small_terminal_and_keeps_the_newest_event() -> None:
    events = [
        {"type": "Normal", "reason": "Updated", "message": f"edit {n} " + "word " * 18, "time": 0.0}
        for n in range(9)
    ]
    console = Console(width=80, height=24, file=io.StringIO(), record=True)
    console.print(fitting({**STATUS, "events": events}, console))
    shown = console.export_text()
    assert len(shown.splitlines()) <= 24
    assert "edit 8" in shown
    assert "edit 0" not in shown
    assert "…" not in shown  # no column of the replicas' table is cut


def test_event_that_only_announces_is_shown_with_what_it_announces() -> None:
    event = {
        "type": "Warning",
        "reason": "InvalidSpec",
        "message": "a.yaml is invalid:\n  spec.x: 1 is not allowed\nmore",
        "time": 0.0,
    }
    console = Console(width=140, file=io.StringIO(), record=True)
    console.print(panel({**STATUS, "events": [event]}))
    shown = console.export_text()
    assert "a.yaml is invalid: spec.x: 1 is not allowed" in shown
    assert "more" not in shown


def test_plain_view_prints_a_line_for_each_event() -> None:
    stream = io.StringIO()
    view = View(stream)
    log = EventLog()
    log.listener = view.event
    view.start()
    log.normal("Started", "chat-0")
    log.warning("Crashed", "chat-0")
    view.status(STATUS)
    view.stop("over")
    lines = stream.getvalue().splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines] == [
        "INFO    Started: chat-0",
        "WARNING Crashed: chat-0",
    ]


def test_live_config_without_a_document_is_a_dash() -> None:
    assert describe_live(None) == "-"
