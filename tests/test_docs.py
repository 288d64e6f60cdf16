"""The documents name files, targets and commands that exist."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A heading's "Paths are under `x/`." makes the short paths of its section relative to x.
PACKAGES = ("engine/trimtab_engine", "operator/trimtab_operator", "tuner/trimtab_tuner")
PATH = re.compile(r"`([\w./-]+\.(?:py|yaml|md|jsonl|toml))(?:: [^`]*)?`")
UNDER = re.compile(r"Paths are under `([\w./-]+)`")


PAGES = ["README.md", *(f"docs/{page.name}" for page in sorted((ROOT / "docs").glob("*.md")))]
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
COMMAND = re.compile(r"^(?:curl .*\| )?(trimtab-(?:engine|operator|tuner) .*?)(?:\s+#.*)?$", re.MULTILINE)


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


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file(page: str) -> None:
    folder = (ROOT / page).parent
    assert [link for link in LINK.findall((ROOT / page).read_text()) if not (folder / link).exists()] == []


def _parses(command: str) -> str | None:
    """Why a command line of ours is refused by its own parser; None when it is not."""
    program, *words = shlex.split(command)
    package = program.replace("-", "_")
    done = subprocess.run(
        [sys.executable, "-P", "-m", f"{package}.cli", *words, "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "400"},
        check=False,
    )
    unknown = [w for w in words if w.startswith("--") and w.partition("=")[0] not in done.stdout]
    return None if done.returncode == 0 and not unknown else f"{command}: {unknown or done.stderr}"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_ours_has_these_options(page: str) -> None:
    blocks = re.findall(r"```\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)
    commands = [c.rstrip("\\ …") for block in blocks for c in COMMAND.findall(block)]
    assert [why for command in commands if (why := _parses(command))] == []


def test_arguments_of_a_benchmark_stand_in_args() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    wrong = [
        f"{page.name}: {hit}"
        for page in pages
        for hit in re.findall(r"make bench NAME=\w+ -\S*", page.read_text())
    ]
    assert wrong == [], "make itself would take these flags"
