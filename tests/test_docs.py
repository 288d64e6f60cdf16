"""The documents name files, targets and commands that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A heading's "Paths are under `x/`." makes the short paths of its section relative to x.
PACKAGES = ("engine/trimtab_engine", "operator/trimtab_operator", "tuner/trimtab_tuner")
PATH = re.compile(r"`([\w./-]+\.(?:py|yaml|md|jsonl|toml))(?:: [^`]*)?`")
UNDER = re.compile(r"Paths are under `([\w./-]+)`")


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_every_named_file_exists(page: str) -> None:
    missing = []
    for section in re.split(r"^## ", (ROOT / page).read_text(), flags=re.MULTILINE):
        under = UNDER.search(section)
        bases = [ROOT, ROOT / under.group(1)] if under else [ROOT, *(ROOT / package for package in PACKAGES)]
        missing += [
            name for name in PATH.findall(section) if not any((base / name).exists() for base in bases)
        ]
    assert missing == []


def test_every_make_target_in_the_readme_exists() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"^make ([a-z-]+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE))
    assert named
    assert {
        target for target in named if not re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
    } == set()


def test_readme_stays_readable() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 200
