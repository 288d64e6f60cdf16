"""Carries out a Dockerfile's install steps without a container engine: each stage becomes a folder.

COPY and RUN lines are taken from the file as they stand; absolute paths of the image (`PLACES`) are put below one folder, which
is the stage that is being built, so that scripts keep the paths that they were installed under. The base image is a fresh virtual
environment of this Python. Steps of apt-get are not carried out, but told (`Stage.packages`). Package downloads go through uv's own
cache, which links into the stage.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

PLACES = ("/opt/trimtab", "/wheels", "/src", "/var/lib", "/usr/local")
_SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
_PASSED_ON = re.compile(
    r"PIP_|UV_(DEFAULT_)?INDEX|.*_proxy$|.*_PROXY$|SSL_CERT|LANG"
)  # how this machine reaches registries
RUN_S = 900.0


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line: its word and the rest, continuation lines joined."""

    word: str
    rest: str


@dataclass
class Stage:
    """One stage as far as it was carried out."""

    name: str
    parent: str
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    user: str = "0"
    directory: str = "/"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    packages: list[str] = field(default_factory=list)  # that apt-get would install


def parse(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile."""
    joined = re.sub(
        r"\\\n", " ", "\n".join(li for li in text.splitlines() if not li.lstrip().startswith("#"))
    )
    found = []
    for line in filter(None, map(str.strip, joined.splitlines())):
        word, _, rest = line.partition(" ")
        found.append(Instruction(word.upper(), rest.strip()))
    return found


class Images:
    """The stages of one Dockerfile, built on demand below `folder`. `root` is the stage in place: build or run it there."""

    def __init__(self, file: Path, folder: Path) -> None:
        self.context = file.parent
        self.instructions = parse(file.read_text())
        self.root = folder / "root"
        self._folder = folder
        self._stages: dict[str, Stage] = {}
        self._in_place: Stage | None = None
        self.arguments = dict(
            i.rest.split("=", 1) for i in self.instructions if i.word == "ARG" and "=" in i.rest
        )

    def stage(self, name: str) -> Stage:
        """A stage, built if it was not, and put in place."""
        if name not in self._stages:
            self._stages[name] = self._build(name)
        self._put(self._stages[name])
        return self._stages[name]

    def lines(self, name: str) -> tuple[str, list[Instruction]]:
        """(what it is FROM, its instructions)."""
        parent, taken, inside = "", [], False
        for instruction in self.instructions:
            if instruction.word == "FROM":
                words = instruction.rest.split()
                inside = words[-1] == name
                parent = words[0] if inside else parent
            elif inside:
                taken.append(instruction)
        assert parent, f"the Dockerfile has no stage {name}"
        return parent, taken

    def inside(self, text: str) -> str:
        """Text with the image's paths put below the stage in place."""
        places = "|".join(map(re.escape, PLACES))
        return re.sub(rf"(?<![\w./-])({places})(?=[/:\s\"')*]|$)", lambda m: f"{self.root}{m[1]}", text)

    def _build(self, name: str) -> Stage:
        parent, lines = self.lines(name)
        own = self._folder / name
        if parent.startswith("${"):
            stage = Stage(name, parent, own)
            own.mkdir()
            self._put(stage)
            base = self.root / "usr/local"
            subprocess.run([sys.executable, "-m", "venv", str(base)], check=True, timeout=RUN_S)
            stage.variables["PATH"] = f"{base}/bin:{_SYSTEM_PATH}"
        else:
            above = self.stage(parent)
            self._away()
            _link_tree(above.folder, own)
            stage = Stage(name, parent, own, dict(above.variables), above.user, above.directory)
            self._put(stage)
        for line in lines:
            self._carry_out(stage, line)
        return stage

    def _carry_out(self, stage: Stage, line: Instruction) -> None:
        match line.word:
            case "ENV":
                for word in shlex.split(line.rest):
                    key, _, value = word.partition("=")
                    stage.variables[key] = self.inside(value).replace("$PATH", stage.variables["PATH"])
            case "WORKDIR":
                stage.directory = line.rest
            case "USER":
                stage.user = line.rest.partition(":")[0]
            case "ENTRYPOINT":
                stage.entrypoint = _words(line.rest)
            case "CMD":
                stage.command = _words(line.rest)
            case "COPY":
                self._copy(stage, line.rest)
            case "RUN":
                self._run(stage, line.rest)
            case "EXPOSE" | "ARG" | "LABEL":
                pass
            case other:
                raise AssertionError(f"this test knows no {other}; teach it")

    def _copy(self, stage: Stage, rest: str) -> None:
        words = rest.split()
        source = None
        if words[0].startswith("--from="):
            name = words.pop(0).removeprefix("--from=")
            source = self.stage(name).folder
            self._put(stage)
            # Here again: what is not in place lies at its own folder.
            source = self._folder / name
        *what, target = words
        to = Path(self.inside(target)) if target.startswith("/") else self._directory(stage) / target
        for item in what:
            origin = self.context / item if source is None else source / item.lstrip("/")
            assert origin.exists(), f"COPY {rest}: there is no {item}"
            if origin.is_dir():
                _link_tree(origin, to)
            else:
                into = to / origin.name if target.endswith("/") or len(what) > 1 else to
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(origin, into)

    def _run(self, stage: Stage, command: str) -> None:
        parts = [part.strip() for part in command.split("&&")]
        for part in parts:
            if part.startswith("apt-get"):
                words = part.split()
                if "install" in words:
                    stage.packages += [
                        w for w in words[words.index("install") + 1 :] if not w.startswith("-")
                    ]
        ours = [part for part in parts if not part.startswith(("apt-get", "rm "))]
        if not ours:
            return
        variables = {key: value for key, value in os.environ.items() if _PASSED_ON.match(key)}
        variables |= {"HOME": str(Path.home()), **stage.variables}
        variables.pop("UV_NO_CACHE", None)  # an image keeps no cache; here it is what makes this bearable
        directory = self._directory(stage)
        directory.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["/bin/sh", "-ec", self.inside(" && ".join(ours))],
            cwd=directory,
            env=variables,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        assert done.returncode == 0, f"RUN {command}\n{done.stdout}\n{done.stderr}"

    def _directory(self, stage: Stage) -> Path:
        return Path(self.inside(stage.directory)) if stage.directory.startswith(PLACES) else self.root

    def _away(self) -> None:
        if self._in_place is not None:
            self.root.rename(self._in_place.folder)
            self._in_place = None

    def _put(self, stage: Stage) -> None:
        if self._in_place is not stage:
            self._away()
            stage.folder.rename(self.root)
            self._in_place = stage


@contextmanager
def images(file: Path) -> Iterator[Images]:
    """Build below our cache, where uv's cache can be linked from; all of it is deleted afterwards."""
    cache = Path(os.environ.get("TRIMTAB_CACHE", Path.home() / ".cache" / "trimtab"))
    folder = cache / f"images-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        yield Images(file, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _words(text: str) -> list[str]:
    import json

    words: list[str] = json.loads(text)
    return words


def _link_tree(source: Path, target: Path) -> None:
    """A copy that shares the files' content."""
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-a", "--link", f"{source}/.", str(target)], check=True, timeout=RUN_S)
