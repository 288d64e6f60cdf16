"""The Dockerfile's install steps, carried out into clean folders, and their results started as pods start them.

No container engine is needed. What that cannot show: the bases themselves, apt's packages (their names are held), layers.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import sealed
from support.dockerfile import Images, Stage, images
from support.tiny_models import tiny_chat_model

TOP = Path(__file__).resolve().parents[2]
COMPILERS = {
    "cc",
    "c++",
    "gcc",
    "g++",
    "clang",
    "ld",
    "as",
    "nvcc",
    "cmake",
    "ninja",
    "rustc",
    "cargo",
    "zig",
    "go",
}
LIGHT_MB = 420  # of the operator's and tuner's environment; see docs/operator.md


@pytest.fixture(scope="module")
def built() -> Iterator[Images]:
    with images(TOP / "Dockerfile") as found:
        yield found


@pytest.fixture(autouse=True)
def root_is_there() -> None:
    problem = sealed.why_not()
    if problem is not None:
        assert not os.environ.get("CI"), f"image tests may not be skipped in CI: {problem}"
        pytest.skip(problem)


def start(built: Images, stage: Stage, *words: str, model: Path | None = None) -> str:
    """What the stage's program prints when it is started like that, sealed; it must succeed."""
    cache = built.root / "var/lib/trimtab"
    done = sealed.run(
        [*stage.entrypoint, *words] if words[:1] != ("python",) else list(words),
        shown=[built.root, Path(sys.base_prefix), *([model.parent] if model is not None else [])],
        writable=[Path("/tmp"), *([cache] if cache.is_dir() else [])],
        variables={**stage.variables, "OMP_NUM_THREADS": "1"},
        home=Path.home(),
    )
    assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def programs(folder: Path) -> set[str]:
    """Names of everything executable."""
    return {path.name for path in folder.rglob("*") if path.is_file() and os.access(path, os.X_OK)}


def test_bases_are_pinned_and_every_image_runs_as_nobody(built: Images) -> None:
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", built.arguments["PYTHON_IMAGE"])
    sources = {line.rest.split()[0] for line in built.instructions if line.word == "FROM"}
    assert sources == {"${PYTHON_IMAGE}", "build", "base"}
    for name in ("operator", "tuner", "engine"):
        users = [
            line.rest for where in ("base", name) for line in built.lines(where)[1] if line.word == "USER"
        ]
        assert users[-1] == "65532:65532"


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("operator", [["--version"], ["--help"], ["run", "--help"], ["local", "--help"]]),
        ("tuner", [["--help"], ["run", "--help"], ["replay", "--help"]]),
    ],
)
def test_the_light_images_start_sealed_and_hold_no_torch_and_no_compiler(
    built: Images, name: str, calls: list[list[str]]
) -> None:
    stage = built.stage(name)
    assert (stage.user, stage.packages) == ("65532", [])
    for words in calls:
        assert f"trimtab-{name}" in start(built, stage, *words)
    environment = built.root / "opt/trimtab"
    assert not COMPILERS & programs(environment)
    held = {path.name for path in environment.rglob("site-packages/*")}
    assert "trimtab_operator" in held
    assert not {"torch", "triton", "transformers", "nvidia", "gguf"} & held
    assert "the CRDs" in start(built, stage, "python", "-c", "import importlib.resources as r; "
                               "assert r.files('trimtab_operator').joinpath('crds/inferenceservice.yaml').is_file(); print('the CRDs')")  # fmt: skip
    size_mb = (
        sum(p.stat().st_size for p in environment.rglob("*") if p.is_file() and not p.is_symlink()) / 1e6
    )
    print(f"{name}: {size_mb:.0f} MB beside the base")
    assert size_mb < LIGHT_MB


@pytest.mark.slow
def test_the_engine_image_serves_a_model_sealed(built: Images, tmp_path: Path) -> None:
    stage = built.stage("engine")
    assert stage.packages == ["gcc", "libc6-dev"], "triton compiles its launcher when it runs"
    assert "serve" in start(built, stage, *stage.command)
    models = built.root.parent / "models"
    models.mkdir()
    tiny = tiny_chat_model(models / "tiny")
    for file in tiny.iterdir():
        file.chmod(0o644)
    client = shutil.copy(Path(__file__).parents[1] / "support" / "sealed_engine.py", models)
    said = start(built, stage, "python", str(client), str(tiny), model=tiny)
    assert said.strip().endswith("answered"), said
