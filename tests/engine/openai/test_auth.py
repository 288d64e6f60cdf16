"""API keys: named, several, reread on change, and never lost to a broken file."""

import json
import os
from pathlib import Path

import pytest

from trimtab_engine.errors import ConfigError
from trimtab_engine.server.openai.auth import ApiKeys
from trimtab_engine.server.openai.errors import HttpError


def write(path: Path, text: str) -> Path:
    # As a mounted Secret does it: a new file takes the old one's place.
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    os.replace(temporary, path)
    return path


@pytest.mark.parametrize("text", ['{"anna": "k1", "ben": "k2"}', "anna: k1\nben: k2\n"], ids=["json", "yaml"])
def test_the_name_of_the_key_is_the_tenant(tmp_path: Path, text: str) -> None:
    keys = ApiKeys(write(tmp_path / "keys", text))
    assert keys.tenant("Bearer k1") == "anna"
    assert keys.tenant("bearer  k2 ") == "ben"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Bearer k", "Bearer k11", "Basic k1", "k1", "Bearer é"]
)
def test_anything_else_is_refused(tmp_path: Path, header: str | None) -> None:
    keys = ApiKeys(write(tmp_path / "keys", "anna: k1"))
    with pytest.raises(HttpError) as caught:
        keys.tenant(header)
    assert caught.value.status == 401


def test_keys_rotate_without_a_restart(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", "old: k1")
    keys = ApiKeys(path)
    write(path, json.dumps({"old": "k1", "new": "k2"}))
    assert (keys.tenant("Bearer k1"), keys.tenant("Bearer k2")) == ("old", "new")
    write(path, json.dumps({"new": "k2"}))
    with pytest.raises(HttpError):
        keys.tenant("Bearer k1")


def test_a_file_that_breaks_or_goes_leaves_the_last_good_keys(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", "anna: k1")
    keys = ApiKeys(path)
    write(path, "anna: [k1")
    assert keys.tenant("Bearer k1") == "anna"
    path.unlink()
    assert keys.tenant("Bearer k1") == "anna"
    write(path, "anna: k9")
    assert keys.tenant("Bearer k9") == "anna"


@pytest.mark.parametrize("text", ["", "[]", "{}", "just text", "anna:", "anna: 5", "anna: ''", "{"])
def test_a_useless_file_stops_the_start_and_its_content_stays_secret(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "keys", text)
    with pytest.raises(ConfigError, match="--api-keys") as caught:
        ApiKeys(path)
    assert "just text" not in str(caught.value)


def test_a_missing_file_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--api-keys"):
        ApiKeys(tmp_path / "nowhere")
