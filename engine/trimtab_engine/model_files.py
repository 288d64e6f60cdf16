"""Resolves a model reference to the files of a Hugging Face folder, without torch.

Called by both processes: the engine process before it loads weights, the HTTP process for tokenizer, template and
end tokens. References are a local folder, `file:///folder`, a `.gguf` file, or `package://module/file` for a file
shipped in an installed package; `hf://organisation/name` is only parsed here (`hub` brings it). A GGUF file is converted once into a folder of the same layout
(`model.gguf.ensure_converted`, engine process); after that every model is a folder. Knows nothing of weights.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trimtab_engine.errors import ModelLoadError

CONVERTER_VERSION = 1  # part of the cache key: raise it when `model.gguf` writes something else
_PACKAGE = "package://"
_FILE = "file://"
_HUB = "hf://"
_EDGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model as files in Hugging Face layout. `path` is the folder; for a GGUF the converted one."""

    path: Path
    kind: Literal["hf", "gguf"]
    source: Path  # what the reference named: `path` itself, or the .gguf file
    config: dict[str, object]  # config.json
    tokenizer_json: Path
    chat_template: str | None  # jinja source; None: the model brings none
    eos_token_ids: frozenset[int]
    bos_token: str | None
    eos_token: str | None
    generation_config: dict[str, object]  # generation_config.json, {} when there is none
    max_position_embeddings: int | None  # as the config says, before any cut


@dataclass(frozen=True, slots=True)
class HubReference:
    """`hf://organisation/name`, or `hf://organisation/name/file.gguf`."""

    repository: str
    gguf: str | None = None

    def __str__(self) -> str:
        return f"{_HUB}{self.repository}" + (f"/{self.gguf}" if self.gguf else "")


def hub_reference(reference: str) -> HubReference | None:
    """The model at a hub that a reference names, None for one that is local; ModelLoadError for a broken one."""
    if not reference.startswith(_HUB):
        return None
    found = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:/(.+\.gguf))?", reference.removeprefix(_HUB), re.ASCII)
    if found is None or ".." in Path(reference).parts:
        raise ModelLoadError(
            f"model {reference!r}: the form is hf://organisation/name, or hf://organisation/name/file.gguf"
        )
    return HubReference(found[1], found[2])


def default_cache_dir() -> Path:
    """Where converted models lie unless the configuration says otherwise."""
    return Path.home() / ".cache" / "trimtab" / "models"


def locate(reference: str) -> Path:
    """The existing folder or .gguf file that a reference names; raises ModelLoadError with the path and the reason."""
    if reference.startswith(_PACKAGE):
        path = _in_package(reference)
    elif reference.startswith(_FILE):
        path = Path(reference.removeprefix(_FILE))
    elif "://" in reference:
        scheme = reference.split("://", 1)[0]
        raise ModelLoadError(
            f"model {reference!r}: scheme {scheme!r} is not known here; "
            "use a local folder, file:///path, a .gguf file, package://module/file or hf://organisation/name"
        )
    else:
        path = Path(reference).expanduser()
    if not path.exists():
        raise ModelLoadError(f"model {reference!r}: {path.absolute()} does not exist")
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"model {reference!r}: {path.absolute()} holds no config.json")
    elif path.suffix != ".gguf":
        raise ModelLoadError(f"model {reference!r}: {path.absolute()} is neither a folder nor a .gguf file")
    return path.absolute()


def converted_folder(source: Path, cache_dir: Path | None) -> Path:
    """Where the converted form of a GGUF file lies or will lie.

    The key is over size, time of change, both ends of the content and the converter's version: reading a whole file of
    gigabytes at each start would cost more than loading it.
    """
    stat = source.stat()
    digest = hashlib.sha256(f"{CONVERTER_VERSION}:{stat.st_size}:{stat.st_mtime_ns}:".encode())
    with source.open("rb") as file:
        digest.update(file.read(_EDGE_BYTES))
        file.seek(max(0, stat.st_size - _EDGE_BYTES))
        digest.update(file.read(_EDGE_BYTES))
    return (cache_dir or default_cache_dir()) / f"{source.stem}-{digest.hexdigest()[:16]}"


def resolve(reference: str, cache_dir: Path | None = None, *, need_tokenizer: bool = True) -> ModelFiles:
    """Find and read everything about a model but its weights.

    A GGUF must have been converted already. Raises ModelLoadError naming the path and what is wrong with it.
    """
    source = locate(reference)
    if source.is_dir():
        return read_folder(source, kind="hf", source=source, need_tokenizer=need_tokenizer)
    folder = converted_folder(source, cache_dir)
    if not folder.is_dir():
        raise ModelLoadError(
            f"{source} is not converted yet: {folder} does not exist (the engine process makes it)"
        )
    return read_folder(folder, kind="gguf", source=source, need_tokenizer=need_tokenizer)


def read_folder(
    folder: Path, *, kind: Literal["hf", "gguf"], source: Path, need_tokenizer: bool = True
) -> ModelFiles:
    """`ModelFiles` of a folder in Hugging Face layout; raises ModelLoadError naming the broken file."""
    config = read_json(folder / "config.json")
    generation_path = folder / "generation_config.json"
    generation = read_json(generation_path) if generation_path.is_file() else {}
    tokenizer_config_path = folder / "tokenizer_config.json"
    tokenizer_config = read_json(tokenizer_config_path) if tokenizer_config_path.is_file() else {}
    tokenizer_json = folder / "tokenizer.json"
    if need_tokenizer and not tokenizer_json.is_file():
        raise ModelLoadError(f"{folder} holds no tokenizer.json; a slow tokenizer alone is not enough")
    limit = config.get("max_position_embeddings")
    return ModelFiles(
        path=folder,
        kind=kind,
        source=source,
        config=config,
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(folder, tokenizer_config),
        # Generation may name more ends than the config does (Llama 3: end of turn); all of them end a reply.
        eos_token_ids=_token_ids(config, folder / "config.json") | _token_ids(generation, generation_path),
        bos_token=_token(tokenizer_config.get("bos_token")),
        eos_token=_token(tokenizer_config.get("eos_token")),
        generation_config=generation,
        max_position_embeddings=limit if isinstance(limit, int) else None,
    )


def _in_package(reference: str) -> Path:
    module, _, file = reference.removeprefix(_PACKAGE).partition("/")
    # A dotted name would import the parent package, and packages that ship weights may fail to import.
    if not re.fullmatch(r"[A-Za-z_]\w*", module) or not file or ".." in Path(file).parts:
        raise ModelLoadError(f"model {reference!r}: the form is package://module/file, module without dots")
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ModelLoadError(f"model {reference!r}: package {module!r} is not installed")
    folders = [Path(location) for location in spec.submodule_search_locations]
    return next((folder / file for folder in folders if (folder / file).exists()), folders[0] / file)


def read_json(path: Path) -> dict[str, object]:
    """The JSON object in a file; ModelLoadError naming it when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _chat_template(folder: Path, tokenizer_config: dict[str, object]) -> str | None:
    # Newer folders keep the template in its own file, and the file wins, as in transformers.
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several named ones: [{"name": "default", "template": "…"}, …]
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_ids(config: dict[str, object], path: Path) -> frozenset[int]:
    value = config.get("eos_token_id")
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
        raise ModelLoadError(f"{path}: eos_token_id is {value!r}; expected a token id or a list of them")
    return frozenset(listed)


def _token(value: object) -> str | None:
    if isinstance(value, dict):  # {"content": "<s>", "lstrip": …}
        value = value.get("content")
    return value if isinstance(value, str) else None
