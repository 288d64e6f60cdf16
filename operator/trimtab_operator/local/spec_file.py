"""The YAML file of a local service → a checked InferenceService, or an error with path, value and what is allowed.

Used by `main` at the start and by `service` for every edit: both judge by the CRD's own schema and rules, then by what this
mode can serve, then by whether the model is there.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from trimtab_operator import documents, schema, support
from trimtab_operator.api import InferenceService
from trimtab_operator.api.service import Model
from trimtab_operator.errors import Finding, InvalidResource
from trimtab_operator.plan.engine_flags import model_reference


def load(text: str, what: str, old: InferenceService | None = None) -> InferenceService:
    """Parse and check; `old` is the service before an edit. Raises OperatorError naming `what`."""
    service = schema.parse_service(documents.parse(text, what), old, what)
    if old is not None and (service.namespace, service.name) != (old.namespace, old.name):
        finding = Finding(
            "metadata.name",
            service.name,
            f"{old.name!r} while it runs; another service needs its own operator",
        )
        raise InvalidResource([finding], what)
    support.check(service, "local")
    findings = _model_findings(service.spec.model) + _key_file_findings(service)
    if findings:
        raise InvalidResource(findings, what)
    return service


def api_keys_file(service: InferenceService) -> str | None:
    """Path of the API keys: in local mode the Secret's name is a file's."""
    reference = service.spec.security.api_key_secret_ref
    return None if reference is None else str(Path(reference.name).expanduser().absolute())


def _model_findings(model: Model | None) -> list[Finding]:
    assert model is not None, "support.check refuses services without a model"
    if model.uri.startswith("hf://"):
        return []  # the engine asks the hub, and says what is wrong
    if model.uri.startswith("package://"):
        package, _, inner = model.uri.removeprefix("package://").partition("/")
        # Only looked for, never imported: a model's package may pull in an engine of its own.
        found = importlib.util.find_spec(package.partition(".")[0])
        if found is None:
            return [
                Finding(
                    "spec.model.uri",
                    model.uri,
                    f"a file of an installed package; {package!r} is not installed",
                )
            ]
        folders = [Path(place, *package.split(".")[1:]) for place in found.submodule_search_locations or ()]
        if not any((folder / inner).exists() for folder in folders):
            return [Finding("spec.model.uri", model.uri, f"a file of that package; it has no {inner!r}")]
        return []
    path = Path(model_reference(model))
    if not path.exists():
        return [
            Finding(
                "spec.model.uri", model.uri, f"a folder or .gguf file that is there; nothing is at {path}"
            )
        ]
    return []


def _key_file_findings(service: InferenceService) -> list[Finding]:
    path = api_keys_file(service)
    if path is not None and not Path(path).is_file():
        name = service.spec.security.api_key_secret_ref
        assert name is not None
        return [
            Finding(
                "spec.security.apiKeySecretRef.name",
                name.name,
                "in local mode, the path of a file of API keys",
            )
        ]
    return []
