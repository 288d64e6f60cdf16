"""Talks to one hub: lists a model at a revision, and streams a file from a byte on. Says of each failure whether time may mend it.

Names, headers, tokens and the API come from huggingface_hub; used by `hub.download`, which owns retries and files.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import httpx2
import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils._headers import build_hf_headers
from huggingface_hub.utils._http import get_session, parse_ratelimit_headers

from trimtab_engine.errors import ConfigError, ModelLoadError
from trimtab_engine.hub.files import HubFile
from trimtab_engine.hub.patience import Transient

TIMEOUT = httpx2.Timeout(30.0, connect=10.0)
# Else a start would ask the public hub for a list of user agents, also where only a mirror may be asked.
constants.HF_HUB_DISABLE_TELEMETRY = True


class CannotResume(Transient):
    """The server does not go on where it was asked to: start this file again from its first byte."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A model at one commit."""

    commit: str
    files: dict[str, HubFile]


class HubClient:
    """One hub for one model. The token comes from HF_TOKEN or the user's login; it is never logged."""

    def __init__(self, endpoint: str | None, ca_file: Path | None) -> None:
        """`ca_file` adds authorities to the system's; an empty file adds none. Raises ConfigError naming the flag."""
        self.endpoint = (endpoint or constants.ENDPOINT).rstrip("/")
        context = httpx2.create_ssl_context()
        if ca_file is not None:
            _trust(context, ca_file)
        huggingface_hub.set_client_factory(
            lambda: httpx2.Client(verify=context, follow_redirects=True, timeout=TIMEOUT)
        )
        self._headers = build_hf_headers(library_name="trimtab", library_version=version("trimtab"))
        self.has_token = "authorization" in self._headers

    def listing(self, repository: str, revision: str | None) -> Listing:
        """All files at a revision. Raises Transient, or ModelLoadError with the cause."""
        try:
            api = huggingface_hub.HfApi(endpoint=self.endpoint, headers=self._headers)
            if constants.is_offline_mode():
                raise Transient("HF_HUB_OFFLINE is set, and the model is not in the cache")
            info = api.model_info(
                repository, revision=revision or constants.DEFAULT_REVISION, files_metadata=True, timeout=30.0
            )
        except HFValidationError as error:
            raise ModelLoadError(f"{repository!r} is no name that a hub can have: {error}") from error
        except HfHubHTTPError as error:
            raise self._status_error(error.response, revision) from error
        except OfflineModeIsEnabled as error:
            raise Transient(str(error)) from error
        except httpx2.HTTPError as error:
            raise self._transport_error(error) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ModelLoadError(f"{self.endpoint} does not speak the hub's API: {error!r}") from error
        if info.sha is None or info.siblings is None or not re.fullmatch("[0-9a-f]{40}", info.sha):
            raise ModelLoadError(
                f"{self.endpoint} does not speak the hub's API: no commit or no files in its answer"
            )
        files = {}
        for sibling in info.siblings:
            if sibling.size is None or sibling.blob_id is None:
                continue
            if (
                not isinstance(sibling.rfilename, str)
                or not isinstance(sibling.size, int)
                or sibling.size < 0
            ):
                raise ModelLoadError(
                    f"{self.endpoint} gives no size of {sibling.rfilename}: {sibling.size!r}"
                )
            sha256 = None if sibling.lfs is None else sibling.lfs.sha256
            file = HubFile(sibling.rfilename, sibling.size, sibling.blob_id, sha256)
            if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", str(file.etag)):
                raise ModelLoadError(
                    f"{self.endpoint} gives no hash of {file.name}, so it could not be checked"
                )
            files[file.name] = file
        return Listing(info.sha, files)

    @contextmanager
    def stream(
        self, repository: str, commit: str, file: HubFile, start: int
    ) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Content from byte `start` on → (where it really starts: 0 when the server cannot resume, chunks).

        Raises Transient or ModelLoadError, from the chunks as well.
        """
        url = huggingface_hub.hf_hub_url(repository, file.name, revision=commit, endpoint=self.endpoint)
        # identity: sizes and hashes are those of the content, not of a compressed form of it.
        headers = {**self._headers, "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        try:
            with get_session().stream("GET", url, headers=headers) as answer:
                if answer.status_code == 416 or (answer.status_code == 206 and _start(answer) != start):
                    raise CannotResume(f"{self.endpoint} does not resume where it was asked to")
                if answer.status_code not in (200, 206):
                    raise self._status_error(answer, None)
                yield start if answer.status_code == 206 else 0, answer.iter_bytes()
        except httpx2.HTTPError as error:
            raise self._transport_error(error) from error

    def _status_error(self, answer: httpx2.Response, revision: str | None) -> Exception:
        status, code = answer.status_code, answer.headers.get("X-Error-Code", "")
        if status in (408, 429) or status >= 500:
            return Transient(f"{self.endpoint} answers HTTP {status}", _retry_after_s(answer))
        if code == "RevisionNotFound":
            return ModelLoadError(f"the hub has no revision {revision or constants.DEFAULT_REVISION!r} of it")
        if code == "GatedRepo" or (status == 403 and code != "RepoNotFound"):
            if self.has_token:
                return ModelLoadError(
                    f"access is gated and this token has none (HTTP {status}); accept its terms at the hub"
                )
            return ModelLoadError(
                f"access is gated (HTTP {status}); it needs a token (tokenSecretRef, or HF_TOKEN)"
            )
        if status == 404 and code == "EntryNotFound":
            return ModelLoadError(f"the hub has no file behind {answer.url}")
        if status in (401, 404):
            # A hub answers 401 for what does not exist as well, so that nobody learns what does.
            if self.has_token:
                return ModelLoadError(
                    f"no such model at {self.endpoint}, or the token may not read it (HTTP {status})"
                )
            return ModelLoadError(
                f"no such model at {self.endpoint}, or it needs a token (tokenSecretRef, or HF_TOKEN) (HTTP {status})"
            )
        return ModelLoadError(f"{self.endpoint} answers HTTP {status}")

    def _transport_error(self, error: httpx2.HTTPError) -> Exception:
        text = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in text:
            return ModelLoadError(
                f"TLS: the certificate of {self.endpoint} is not trusted ({_plain(text)}); "
                "give its authority with --hub-ca-file"
            )
        if isinstance(error, httpx2.UnsupportedProtocol | httpx2.TooManyRedirects):
            return ModelLoadError(f"{self.endpoint}: {text}")
        return Transient(f"{self.endpoint}: {_plain(text)}")


def _trust(context: ssl.SSLContext, ca_file: Path) -> None:
    try:
        pem = ca_file.read_text()
        if pem.strip():
            context.load_verify_locations(cadata=pem)
    except (OSError, ValueError, ssl.SSLError) as error:
        raise ConfigError("--hub-ca-file", str(ca_file), f"a PEM file of certificates ({error})") from error


def _start(answer: httpx2.Response) -> int | None:
    unit, _, rest = answer.headers.get("Content-Range", "").partition(" ")
    first = rest.partition("-")[0]
    return int(first) if unit == "bytes" and first.isdigit() else None


def _retry_after_s(answer: httpx2.Response) -> float | None:
    asked = answer.headers.get("Retry-After", "")
    if asked.isdigit():
        return float(asked)
    limit = parse_ratelimit_headers(answer.headers)
    return float(limit.reset_in_seconds) if limit is not None and answer.status_code == 429 else None


def _plain(text: str) -> str:
    return " ".join(text.split())
