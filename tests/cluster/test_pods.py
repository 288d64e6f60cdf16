"""Pods on the test cluster: it holds the node agent to what a kubelet does."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

import pytest

from support.cluster.cluster import is_ready
from support.cluster.kubectl import Kubectl, KubectlError
from support.cluster.manifests import (
    HTTP_SERVER,
    SLEEP,
    config_map,
    deployment,
    main_state,
    phase_is,
    pod,
)
from support.engine_server import wait_until

Json = dict[str, Any]


def output(kubectl: Kubectl, manifest: Json) -> str:
    """Run a pod to its end → what it wrote. It must succeed."""
    kubectl.apply(manifest)
    name = manifest["metadata"]["name"]
    kubectl.wait_for(
        "ended", "pod", name, condition=lambda p: p["status"].get("phase") in ("Succeeded", "Failed")
    )
    text = kubectl("logs", name)
    assert kubectl.get("pod", name)["status"]["phase"] == "Succeeded", text
    return text


def test_nodes_become_ready_and_take_pods(kubectl: Kubectl) -> None:
    nodes = kubectl.items("nodes")
    assert len(nodes) >= 2
    assert all(is_ready(node) and not node["spec"].get("taints") for node in nodes)
    kubectl.apply(pod("sleeper", SLEEP))
    kubectl.wait_for("ready", "pod", "sleeper", condition=is_ready)


def test_pods_are_scheduled_by_the_gpus_that_are_left(kubectl: Kubectl) -> None:
    gpu = {"resources": {"limits": {"nvidia.com/gpu": "1"}}}
    script = f"import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); {SLEEP}"
    kubectl.apply(deployment("gpu", 5, pod("gpu", script, container=gpu)))
    kubectl.wait_for(
        "four ready", "deployment", "gpu", condition=lambda d: d["status"].get("readyReplicas") == 4
    )
    pods = kubectl.items("pods")
    pending = [p for p in pods if p["status"]["phase"] == "Pending"]
    assert len(pending) == 1
    assert "Insufficient nvidia.com/gpu" in pending[0]["status"]["conditions"][0]["message"]
    running = [p for p in pods if p["status"]["phase"] == "Running"]
    for one in running:  # ready as soon as it has begun
        wait_until(lambda name=one["metadata"]["name"]: kubectl("logs", name))
    held = sorted((p["spec"]["nodeName"], kubectl("logs", p["metadata"]["name"]).strip()) for p in running)
    assert held == [("node-a", "0"), ("node-a", "1"), ("node-b", "0"), ("node-b", "1")]
    # A GPU that is given back goes to the one that waits.
    freed = next(p for p in pods if p["status"]["phase"] == "Running")
    kubectl("scale", "deployment/gpu", "--replicas=4")
    kubectl("delete", "pod", freed["metadata"]["name"])
    kubectl.wait_for(
        "four ready", "deployment", "gpu", condition=lambda d: d["status"].get("readyReplicas") == 4
    )


def test_a_container_sees_its_environment(kubectl: Kubectl) -> None:
    kubectl.apply(
        config_map("settings", colour="blue", level="3"),
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "keys"},
            "stringData": {"token": "s3cret"},
        },
    )
    field = {"fieldRef": {"fieldPath": "status.podIP"}}
    manifest = pod(
        "env",
        "import json, os, sys; print(json.dumps({**os.environ, 'argv': sys.argv[1:]}))",
        restartPolicy="Never",
    )
    manifest["spec"]["containers"][0] |= {
        "env": [
            {"name": "IP", "valueFrom": field},
            {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}},
            {
                "name": "ABSENT",
                "valueFrom": {"configMapKeyRef": {"name": "none", "key": "x", "optional": True}},
            },
            {"name": "URL", "value": "http://$(IP):80/$(UNKNOWN)/$$(IP)"},
            {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
        ],
        "envFrom": [{"configMapRef": {"name": "settings"}, "prefix": "S_"}],
        "resources": {"limits": {"cpu": "1500m"}},
    }
    manifest["spec"]["containers"][0]["args"].append("$(TOKEN)")
    seen = json.loads(output(kubectl, manifest))
    ip = kubectl.get("pod", "env")["status"]["podIP"]
    assert seen["URL"] == f"http://{ip}:80/$(UNKNOWN)/$(IP)"
    assert (seen["TOKEN"], seen["argv"], seen["CPUS"]) == ("s3cret", ["s3cret"], "2")
    assert (seen["S_colour"], seen["S_level"]) == ("blue", "3")
    assert seen["KUBERNETES_SERVICE_HOST"] == "10.96.0.1"
    assert "ABSENT" not in seen


def test_a_missing_secret_holds_the_container_until_it_is_there(kubectl: Kubectl) -> None:
    env = [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "late", "key": "token"}}}]
    kubectl.apply(pod("late", SLEEP, container={"env": env}))
    kubectl.wait_for(
        "held back",
        "pod",
        "late",
        condition=lambda p: main_state(p).get("waiting", {}).get("reason") == "CreateContainerConfigError",
    )
    assert '"late" not found' in main_state(kubectl.get("pod", "late"))["waiting"]["message"]
    kubectl("create", "secret", "generic", "late", "--from-literal=token=x")
    kubectl.wait_for("ready", "pod", "late", condition=is_ready)


def test_an_unknown_image_cannot_be_pulled(kubectl: Kubectl) -> None:
    kubectl.apply(pod("nowhere", SLEEP, container={"image": "registry.invalid/nothing:1"}))
    kubectl.wait_for(
        "backing off",
        "pod",
        "nowhere",
        condition=lambda p: main_state(p).get("waiting", {}).get("reason") == "ImagePullBackOff",
    )
    assert kubectl.get("pod", "nowhere")["status"]["phase"] == "Pending"


def test_a_program_that_is_not_there_is_a_start_error(kubectl: Kubectl) -> None:
    kubectl.apply(
        pod("absent", "", container={"command": ["/no/such/program"], "args": []}, restartPolicy="Never")
    )
    found = kubectl.wait_for("failed", "pod", "absent", condition=phase_is("Failed"))
    ended = main_state(found)["terminated"]
    assert (ended["reason"], ended["exitCode"]) == ("StartError", 128)
    assert "No such file or directory" in kubectl("logs", "absent")


def test_a_service_account_token_and_the_authority_are_mounted_and_work(kubectl: Kubectl) -> None:
    script = """
import os, ssl, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount/"
request = urllib.request.Request(
    f"https://{os.environ['KUBERNETES_SERVICE_HOST']}/apis/authentication.k8s.io/v1/selfsubjectreviews", method="POST",
    headers={"Authorization": "Bearer " + open(folder + "token").read(), "Content-Type": "application/json"},
    data=b'{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}')
context = ssl.create_default_context(cafile=folder + "ca.crt")
print(urllib.request.urlopen(request, context=context).read().decode())
"""
    answer = json.loads(output(kubectl, pod("whoami", script, restartPolicy="Never")))
    assert answer["status"]["userInfo"]["username"] == f"system:serviceaccount:{kubectl.namespace}:default"


def test_a_config_map_volume_follows_its_config_map_in_one_step(kubectl: Kubectl) -> None:
    script = """
import pathlib, time
folder, last = pathlib.Path("/etc/live"), None
while True:
    # Two files of one version: `..data` is resolved once.
    now = folder.joinpath("..data").resolve()
    try:
        seen = sorted((p.name, p.read_text()) for p in now.iterdir())
    except FileNotFoundError:
        continue
    if seen != last:
        print(seen, flush=True)
    last = seen
    time.sleep(0.01)
"""
    volume = [{"name": "live", "configMap": {"name": "live"}}]
    mount = {"volumeMounts": [{"name": "live", "mountPath": "/etc/live"}]}
    kubectl.apply(config_map("live", a="1", b="1"))
    kubectl.apply(pod("reader", script, container=mount, volumes=volume))
    kubectl.wait_for("ready", "pod", "reader", condition=is_ready)
    wait_until(lambda: "1" in kubectl("logs", "reader"), 60.0, lambda: kubectl("logs", "reader"))
    kubectl("patch", "configmap", "live", "--type=merge", "-p", '{"data": {"a": "2", "b": "2"}}')
    wait_until(lambda: "2" in kubectl("logs", "reader"), 60.0, lambda: kubectl("logs", "reader"))
    kubectl("patch", "configmap", "live", "--type=merge", "-p", '{"data": {"a": "3", "b": null}}')
    wait_until(lambda: "3" in kubectl("logs", "reader"), 60.0, lambda: kubectl("logs", "reader"))
    assert kubectl("logs", "reader").splitlines() == [
        "[('a', '1'), ('b', '1')]",
        "[('a', '2'), ('b', '2')]",
        "[('a', '3')]",
    ]


def test_init_containers_run_in_order_before_the_main_one(kubectl: Kubectl) -> None:
    say = "import pathlib, sys; open('/work/log', 'a').write(sys.argv[1])"
    mounts = [{"name": "work", "mountPath": "/work"}]
    manifest = pod("ordered", "print(open('/work/log').read())", container={"volumeMounts": mounts})
    manifest["spec"] |= {
        "restartPolicy": "Never",
        "volumes": [{"name": "work", "emptyDir": {}}],
        "initContainers": [
            {"name": name, "image": "python:3", "args": ["-c", say, name], "volumeMounts": mounts}
            for name in ("first", "second")
        ],
    }
    assert output(kubectl, manifest).strip() == "firstsecond"


def test_readiness_follows_the_probe_both_ways(kubectl: Kubectl) -> None:
    probe = {"exec": {"command": ["cat", "/work/ready"]}, "periodSeconds": 1, "failureThreshold": 1}
    mount = {"readinessProbe": probe, "volumeMounts": [{"name": "work", "mountPath": "/work"}]}
    script = """
import pathlib, signal, time
ready = pathlib.Path("/work/ready")
signal.signal(signal.SIGUSR1, lambda *_: ready.unlink() if ready.exists() else ready.touch())
print("up", flush=True)
while True: time.sleep(1)
"""
    kubectl.apply(pod("moody", script, container=mount, volumes=[{"name": "work", "emptyDir": {}}]))
    wait_until(lambda: "up" in kubectl("logs", "moody", check=False))
    found = kubectl.wait_for("running", "pod", "moody", condition=phase_is("Running"))
    assert not is_ready(found)
    pid = found["status"]["containerStatuses"][0]["containerID"].removeprefix("process://")
    subprocess.run(["kill", "-USR1", pid], check=True)
    kubectl.wait_for("ready", "pod", "moody", condition=is_ready)
    subprocess.run(["kill", "-USR1", pid], check=True)
    found = kubectl.wait_for("unready", "pod", "moody", condition=lambda p: not is_ready(p))
    assert found["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_startup_probe_gates_the_others_and_liveness_restarts(kubectl: Kubectl) -> None:
    # It listens after 3 s and stops answering when it is told to; without the startup probe liveness would never let it start.
    script = f"""
import os, signal, threading, time
signal.signal(signal.SIGUSR1, lambda *_: os.closerange(3, 50))
time.sleep(3)
def serve():
{"".join("    " + line + chr(10) for line in HTTP_SERVER.splitlines())}
threading.Thread(target=serve, daemon=True).start()
while True: time.sleep(1)
"""
    http = {"httpGet": {"path": "/", "port": 8000}}
    probes = {
        "startupProbe": {**http, "periodSeconds": 1, "failureThreshold": 30},
        "livenessProbe": {**http, "periodSeconds": 1, "failureThreshold": 2},
    }
    kubectl.apply(pod("hangs", script, container=probes, terminationGracePeriodSeconds=1))
    found = kubectl.wait_for(
        "started",
        "pod",
        "hangs",
        condition=lambda p: any(c.get("started") for c in p["status"].get("containerStatuses", [])),
    )
    pid = found["status"]["containerStatuses"][0]["containerID"].removeprefix("process://")
    # On a very busy machine liveness may have ended it already.
    subprocess.run(["kill", "-USR1", pid], check=False)
    found = kubectl.wait_for(
        "restarted",
        "pod",
        "hangs",
        condition=lambda p: p["status"]["containerStatuses"][0]["restartCount"] >= 1,
    )
    last = found["status"]["containerStatuses"][0]["lastState"]["terminated"]
    assert last["exitCode"] == 143, "SIGTERM, as a kubelet does it"
    for words in ("Liveness probe failed", "failed liveness probe, will be restarted"):
        wait_until(lambda said=words: any(said in e["message"] for e in kubectl.items("events")))


def test_a_crashing_container_is_restarted_at_once_then_with_back_off(kubectl: Kubectl) -> None:
    kubectl.apply(pod("crash", "import sys; print('no model', flush=True); sys.exit(3)"))
    found = kubectl.wait_for(
        "backing off",
        "pod",
        "crash",
        condition=lambda p: (
            main_state(p).get("waiting", {}).get("reason") == "CrashLoopBackOff"
            and p["status"]["containerStatuses"][0]["restartCount"] == 1
        ),
    )
    status = found["status"]["containerStatuses"][0]
    assert status["lastState"]["terminated"]["exitCode"] == 3
    assert "back-off 10s" in status["state"]["waiting"]["message"]
    assert found["status"]["phase"] == "Running"
    assert kubectl("logs", "crash", "--previous") == "no model\n"


def test_the_end_of_the_log_is_the_termination_message_when_asked_for(kubectl: Kubectl) -> None:
    asked = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    kubectl.apply(
        pod("fails", "raise SystemExit('the model is missing')", container=asked, restartPolicy="Never")
    )
    found = kubectl.wait_for("failed", "pod", "fails", condition=phase_is("Failed"))
    assert main_state(found)["terminated"]["message"] == "the model is missing"


def test_a_container_that_takes_more_memory_than_its_limit_is_killed_for_it(kubectl: Kubectl) -> None:
    limited = {"resources": {"limits": {"memory": "64Mi"}}}
    takes = "held = b'x' * ({mib} << 20); import time; time.sleep(1000)"
    # What its children take counts.
    more = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {takes.format(mib=128)!r}])"
    kubectl.apply(
        pod("modest", takes.format(mib=32), container=limited),
        pod("takes-more", more, container=limited, restartPolicy="Never"),
    )
    found = kubectl.wait_for("failed", "pod", "takes-more", condition=phase_is("Failed"))
    ended = main_state(found)["terminated"]
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)
    kubectl.wait_for("ready", "pod", "modest", condition=is_ready)
    assert kubectl.get("pod", "modest")["status"]["containerStatuses"][0]["restartCount"] == 0


def test_deletion_runs_pre_stop_then_sigterm_and_kills_after_the_grace(kubectl: Kubectl) -> None:
    script = """
import signal, time
def term(*_): print("term", open("/work/hook").read(), flush=True)
signal.signal(signal.SIGTERM, term)
print("up", flush=True)
while True: time.sleep(0.1)
"""
    hook = {"exec": {"command": ["sh", "-c", "sleep 1; echo hooked > /work/hook"]}}
    container = {"lifecycle": {"preStop": hook}, "volumeMounts": [{"name": "work", "mountPath": "/work"}]}
    volumes = [{"name": "work", "emptyDir": {}}]
    kubectl.apply(
        pod("stubborn", script, container=container, terminationGracePeriodSeconds=6, volumes=volumes)
    )
    kubectl.wait_for("ready", "pod", "stubborn", condition=is_ready)
    wait_until(lambda: "up" in kubectl("logs", "stubborn"))
    follower = subprocess.Popen(
        [
            str(kubectl.program),
            "--kubeconfig",
            str(kubectl.kubeconfig),
            "-n",
            kubectl.namespace,
            "logs",
            "-f",
            "stubborn",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    begun = time.monotonic()
    kubectl("delete", "pod", "stubborn")
    took_s = time.monotonic() - begun
    said, _ = follower.communicate(timeout=60)
    assert said.split() == ["up", "term", "hooked"], "preStop ends before SIGTERM"
    assert took_s >= 6.0, "it ignores SIGTERM, so it lives until the grace is over"


def test_a_pod_of_the_restricted_level_is_bound_to_it(kubectl: Kubectl) -> None:
    kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=restricted")
    with pytest.raises(KubectlError, match="violates PodSecurity"):
        kubectl.apply(pod("root", SLEEP))
    script = """
import os
print(os.getuid(), os.getgid(), sorted(os.getgroups()), [l for l in open("/proc/self/status") if l.startswith(("CapEff", "NoNewPrivs"))])
for path in ("/etc/x", "/tmp/x"):
    try: open(path, "w"); print(path, "written")
    except OSError as error: print(path, error.strerror)
"""
    container = {
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    context = {
        "runAsNonRoot": True,
        "runAsUser": 1234,
        "fsGroup": 77,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    spec = {
        "securityContext": context,
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        "restartPolicy": "Never",
    }
    lines = output(kubectl, pod("bound", script, container=container, **spec)).splitlines()
    assert lines[0] == "1234 1234 [77] ['CapEff:\\t0000000000000000\\n', 'NoNewPrivs:\\t1\\n']"
    assert lines[1:] == ["/etc/x Read-only file system", "/tmp/x written"]


def test_a_job_ends_and_counts(kubectl: Kubectl) -> None:
    template = pod("job", "print('done')", restartPolicy="Never")["spec"]
    kubectl.apply(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "job"},
            "spec": {"template": {"spec": template}, "completions": 2},
        }
    )
    kubectl("wait", "--for=condition=Complete", "job/job", "--timeout=120s")
    assert kubectl.get("job", "job")["status"]["succeeded"] == 2
