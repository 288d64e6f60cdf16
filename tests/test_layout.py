"""Guards of the layout: what linters cannot see."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE_ROOTS = ("engine", "operator", "tuner")
MAX_LINES = 600


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_no_module_stands_directly_under_a_source_root(root: str) -> None:
    # A root `operator` package would shadow the standard library's and break every Python started here.
    assert list((ROOT / root).glob("*.py")) == []


@pytest.mark.parametrize(
    "module",
    [
        "trimtab_engine.config",
        "trimtab_engine.messages",
        "trimtab_engine.core.live",
        "trimtab_engine.server.main",
        "trimtab_engine.step_record",
        "trimtab_operator",
        "trimtab_tuner",
    ],
)
def test_light_modules_do_not_import_torch(module: str) -> None:
    # import-linter does not see an import in a parent package's __init__; a fresh interpreter does.
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


def test_no_module_is_longer_than_a_reader_can_hold() -> None:
    long = {
        str(path.relative_to(ROOT)): count
        for root in SOURCE_ROOTS
        for path in (ROOT / root).rglob("*.py")
        if (count := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert long == {}


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for root in SOURCE_ROOTS
        for path in (ROOT / root).rglob("*.py")
        if not path.read_text().lstrip().startswith(('"""', 'r"""'))
    ]
    assert silent == []


def test_no_package_markers_in_tests() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_cluster_tests_live_in_folders_of_that_name() -> None:
    # `--clusters` reads no other folder, so one elsewhere would never run.
    marker = "mark." + "cluster"
    files = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py") if marker in path.read_text()]
    assert files
    assert [str(path) for path in files if "cluster" not in path.parts] == []
