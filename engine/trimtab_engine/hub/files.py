"""Which files of a hub's model an engine reads, and whether a folder holds them. Pure but for reading that folder's index.

Used by `hub.download`. Knows nothing of HTTP or of the cache's layout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trimtab_engine.errors import ModelLoadError
from trimtab_engine.model_files import read_json

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
OPTIONAL = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")
_LISTED = 5  # names in a message


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file as the hub lists it. `sha256` is None for small files, which git's own hash identifies."""

    name: str  # relative to the repository, with /
    size: int
    git_sha1: str
    sha256: str | None = None

    @property
    def etag(self) -> str:
        """What the hub calls its content; the blob's name in the cache."""
        return self.sha256 or self.git_sha1


def first_files(names: Collection[str], gguf: str | None) -> tuple[str, ...]:
    """What to fetch first: a GGUF alone, or everything small of a folder, by which the weights are then judged.

    `gguf` is the file that the reference names. Raises ModelLoadError saying what the repository lacks.
    """
    if gguf is not None:
        if gguf not in names:
            raise ModelLoadError(f"holds no {gguf}{_those(names, '.gguf')}")
        return (gguf,)
    if SINGLE not in names and INDEX not in names:
        ggufs = sorted(name for name in names if name.endswith(".gguf"))
        if len(ggufs) == 1:
            return (ggufs[0],)
        if ggufs:
            raise ModelLoadError(
                f"holds several .gguf files{_those(names, '.gguf')}; name one: hf://org/name/FILE.gguf"
            )
        raise ModelLoadError(
            f"holds neither {SINGLE} nor {INDEX}{_those(names, '.bin')}; only safetensors and GGUF are read"
        )
    for needed, why in (
        (CONFIG, "it is no transformers model"),
        (TOKENIZER, "a slow tokenizer alone is not enough"),
    ):
        if needed not in names:
            raise ModelLoadError(f"holds no {needed}; {why}")
    index = (INDEX,) if INDEX in names else ()
    return (CONFIG, *(name for name in OPTIONAL if name in names), TOKENIZER, *index)


def weight_files(index: Mapping[str, object] | None) -> tuple[str, ...]:
    """The weights: one file, or the shards that the index names. ModelLoadError for an index that cannot be used."""
    if index is None:
        return (SINGLE,)
    mapping = index.get("weight_map")
    if (
        not isinstance(mapping, Mapping)
        or not mapping
        or not all(isinstance(v, str) for v in mapping.values())
    ):
        raise ModelLoadError(f"{INDEX} has no usable weight_map")
    shards = tuple(sorted(set(mapping.values())))
    for shard in shards:
        path = PurePosixPath(shard)
        if path.is_absolute() or ".." in path.parts:
            raise ModelLoadError(f"{INDEX} names {shard!r}, which is not inside the repository")
    return shards


def complete(folder: Path, gguf: str | None) -> Path | None:
    """What to load of a snapshot folder that holds everything needed: itself or its GGUF; None while something is missing.

    Small files come first into a snapshot, so one with its weights has all of them.
    """
    if gguf is not None:
        return folder / gguf if (folder / gguf).is_file() else None
    if not (folder / CONFIG).is_file():
        found = sorted(folder.glob("*.gguf"))
        return found[0] if len(found) == 1 else None
    try:
        index = read_json(folder / INDEX) if (folder / INDEX).is_file() else None
        needed = (TOKENIZER, *weight_files(index))
    except ModelLoadError:
        return None
    return folder if all((folder / name).is_file() for name in needed) else None


def _those(names: Collection[str], suffix: str) -> str:
    found = sorted(name for name in names if name.endswith(suffix))
    if not found:
        return ""
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return f" (it has {', '.join(found[:_LISTED])}{more})"
