"""Brings a hub's model into the cache and says where it lies: each file once per cache, checked, resumed, never half there.

The cache is the one of huggingface_hub (HF_HUB_CACHE, or below HF_HOME, or ~/.cache/huggingface/hub): what other tools fetched
is used, and they can use what we fetch. Its own downloader is not used, because it starts a killed download from nothing and
compares no hash. Called by `runtime.process` in the engine process; everything that can go wrong is a ModelLoadError.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import filelock
from huggingface_hub import constants

from trimtab_engine.errors import ModelLoadError
from trimtab_engine.hub.client import CannotResume, HubClient, Listing
from trimtab_engine.hub.files import CONFIG, INDEX, SINGLE, HubFile, complete, first_files, weight_files
from trimtab_engine.hub.patience import Patience, Transient
from trimtab_engine.model.spec import spec_from_config
from trimtab_engine.model_files import HubReference, read_json
from trimtab_engine.sizes import size_text

logger = logging.getLogger(__name__)

#: Gets the fraction that is there, the size of the whole in bytes, and what it waits for (None: it comes).
Progress = Callable[[float, int, str | None], None]
PARALLEL = 4  # files at a time: one connection rarely fills a data centre's line
REPORT_EVERY_S = 0.5
LOCK_POLL_S = 1.0
_MAX_CORRUPT = 2
TOO_LONG = "longer than the hub lists"  # in place of a hash, which it equals never


@dataclass(frozen=True, slots=True)
class HubOptions:
    """What is asked for, and of whom."""

    revision: str | None = None  # branch, tag or commit; None: main
    endpoint: str | None = None  # None: HF_ENDPOINT, else the public hub
    ca_file: Path | None = None
    patience_s: float = 300.0
    limit_bytes: int | None = None  # what the cache may hold of it
    cache_dir: Path | None = None  # None: where huggingface_hub has it


def fetch(reference: HubReference, options: HubOptions, progress: Progress) -> Path:
    """The local folder, or .gguf file, of a hub's model; downloads what is missing."""
    try:
        return _Download(reference, options, progress).run()
    except ModelLoadError as error:
        raise ModelLoadError(f"model {reference}: {error}") from error
    except OSError as error:
        raise ModelLoadError(f"model {reference}: {_os_cause(error)}") from error


class _Stopped(Exception):
    """Another file has failed."""


class _Download:
    """One model's way into the cache."""

    def __init__(self, reference: HubReference, options: HubOptions, progress: Progress) -> None:
        self._reference = reference
        self._options = options
        self._progress = progress
        self._client = HubClient(options.endpoint, options.ca_file)
        self._cache = options.cache_dir or Path(constants.HF_HUB_CACHE)
        self._name = "--".join(("models", *reference.repository.split("/")))
        self._storage = self._cache / self._name
        self._stop = threading.Event()
        self._lock = threading.Lock()  # of what follows: files come in several threads
        self._have: dict[str, int] = {}  # bytes, by file
        self._total_bytes = 0
        self._reported_s = 0.0
        self._logged_tenths = -1

    def run(self) -> Path:
        """See `fetch`."""
        if (pinned := self._pinned()) is not None:
            return pinned
        listing = self._listing()
        if isinstance(listing, Path):
            return listing
        snapshot = self._storage / "snapshots" / listing.commit
        names = first_files(listing.files, self._reference.gguf)
        if (found := complete(snapshot, self._reference.gguf)) is None or not _all_there(snapshot, names):
            with self._locked():
                # Another process may have fetched it all while this one waited.
                self._fetch_missing(listing, snapshot, names)
                found = complete(snapshot, self._reference.gguf)
        self._note(listing.commit)
        if found is None:
            raise ModelLoadError(f"{snapshot} is not complete after the download")
        logger.info("model is in the cache", extra={"model": str(self._reference), "commit": listing.commit})
        return found

    # What is there already

    def _pinned(self) -> Path | None:
        """A commit never changes: one that is complete in the cache needs no hub."""
        revision = self._options.revision or ""
        if any(part == ".." for part in PurePosixPath(revision).parts):
            raise ModelLoadError(f"revision {revision!r} is no branch, tag or commit")
        if len(revision) != 40 or set(revision) - set("0123456789abcdef"):
            return None
        return complete(self._storage / "snapshots" / revision, self._reference.gguf)

    def _last_known(self) -> Path | None:
        ref = self._ref()
        if not ref.is_file():
            return None
        return complete(self._storage / "snapshots" / ref.read_text().strip(), self._reference.gguf)

    def _ref(self) -> Path:
        return self._storage / "refs" / (self._options.revision or constants.DEFAULT_REVISION)

    def _listing(self) -> Listing | Path:
        """What the hub has; while it fails, the snapshot that the cache has for this revision, if there is one."""

        def ask() -> Listing | Path:
            try:
                return self._client.listing(self._reference.repository, self._options.revision)
            except Transient as failure:
                cached = self._last_known()
                if cached is None:
                    raise
                logger.warning(
                    "the hub fails; using the cache", extra={"cause": str(failure), "path": str(cached)}
                )
                return cached

        return self._patience().run(ask)

    def _note(self, commit: str) -> None:
        """Remember which commit the revision is, as other tools do."""
        ref = self._ref()
        if self._options.revision == commit or (ref.is_file() and ref.read_text() == commit):
            return
        ref.parent.mkdir(parents=True, exist_ok=True)
        temporary = ref.with_name(f".{ref.name}.{os.getpid()}")
        temporary.write_text(commit)
        temporary.replace(ref)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One process per model and cache; the kernel frees the lock of one that was killed."""
        path = self._cache / ".locks" / self._name / "trimtab.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path)
        while True:
            try:
                lock.acquire(timeout=LOCK_POLL_S)
                break
            except filelock.Timeout:
                self._progress(0.0, 0, "another engine downloads it into the same cache")
            except NotImplementedError as error:
                raise ModelLoadError(f"the file system of {self._cache} has no file locks") from error
        try:
            yield
        finally:
            lock.release()

    # Fetching

    def _fetch_missing(self, listing: Listing, snapshot: Path, names: Iterable[str]) -> None:
        first = [listing.files[name] for name in names]
        sharded = any(file.name == INDEX for file in first)
        folder = first[0].name == CONFIG  # else it is one GGUF
        if not sharded:
            self._expect([*first, *([listing.files[SINGLE]] if folder else [])], snapshot)
        for file in first:
            self._fetch(listing.commit, file, snapshot)
            if file.name == CONFIG:
                # Before gigabytes come: is it a model that we can run?
                spec_from_config(read_json(snapshot / CONFIG), CONFIG)
        if not folder:
            return
        weights = weight_files(read_json(snapshot / INDEX) if sharded else None)
        for name in weights:
            if name not in listing.files:
                raise ModelLoadError(f"{INDEX} names {name}, which the repository does not hold")
        files = [listing.files[name] for name in weights]
        if sharded:
            self._expect([*first, *files], snapshot)
        with ThreadPoolExecutor(PARALLEL, thread_name_prefix="hub") as threads:
            running = [threads.submit(self._fetch, listing.commit, file, snapshot) for file in files]
            wait(running, return_when=FIRST_EXCEPTION)
            self._stop.set()  # none is left, or one has failed
        failures = [error for error in (future.exception() for future in running) if error is not None]
        for error in sorted(failures, key=lambda error: isinstance(error, _Stopped)):
            raise error

    def _expect(self, files: list[HubFile], snapshot: Path) -> None:
        """Take the files as all that comes; ModelLoadError when they cannot all be held."""
        missing = self._total_bytes = 0
        for file in files:
            self._total_bytes += file.size
            there = _size(snapshot / file.name) or _size(self._blob(file)) or _size(self._partial(file)) or 0
            missing += max(0, file.size - there)
        limit = self._options.limit_bytes
        if limit is not None and self._total_bytes > limit:
            raise ModelLoadError(
                f"needs {size_text(self._total_bytes)}, and the cache may hold {size_text(limit)} (cache.sizeLimit)"
            )
        self._storage.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self._storage).free
        if missing > free:
            raise ModelLoadError(
                f"no space: {size_text(missing)} are missing, {self._cache} has {size_text(free)} free"
            )

    def _fetch(self, commit: str, file: HubFile, snapshot: Path) -> None:
        """One file into the snapshot, from whatever is there of it."""
        pointer, blob = snapshot / file.name, self._blob(file)
        if not pointer.exists():
            if not blob.exists():
                self._fetch_blob(commit, file, blob)
            _link(blob, pointer)
        self._count(file, file.size)

    def _fetch_blob(self, commit: str, file: HubFile, blob: Path) -> None:
        blob.parent.mkdir(parents=True, exist_ok=True)
        partial = self._partial(file)
        patience = self._patience()
        corrupt = 0

        def attempt() -> None:
            nonlocal corrupt
            if self._write(commit, file, partial, patience) == file.etag:
                partial.replace(blob)
                return
            partial.unlink()
            corrupt += 1
            if corrupt == _MAX_CORRUPT:
                raise ModelLoadError(
                    f"{file.name} came {corrupt} times with content that is not what the hub lists"
                )
            raise Transient(f"{file.name} came with another hash than the hub lists")

        patience.run(attempt)

    def _write(self, commit: str, file: HubFile, partial: Path, patience: Patience) -> str:
        """Go on with a partial file to its end → its hash. Raises Transient when it is cut short; the part stays."""
        with partial.open("a+b") as out:
            have, digest = _hash_of(out, file)
            if have > file.size:
                out.truncate(0)
                have, digest = 0, _digest(file)
            self._count(file, have)
            if have < file.size:
                try:
                    with self._client.stream(self._reference.repository, commit, file, have) as (
                        start,
                        chunks,
                    ):
                        if start != have:
                            out.truncate(0)
                            have, digest = 0, _digest(file)
                        for chunk in chunks:
                            if self._stop.is_set():
                                raise _Stopped
                            out.write(chunk)
                            digest.update(chunk)
                            have += len(chunk)
                            if have > file.size:
                                return TOO_LONG  # a hub that sends on and on must not fill the disk
                            patience.news()
                            self._count(file, have)
                except CannotResume:
                    out.truncate(0)
                    raise
            if have != file.size:
                raise Transient(f"{file.name} ended after {have} of {file.size} bytes")
            out.flush()
            os.fsync(out.fileno())
        return str(digest.hexdigest())

    # Small things

    def _blob(self, file: HubFile) -> Path:
        return self._storage / "blobs" / file.etag

    def _partial(self, file: HubFile) -> Path:
        return self._storage / "blobs" / f"{file.etag}.trimtab-partial"

    def _patience(self) -> Patience:
        return Patience(self._options.patience_s, self._waiting, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise _Stopped

    def _waiting(self, cause: str, pause_s: float) -> None:
        extra = {"model": str(self._reference), "cause": cause, "pause_s": round(pause_s, 1)}
        logger.warning("waiting for the hub", extra=extra)
        with self._lock:
            self._progress(self._fraction(), self._total_bytes, cause)

    def _fraction(self) -> float:
        return sum(self._have.values()) / self._total_bytes if self._total_bytes else 0.0

    def _count(self, file: HubFile, have: int) -> None:
        """Note what is there of a file, and report now and then."""
        with self._lock:
            self._have[file.name] = have
            if not self._total_bytes:
                return  # how much comes is not known yet
            now = time.monotonic()
            fraction = self._fraction()
            if now - self._reported_s < REPORT_EVERY_S and fraction < 1:
                return
            self._reported_s = now
            self._progress(fraction, self._total_bytes, None)
            if int(fraction * 10) > self._logged_tenths:
                self._logged_tenths = int(fraction * 10)
                extra = {"percent": int(fraction * 100), "of": size_text(self._total_bytes)}
                logger.info("downloading", extra={"model": str(self._reference), **extra})


def _link(blob: Path, pointer: Path) -> None:
    """Show a blob under its name; on a file system without links it moves there."""
    pointer.parent.mkdir(parents=True, exist_ok=True)
    pointer.unlink(missing_ok=True)  # a link whose blob is gone
    try:
        pointer.symlink_to(os.path.relpath(blob, pointer.parent))
    except OSError:
        blob.replace(pointer)


def _all_there(snapshot: Path, names: Iterable[str]) -> bool:
    return all((snapshot / name).is_file() for name in names)


def _digest(file: HubFile) -> Any:
    if file.sha256 is not None:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)  # how git names a file's content


def _hash_of(out: Any, file: HubFile) -> tuple[int, Any]:
    """(bytes that are there, their running hash); `out` stands at its end afterwards."""
    digest, have = _digest(file), 0
    out.seek(0)
    while chunk := out.read(1 << 20):
        digest.update(chunk)
        have += len(chunk)
    return have, digest


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _os_cause(error: OSError) -> str:
    where = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space is left in the cache{where}"
    return f"the cache cannot be written: {error.strerror or error}{where}"
