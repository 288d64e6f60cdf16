"""The command line: validate, render, render --diff."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from support.services import resource, run_resource
from trimtab_operator import cli

FILES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.yaml"))


def write(folder: Path, name: str, content: object) -> str:
    path = folder / name
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_validate_says_what_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "-f", write(tmp_path, "a.yaml", resource())]) == 0
    assert 'InferenceService "chat" is valid' in capsys.readouterr().out
    assert cli.main(["validate", "-f", write(tmp_path, "b.yaml", run_resource())]) == 0
    assert 'TuningRun "chat-1" is valid' in capsys.readouterr().out


@pytest.mark.parametrize("command", ["validate", "render", "local"])
def test_a_second_file_is_refused_rather_than_the_first_ignored(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "-f", "a.yaml", "-f", "b.yaml"])
    assert ended.value.code == 2
    assert "-f is given twice; name one file a call" in capsys.readouterr().err


def test_validate_ends_with_2_and_one_line_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = resource(**{"engine.maxNumSeqs": 0, "slo.itl": "x"})
    assert cli.main(["validate", "-f", write(tmp_path, "a.yaml", wrong)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "spec.engine.maxNumSeqs: 0 is not allowed; an integer from 1 to 1048576" in captured.err
    assert "spec.slo.itl: 'x' is not allowed" in captured.err


def test_validate_judges_an_update(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved = resource()
    moved["spec"] = {"targetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web"}}
    arguments = ["validate", "-f", write(tmp_path, "b.yaml", moved)]
    assert cli.main(arguments) == 0
    assert "not carried out yet: spec.targetRef" in capsys.readouterr().err
    assert cli.main([*arguments, "--old", write(tmp_path, "a.yaml", resource())]) == 2
    assert "cannot change between model and targetRef" in capsys.readouterr().err


def test_validate_judges_an_update_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write(tmp_path, "a.yaml", run_resource())
    arguments = ["validate", "-f", write(tmp_path, "b.yaml", run_resource(maxTrials=3)), "--old", old]
    assert cli.main(arguments) == 2
    assert "spec of a TuningRun cannot change" in capsys.readouterr().err


def test_validate_finds_what_only_the_operator_judges(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["validate", "-f", write(tmp_path, "a.yaml", run_resource(timeLimit="25h"))]) == 2
    assert "spec.timeLimit: '25h' is not allowed; a duration from 1m to 24h" in capsys.readouterr().err


@pytest.mark.parametrize("evaluator", ["Simulator", "Shadow", "Live"])
def test_validate_finds_nothing_against_any_evaluator(
    evaluator: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["validate", "-f", write(tmp_path, "a.yaml", run_resource(evaluator=evaluator))]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_example_is_valid_and_renders(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "-f", str(path)]) == 0
    assert f'InferenceService "{path.stem}" is valid' in capsys.readouterr().out
    assert cli.main(["render", "-f", str(path), "--image", "mine:1"]) == 0
    captured = capsys.readouterr()
    documents = list(yaml.safe_load_all(captured.out))
    assert {d["kind"] for d in documents} >= {
        "ServiceAccount",
        "ConfigMap",
        "Service",
        "NetworkPolicy",
        "Deployment",
    }
    container = documents[-1]["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "mine:1"
    nightly = "nightly" in yaml.safe_load(path.read_text())["spec"]["tuning"]
    assert [d["metadata"]["name"] for d in documents if d["kind"] == "CronJob"] == [
        f"{path.stem}-nightly"
    ] * nightly
    assert "nightly" not in captured.err


@pytest.mark.parametrize("new", FILES, ids=lambda p: p.stem)
@pytest.mark.parametrize("old", FILES, ids=lambda p: p.stem)
def test_what_goes_from_one_example_to_another_is_told_field_by_field(
    old: Path, new: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["render", "-f", str(new), "--diff", str(old)]) == 0
    lines = capsys.readouterr().out.splitlines()
    if old == new:
        assert lines == ["no field of spec differs"]
        return
    assert all(
        line.startswith(("restart ", "live ", "at once ")) and line.endswith(")") for line in lines[:-1]
    )
    assert lines[-1].startswith("→ engines are replaced" if "restart" in lines[0] else "→ no engine restarts")


def test_render_of_a_run_says_which_kind_it_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["render", "-f", write(tmp_path, "a.yaml", run_resource())]) == 2
    assert "kind: 'TuningRun' is not allowed; one of InferenceService" in capsys.readouterr().err


def test_render_refuses_what_cannot_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "a.yaml", resource(**{"engine.runtime": "vllm"}))
    assert cli.main(["render", "-f", path]) == 2
    assert "spec.engine.runtime" in capsys.readouterr().err


def diff(tmp_path: Path, capsys: pytest.CaptureFixture[str], **changes: object) -> str:
    old = write(tmp_path, "old.yaml", resource())
    new = write(tmp_path, "new.yaml", resource(**changes))
    assert cli.main(["render", "-f", new, "--diff", old]) == 0
    return capsys.readouterr().out


def test_diff_of_live_fields_restarts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = diff(tmp_path, capsys, **{"engine.maxNumBatchedTokens": 256, "replicas": 2})
    lines = out.splitlines()
    assert lines[0].split()[:5] == ["live", "spec.engine.maxNumBatchedTokens", "2048", "→", "256"]
    assert lines[1].startswith("at once  spec.replicas")
    assert lines[-1] == "→ no engine restarts"


def test_diff_names_what_restarts_first_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"engine.maxNumSeqs": 8, "engine.ceilings.maxNumSeqs": 32, "model.cache.claimName": "c"}
    lines = diff(tmp_path, capsys, **changes).splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["restart", "restart", "live"]
    assert "(buffers are sized by it at start)" in lines[0]
    assert "absent → c" in lines[1]
    assert "replaced one after another" in lines[-1]


def test_diff_of_equal_files_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(tmp_path, capsys) == "no field of spec differs\n"


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "-f", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml: cannot be read" in capsys.readouterr().err
