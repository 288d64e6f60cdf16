"""Builders of pods and their company for cluster tests: small, explicit, Python for programs."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

SLEEP = "import time; time.sleep(1000)"
#: Answers every GET with its own host name; writes one line per request.
HTTP_SERVER = """
import http.server, socket
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = socket.gethostname().encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
"""


def pod(name: str, script: str, *, container: Json | None = None, **spec: Any) -> Json:
    """A pod that runs a Python script; `container` adds to its one container, `spec` to its spec. Grace is 2 s unless given."""
    main = {"name": "main", "image": "python:3", "args": ["-c", script], **(container or {})}
    full = {"terminationGracePeriodSeconds": 2, "containers": [main], **spec}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": full,
    }


def deployment(name: str, replicas: int, template: Json) -> Json:
    """A Deployment of copies of a `pod`, selected by its label app."""
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": template["metadata"]["labels"]},
            "template": {"metadata": {"labels": template["metadata"]["labels"]}, "spec": template["spec"]},
        },
    }


def service(name: str, app: str, port: int = 80, target: int = 8000) -> Json:
    """A Service of type ClusterIP for the pods labelled `app`."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": app}, "ports": [{"port": port, "targetPort": target}]},
    }


def config_map(name: str, **data: str) -> Json:
    """A ConfigMap."""
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def phase_is(wanted: str) -> Any:
    """A condition for `Kubectl.wait_for`: the pod's phase."""
    return lambda found: found["status"].get("phase") == wanted


def main_state(found: Json) -> Json:
    """State of a pod's first container: {waiting|running|terminated: …}; empty before there is one."""
    statuses = found["status"].get("containerStatuses", [])
    state: Json = statuses[0]["state"] if statuses else {}
    return state
