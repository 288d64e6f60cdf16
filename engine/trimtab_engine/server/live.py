"""The HTTP process's door to the live configuration: documents from the admin port and from `live.json`, the read-back.

The engine decides (`live_state`); here documents are parsed, numbered when they bring no number, sent, and the latest
read-back is kept, so that it can be read while the engine is in the middle of a step. Used by `admin` and `main`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from trimtab_engine.core.live import Ceilings, LiveConfig
from trimtab_engine.errors import ConfigError, EngineDead, GenerationConflict
from trimtab_engine.live_state import FIRST_LIMIT, Versioned, check_generation, check_lease, check_source
from trimtab_engine.messages import Applied
from trimtab_engine.server import strict_json
from trimtab_engine.server.client import EngineClient

logger = logging.getLogger(__name__)

POLL_S = 1.0
ANSWER_WAIT_S = 1.0  # after that a PUT is answered 202: the engine is in a long step
MAX_FILE_BYTES = 1 << 20
_FIELDS = ("config", "generation", "lease_s", "source")


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed live-config document; `generation` None: to be numbered here."""

    generation: int | None
    source: str
    config: LiveConfig
    lease_s: float | None = None


def parse_document(raw: object, ceilings: Ceilings) -> Document:
    """Check a whole document; raises ConfigError with path, value and allowed range."""
    if not isinstance(raw, Mapping):
        raise ConfigError("document", raw, f"a JSON object with {', '.join(_FIELDS)}")
    for key in raw:
        if key not in _FIELDS:
            raise ConfigError(str(key), raw[key], f"known fields are {', '.join(_FIELDS)}")
    generation = raw.get("generation")
    return Document(
        generation=None if generation is None else check_generation(generation),
        source=check_source(raw.get("source", "Spec")),
        config=LiveConfig.from_json(raw.get("config"), ceilings),
        lease_s=check_lease(raw.get("lease_s")),
    )


def read_live_file(path: Path, ceilings: Ceilings) -> Versioned:
    """The incumbent in `live.json`; ConfigError for everything that can be wrong with the file."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(str(path), None, f"a readable file ({error.strerror})") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(str(path), f"{len(data)} bytes", f"at most {MAX_FILE_BYTES} bytes")
    try:
        raw = strict_json.decode(data)
    except ValueError as error:
        raise ConfigError(str(path), data[:80].decode(errors="replace"), f"JSON ({error})") from error
    try:
        document = parse_document(raw, ceilings)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.path}", error.value, error.allowed) from error
    if document.generation is None:
        raise ConfigError(f"{path}: generation", None, "an integer; only a push may leave the number to us")
    if document.generation >= FIRST_LIMIT:
        raise ConfigError(f"{path}: generation", document.generation, "an integer from 0 to 2^61-1")
    if document.lease_s is not None:
        raise ConfigError(
            f"{path}: lease_s", document.lease_s, "null: a file holds incumbents, never candidates"
        )
    return Versioned(document.generation, document.source, document.config)


class LiveDoor:
    """Keeps the latest read-back and the documents that the engine has not answered yet."""

    def __init__(
        self,
        client: EngineClient,
        ceilings: Ceilings,
        readback: dict[str, object],
        process_start_unix_s: float,
        on_change: Callable[[Versioned], None],
    ) -> None:
        """`readback` is that of the start values; `on_change` hears of every config that comes into force."""
        self._client = client
        self._ceilings = ceilings
        self._readback = readback
        self._process_start_unix_s = process_start_unix_s
        self._on_change = on_change
        self._pending: dict[int, Document] = {}  # generation → document, oldest first
        self._file_error: str | None = None
        self._boot = self.in_force
        client.on_readback = self.take

    def readback(self) -> dict[str, object]:
        """Body of `GET /admin/live-config`."""
        pending = None
        if self._pending:
            generation, document = next(reversed(self._pending.items()))
            pending = {
                "generation": generation,
                "source": document.source,
                "config": document.config.to_json(),
                "lease_s": document.lease_s,
            }
        return {
            **self._readback,
            "pending": pending,
            "file_error": self._file_error,
            "process_start": self._process_start_unix_s,
        }

    def take(self, readback: dict[str, object]) -> None:
        """A read-back from the engine: keep it, and pass on what has come into force."""
        before, self._readback = self._readback["in_force"], readback
        if readback["in_force"] != before:
            self.announce()

    def announce(self) -> None:
        """Tell `on_change` and the queue limit what is in force."""
        in_force = self.in_force
        self._client.max_num_seqs = in_force.config.max_num_seqs
        self._on_change(in_force)

    @property
    def in_force(self) -> Versioned:
        """The config in force, by the latest read-back."""
        raw = self._readback["in_force"]
        assert isinstance(raw, dict), "the read-back is our own"
        return Versioned(
            int(raw["generation"]), str(raw["source"]), LiveConfig.from_json(raw["config"], self._ceilings)
        )

    async def put(self, raw: object) -> tuple[int, dict[str, object]]:
        """Apply a pushed document: (200, answer) when in force, (202, answer) while the engine is busy.

        Raises ConfigError, GenerationConflict, EngineDead; nothing is changed then.
        """
        document = parse_document(raw, self._ceilings)
        old = self._readback["in_force"]
        generation = self._next_generation() if document.generation is None else document.generation
        task = asyncio.create_task(self._send(document, generation))
        try:
            await asyncio.wait_for(asyncio.shield(task), ANSWER_WAIT_S)
        except TimeoutError:
            task.add_done_callback(_log_late_failure)
            return 202, {"generation": generation, "readback": self.readback()}
        logger.info("live config applied", extra={"generation": generation, "lease_s": document.lease_s})
        return 200, {
            "old": old,
            "new": self._readback["in_force"],
            "generation": generation,
            "readback": self.readback(),
        }

    async def end_candidate(self) -> tuple[int, dict[str, object]]:
        """End the candidate at once (a no-op without one): (200, read-back), or (202, read-back) in a long step."""
        task = asyncio.create_task(self._client.end_lease())
        try:
            await asyncio.wait_for(asyncio.shield(task), ANSWER_WAIT_S)
        except TimeoutError:
            task.add_done_callback(_log_late_failure)
            return 202, self.readback()
        return 200, self.readback()

    async def watch(self, path: Path) -> None:
        """Follow `live.json` for ever. A mounted ConfigMap changes by a symlink swap, so the content is compared."""
        last = await asyncio.to_thread(_content, path)
        if await asyncio.to_thread(self._changed_since_boot, path):
            await self._take_file(path)
        while True:
            await asyncio.sleep(POLL_S)
            content = await asyncio.to_thread(_content, path)
            if content != last:
                last = content
                await self._take_file(path)

    def _changed_since_boot(self, path: Path) -> bool:
        """Whether the file was replaced between the reading of the start values and the first look of `watch`."""
        try:
            return read_live_file(path, self._ceilings) != self._boot
        except ConfigError:
            return False  # as at boot, whose error stands in the read-back

    async def _take_file(self, path: Path) -> None:
        try:
            read = await asyncio.to_thread(read_live_file, path, self._ceilings)
            if read.generation < self._highest():
                raise GenerationConflict(
                    f"{path}: generation {read.generation} is not taken: this engine has seen {self._highest()}"
                )
            await self._send(Document(read.generation, read.source, read.config), read.generation)
        except (ConfigError, GenerationConflict, EngineDead) as error:
            self._file_error = str(error)
            logger.warning("live config file not taken", extra={"reason": str(error)})
        else:
            self._file_error = None
            logger.info("live config file taken", extra={"generation": read.generation})

    async def _send(self, document: Document, generation: int) -> Applied:
        self._pending[generation] = document
        try:
            applied = await self._client.reconfigure(
                generation=generation,
                source=document.source,
                config=document.config.to_json(),
                lease_s=document.lease_s,
            )
        finally:
            if self._pending.get(generation) is document:
                del self._pending[generation]
        if applied.conflict:
            raise GenerationConflict(applied.error or "the generation is not new")
        assert applied.error is None, f"the engine refused what was checked here: {applied.error}"
        return applied

    def _highest(self) -> int:
        highest = self._readback["highest_generation"]
        assert isinstance(highest, int), "the read-back is our own"
        return max(highest, *self._pending) if self._pending else highest

    def _next_generation(self) -> int:
        return self._highest() + 1


def _content(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except OSError:
        return None


def _log_late_failure(task: asyncio.Task[Applied]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("pending live config failed", extra={"reason": str(error)})
