"""How a cluster is found: nobody's own cluster is touched by accident, and what is missing is said."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from support.cluster import binaries
from support.cluster.binaries import PROGRAMS, ToolModule, Unavailable, find_or_build
from support.cluster.cluster import ALLOWED_CONTEXTS, existing


def kubeconfig(folder: Path, context: str) -> Path:
    """A kubeconfig whose current context has that name."""
    path = folder / "config"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": context, "contexts": [
        {"name": context, "context": {"cluster": "c", "user": "u"}}]}))  # fmt: skip
    return path


def test_a_kubeconfig_alone_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, "production")))
    monkeypatch.delenv("USE_EXISTING_CLUSTER", raising=False)
    assert existing() is None


@pytest.mark.parametrize("allowed", ["", "staging,prod", "product"])
def test_a_context_that_is_not_listed_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, allowed: str
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, "production")))
    monkeypatch.setenv("USE_EXISTING_CLUSTER", "true")
    monkeypatch.setenv(ALLOWED_CONTEXTS, allowed)
    with pytest.raises(Unavailable, match="'production' is not allowed"):
        existing()


def test_a_listed_context_is_used_and_named_in_every_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path, "kind-trimtab")))
    monkeypatch.setenv("USE_EXISTING_CLUSTER", "true")
    monkeypatch.setenv(ALLOWED_CONTEXTS, "other,kind-trimtab")
    found = existing()
    assert found is not None
    assert found.context == "kind-trimtab"


def test_a_folder_of_assets_must_hold_every_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(tmp_path))
    for name in PROGRAMS[:-1]:
        (tmp_path / name).touch(mode=0o755)
    with pytest.raises(Unavailable, match=rf"lacks {PROGRAMS[-1]}$"):
        find_or_build()
    (tmp_path / PROGRAMS[-1]).touch(mode=0o755)
    assert find_or_build() == tmp_path


def test_without_go_and_assets_the_reason_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    monkeypatch.setattr(shutil, "which", lambda *_args, **_options: None)
    with pytest.raises(Unavailable, match=r"no Go on this machine"):
        find_or_build()


def test_helm_is_found_in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRIMTAB_HELM_ASSETS", str(tmp_path))
    with pytest.raises(Unavailable, match=r"lacks helm$"):
        find_or_build(binaries.HELM)
    (tmp_path / "helm").touch(mode=0o755)
    assert find_or_build(binaries.HELM) == tmp_path
    monkeypatch.delenv("TRIMTAB_HELM_ASSETS")
    monkeypatch.setattr(shutil, "which", lambda *_args, **_options: None)
    with pytest.raises(Unavailable, match="or set TRIMTAB_HELM_ASSETS to a folder with helm"):
        find_or_build(binaries.HELM)


def test_the_tool_module_names_one_version_everywhere() -> None:
    lines = (binaries.TOOL_MODULE / "go.mod").read_text().splitlines()
    staging = {line.split()[-1] for line in lines if "=> k8s.io/" in line}
    assert staging == {binaries.kubernetes_version().replace("v1.", "v0.")}


def tool(folder: Path, source: str) -> ToolModule:
    """A module of one program, `hello`."""
    folder.mkdir()
    (folder / "go.mod").write_text("module tool.invalid\n\ngo 1.21\n")
    (folder / "go.sum").touch()
    (folder / "main.go").write_text(source)
    return ToolModule(str(folder), {"hello": "."}, cache="tool")


def test_a_tool_is_built_once_and_found_from_then_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    module = tool(tmp_path / "tool", 'package main\n\nfunc main() { println("hello") }\n')
    folder = find_or_build(module)
    said = subprocess.run([folder / "hello"], capture_output=True, text=True, check=True).stderr
    assert said == "hello\n"
    assert "built hello in" in capsys.readouterr().err
    assert find_or_build(module) == folder
    assert capsys.readouterr().err == ""


def test_what_does_not_compile_is_unavailable_with_the_compiler_s_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    module = tool(tmp_path / "tool", "package main\n\nfunc main() { nonsense() }\n")
    with pytest.raises(Unavailable, match=r"building hello failed; .*\n(.*\n)*.*undefined: nonsense"):
        find_or_build(module)
