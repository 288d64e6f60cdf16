"""The admin port's tokens, over the real admin app: who gets in, with what, and what a broken key file does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from support.engine_server import EngineServer, start_engine
from trimtab_engine.errors import ConfigError
from trimtab_engine.server.auth import AdminAuth, Forbidden, Unauthenticated, load_public_keys

AUDIENCE = "pod-1234"
OLD, NEW, STRANGER = (Ed25519PrivateKey.generate() for _ in range(3))


def pem(*keys: Ed25519PrivateKey) -> bytes:
    form = Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
    return b"".join(key.public_key().public_bytes(*form) for key in keys)


def token(
    key: Ed25519PrivateKey = NEW,
    *,
    scope: str | None = "read",
    aud: str | None = AUDIENCE,
    life_s: float = 60,
) -> str:
    claims = {"exp": time.time() + life_s, "scope": scope, "aud": aud}
    return jwt.encode({k: v for k, v in claims.items() if v is not None}, key, algorithm="EdDSA")


@dataclass(frozen=True)
class Door:
    """An `AdminAuth` on a file that tests may rewrite."""

    path: Path
    auth: AdminAuth

    def check(self, bearer: str | None, scope: str = "read") -> None:
        header = None if bearer is None else f"Bearer {bearer}"
        self.auth.check(header, "write" if scope == "write" else "read")


@pytest.fixture
def door(tmp_path: Path) -> Door:
    path = tmp_path / "keys.pem"
    path.write_bytes(b"rotated 2026-11\n" + pem(OLD, NEW))
    return Door(path, AdminAuth(path, AUDIENCE))


@pytest.mark.parametrize("key", [OLD, NEW], ids=["old", "new"])
def test_every_key_of_the_file_is_good(door: Door, key: Ed25519PrivateKey) -> None:
    door.check(token(key))
    door.check(token(key, scope="write"))
    door.check(token(key, scope="write"), "write")


def test_read_does_not_allow_to_write(door: Door) -> None:
    with pytest.raises(Forbidden, match="'write' is required"):
        door.check(token(scope="read"), "write")
    for scope in (None, "admin"):
        with pytest.raises(Forbidden):
            door.check(token(scope=scope), "read")


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(lambda: None, id="missing"),
        pytest.param(lambda: "not.a.token", id="garbage"),
        pytest.param(lambda: token(life_s=-60), id="expired"),
        pytest.param(lambda: token(aud="pod-9"), id="wrong audience"),
        pytest.param(lambda: token(aud=None), id="no audience"),
        pytest.param(lambda: token(STRANGER), id="unknown key"),
        pytest.param(lambda: jwt.encode({"aud": AUDIENCE, "scope": "write"}, NEW, "EdDSA"), id="for ever"),
        pytest.param(
            lambda: jwt.encode({"aud": AUDIENCE, "scope": "write", "exp": 9e9}, "", algorithm="none"),
            id="unsigned",
        ),
        pytest.param(
            lambda: jwt.encode(
                {"aud": AUDIENCE, "scope": "write", "exp": 9e9}, "a secret of thirty-two characters", "HS256"
            ),
            id="symmetric",
        ),
    ],
)
def test_a_bad_token_is_not_let_in(door: Door, bad: object) -> None:
    assert callable(bad)
    with pytest.raises(Unauthenticated):
        door.check(bad())


def test_keys_rotate_without_a_restart_and_a_broken_file_keeps_the_good_ones(door: Door) -> None:
    door.path.write_bytes(b"-----BEGIN PUBLIC KEY-----\nbroken\n-----END PUBLIC KEY-----\n")
    door.check(token(OLD))
    door.path.write_bytes(pem(STRANGER))
    door.check(token(STRANGER))
    with pytest.raises(Unauthenticated):
        door.check(token(OLD))


def test_a_key_file_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    other = ec.generate_private_key(ec.SECP256R1()).public_key()
    contents = {
        "missing.pem": None,
        "empty.pem": b"",
        "broken.pem": b"-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        "curve.pem": other.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
    }
    for name, content in contents.items():
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=name):
            load_public_keys(path)


@pytest.fixture(scope="module")
def server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    path = tmp_path_factory.mktemp("keys") / "keys.pem"
    path.write_bytes(pem(OLD, NEW))
    flags = ["--admin-public-key", str(path), "--admin-audience", AUDIENCE, "--admin-host", "0.0.0.0"]
    with start_engine(tiny_model, *flags, wait_ready=False) as started:  # the door is there before the model
        yield started


ROUTES = [
    ("GET", "/admin/live-config", "read"),
    ("PUT", "/admin/live-config", "write"),
    ("DELETE", "/admin/live-config/candidate", "write"),
    ("GET", "/admin/workload", "read"),
    ("GET", "/admin/step-model", "read"),
    ("GET", "/admin/drain", "read"),
    ("POST", "/admin/drain", "write"),
    ("PUT", "/admin/drain", "write"),
]


@pytest.mark.parametrize(("method", "path", "scope"), ROUTES)
def test_every_admin_route_asks_for_its_scope(
    server: EngineServer, method: str, path: str, scope: str
) -> None:
    def ask(bearer: str | None) -> int:
        headers = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
        answer = httpx.request(method, server.admin_url + path, headers=headers)
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]
        return answer.status_code

    assert ask(None) == 401
    assert ask(token(life_s=-60)) == 401
    assert ask(token(aud="pod-9")) == 401
    assert ask(token(STRANGER, scope="write")) == 401
    if scope == "write":
        assert ask(token(scope="read")) == 403
    else:
        assert ask(token(scope="read")) == 200


def test_facts_need_a_loaded_model_and_then_a_token(server: EngineServer) -> None:
    server.wait_ready()
    url = f"{server.admin_url}/admin/info"
    assert httpx.get(url).status_code == 401
    answer = httpx.get(url, headers={"Authorization": f"Bearer {token(scope='write')}"})
    assert answer.json()["model_name"] == "tiny"


def test_the_metrics_of_the_admin_port_need_no_token(server: EngineServer) -> None:
    assert httpx.get(f"{server.admin_url}/metrics").status_code == 200


def test_an_open_admin_port_is_no_door_for_web_pages(served_engine: EngineServer) -> None:
    url = f"{served_engine.admin_url}/admin/drain"
    answer = httpx.post(url, headers={"Origin": "https://example.com"})
    assert answer.status_code == 403
    assert httpx.get(f"{served_engine.url}/ready").status_code == 200


def test_workload_records_come_with_a_cursor(served_engine: EngineServer) -> None:
    def read(**query: int) -> dict[str, object]:
        answer = httpx.get(f"{served_engine.admin_url}/admin/workload", params=query)
        assert answer.status_code == 200, answer.text
        body: dict[str, object] = answer.json()
        return body

    start = read()["next"]
    assert isinstance(start, int)
    prompt = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4}
    assert httpx.post(f"{served_engine.url}/v1/completions", json=prompt).status_code == 200
    body = read(since=start)
    records = body["records"]
    assert isinstance(records, list)
    (record,) = records
    assert (record["prompt_tokens"], record["output_tokens"], record["outcome"]) == (3, 4, "length")
    assert body["next"] == start + 1
    bad = httpx.get(f"{served_engine.admin_url}/admin/workload", params={"limit": 0})
    assert bad.status_code == 400
    assert bad.json()["error"]["path"] == "query.limit"
