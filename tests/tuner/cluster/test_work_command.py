"""The command line of a worker: what it takes, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trimtab_tuner import cli
from trimtab_tuner.commands.work import api_key
from trimtab_tuner.errors import InputError


def test_a_replay_takes_the_tuners_own_key_or_else_the_first(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("alice: secret-a\ntrimtab-tuner: secret-t\n")
    assert api_key(file) == "secret-t"
    file.write_text(json.dumps({"alice": "secret-a", "bob": "secret-b"}))
    assert api_key(file) == "secret-a"


@pytest.mark.parametrize("content", ["", "[secret-a]", "alice: [secret-a]", "a: b: secret-a", None])
def test_unusable_keys_are_named_by_file_and_never_shown(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=r"--api-keys: .*keys\.yaml") as caught:
        api_key(file)
    assert "secret-a" not in str(caught.value)


def test_no_way_to_a_cluster_is_final_and_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "kubeconfig")
    assert cli.main(["work", "--namespace", "team", "--run", "try", "--kubeconfig", missing]) == 2
    said = capsys.readouterr().err
    assert "--kubeconfig" in said
    assert "a way to reach a cluster" in said
