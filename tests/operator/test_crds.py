"""The CRD files are found in a checkout and in an installed package alike."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from trimtab_operator import crds

ROOT = Path(__file__).resolve().parents[2]


def test_a_checkout_reads_the_files_that_people_edit() -> None:
    assert crds.directory() == ROOT / "crds"


def test_an_installed_package_reads_the_files_it_carries(tmp_path: Path) -> None:
    target = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
        "wheel"
    ]
    assert target["force-include"]["crds"] == "trimtab_operator/crds"
    package = tmp_path / "trimtab_operator"
    package.mkdir()
    for name in ("__init__.py", "crds.py", "names.py"):
        shutil.copy(ROOT / "operator" / "trimtab_operator" / name, package)
    shutil.copytree(ROOT / "crds", package / "crds")
    code = "from trimtab_operator import crds; crds.definition('TuningRun'); print(crds.directory())"
    environment = {"PYTHONPATH": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == str(package / "crds")
