"""The terminal's picture of a local service: a live panel on a terminal, log lines elsewhere.

Fed by `main` with the JSON of `/status`, so it can show nothing that a script could not read too. Knows nothing of
processes or plans.
"""

from __future__ import annotations

import sys
import time
from typing import IO, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trimtab_operator.local.events import Event

Json = dict[str, Any]
_EVENTS_SHOWN = 6
_COLOURS = {"True": "green", "False": "red", "Unknown": "yellow"}


def describe_live(document: Json | None) -> str:
    """A live document in one line: `generation 3 (Spec) · 2,048 tokens a step · 64 requests · fcfs`."""
    if not document:
        return "-"
    config = document.get("config") or {}
    source = f" ({document['source']})" if document.get("source") else ""
    parts = [f"generation {document.get('generation')}{source}"]
    if "max_num_batched_tokens" in config:
        parts.append(f"{config['max_num_batched_tokens']:,} tokens a step")
    if "max_num_seqs" in config:
        parts.append(f"{config['max_num_seqs']} requests")
    if config.get("long_prefill_token_threshold"):
        parts.append(f"prompts ≤ {config['long_prefill_token_threshold']:,}")
    if "scheduling_policy" in config:
        parts.append(str(config["scheduling_policy"]))
    return " · ".join(parts)


def panel(status: Json, events_shown: int = _EVENTS_SHOWN) -> RenderableType:
    """The whole picture of one `/status`, with its newest events."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column()
    ready = condition(status, "Ready")
    facts.add_row("ready", _verdict(ready))
    for kind in ("Available", "Reconciling", "Stalled", "ConfigApplied"):
        found = condition(status, kind)
        bad = "True" if kind in ("Reconciling", "Stalled") else "False"
        if found and found["status"] == bad:
            facts.add_row(kind.lower(), _verdict(found))
    facts.add_row("model", str(status["model"]))
    facts.add_row("endpoint", f"{status['url']}/v1")
    facts.add_row("control", str(status["controlUrl"]))
    facts.add_row(
        "live config", f"{describe_live(status['live']['incumbent'])} · applied {status['live']['applied']}"
    )
    candidate = status["live"]["candidate"]
    if candidate:
        left = max(0.0, candidate["until"] - time.time())
        facts.add_row("candidate", f"{describe_live(candidate)} · {left:.0f} s left")
    tuning = status["tuning"]
    facts.add_row("tuning", f"{tuning['mode']}, {tuning['state']}" if tuning["mode"] != "Off" else "Off")
    for replica in status["replicas"]:
        if replica["phase"] == "Failed":
            facts.add_row("log", Text(f"{replica['log']} ({replica['name']})", style="yellow"))
    if status["file"]["error"]:
        facts.add_row("file", Text(str(status["file"]["error"]), style="red"))
    replicas = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in ("replica", "phase", "generation", "requests", "restarts", "pid", "port"):
        replicas.add_column(title, no_wrap=True)
    for replica in status["replicas"]:
        replicas.add_row(
            replica["name"],
            Text(replica["phase"], style="green" if replica["phase"] == "Ready" else "yellow"),
            _shown(replica["generation"]),
            str(replica["outstanding"]),
            str(replica["restarts"]),
            _shown(replica["pid"]),
            _port(replica["url"]),
        )
    events = Table.grid(padding=(0, 1))
    for event in status["events"][-events_shown:] if events_shown else []:
        style = "yellow" if event["type"] == "Warning" else ""
        events.add_row(
            _clock(event["time"]), Text(event["reason"], style=style), Text(_headline(event["message"]))
        )
    title = f"Trimtab · service {status['name']} · Ctrl-C stops everything"
    return Panel(Group(facts, Text(), replicas, Text(), events), title=title, title_align="left")


def fitting(status: Json, console: Console) -> RenderableType:
    """The picture with as many events as the terminal has lines for: a cut at the bottom would hide the newest ones."""
    picture = panel(status)
    for events_shown in range(_EVENTS_SHOWN - 1, -1, -1):
        if len(console.render_lines(picture)) <= console.height:
            break
        picture = panel(status, events_shown)
    return picture


def condition(status: Json, kind: str) -> Json | None:
    """One condition by its type."""
    found: Json | None = next((c for c in status["conditions"] if c["type"] == kind), None)
    return found


class View:
    """Shows status until `stop`. `event` is called as events happen, `status` about once a second."""

    def __init__(self, stream: IO[str] = sys.stdout, plain: bool = False) -> None:
        self._stream = stream
        self._live: Live | None = None
        if not plain and stream.isatty():
            # Refreshed by us alone: a refresh thread would take the interpreter from the proxy at any moment.
            self._live = Live(console=Console(file=stream), auto_refresh=False, transient=True)

    def start(self) -> None:
        """Take the terminal."""
        if self._live is not None:
            self._live.start()

    def event(self, event: Event) -> None:
        """One thing that happened; a line, where there is no panel."""
        if self._live is None:
            level = "WARNING" if event.type == "Warning" else "INFO"
            print(
                f"{_clock(event.time)} {level:<7} {event.reason}: {event.message}",
                file=self._stream,
                flush=True,
            )

    def status(self, status: Json) -> None:
        """The state now."""
        if self._live is not None:
            self._live.update(fitting(status, self._live.console), refresh=True)

    def stop(self, message: str) -> None:
        """Give the terminal back, with a last line in place of a picture that is no longer true."""
        if self._live is not None:
            self._live.stop()
            print(message, file=self._stream, flush=True)


def _verdict(found: Json | None) -> Text:
    if found is None:
        return Text("Unknown", style="yellow")
    text = f"{found['status']} ({found['reason']})"
    if found["message"] and (found["status"] != "True" or found["type"] != "Ready"):
        text += f" {found['message']}"
    # Reconciling and Stalled are bad news when True.
    colour = "yellow" if found["type"] in ("Reconciling", "Stalled") else _COLOURS[found["status"]]
    return Text(text, style=colour)


def _shown(value: object) -> str:
    return "-" if value is None else str(value)


def _clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def _port(url: str | None) -> str:
    # Everything is on the loopback, and a whole address does not fit a terminal of 80 columns.
    return "-" if url is None else url.rpartition(":")[2]


def _headline(text: str) -> str:
    """The first line, and the next with it where it only announces that."""
    lines = [line.strip() for line in text.strip().splitlines()] or [""]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
