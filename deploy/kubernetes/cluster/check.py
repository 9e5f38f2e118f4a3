#!/usr/bin/env python3
"""Runs the manifests of deploy/kubernetes on the cluster of cluster.sh, and judges each case by
the log of its store.

    check.py --kube DIR --image TAR --bin DIR [--python VENV] [CASE…]

Without cases it runs all. Exit code 1: a case is wrong. 3: no case is wrong, and this machine
cannot run a cluster or some of the cases; the last line has the reason.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import typing

from lab import JOB, JOBSET, KUBEFLOW, MANIFESTS, NODES, WORK, Case, Cluster, Demo, Kind, Wrong, below, seconds, wait
from torch_workers import Missing, Torch


def drain(t):
    """A drained pod saves, ends with 75, and continues on the other node."""
    [first] = t.start()
    name = first["metadata"]["name"]
    t.trains(first, 1)
    node, process = t.process(first)
    status = t.c.on(node, "cat", f"/proc/{process}/status")
    mounts = t.c.on(node, "cat", f"/proc/{process}/mounts")
    blocks, size = t.c.on(node, "stat", "-f", "-c", "%b %S", f"/proc/{process}/root/dev/shm").split()
    shm = int(blocks) * int(size)
    user, rights = (re.search(rf"^{field}:\s+(\S+)", status, re.M)[1] for field in ("Uid", "CapEff"))
    t.must(f"user {user}, capabilities {rights}", user == str(t.user) and not int(rights, 16))
    t.must("the root filesystem is read-only", re.search(r"^overlay / overlay ro,", mounts, re.M))
    t.must(f"/dev/shm has {shm >> 20} MiB", shm == 1 << 30)
    began = time.monotonic()
    t.c.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=160s", timeout=170)
    took = time.monotonic() - began
    second = t.pod(other_than=[name])
    t.trains(second, 2)
    failed = t.failures()
    t.c.kubectl("uncordon", node)
    t.must(f"kubectl drain {node} took {took:.1f} s; the next pod runs on {second['spec']['nodeName']}", second["spec"]["nodeName"] != node)
    log = t.ended()
    t.must(f"the drained pod ended with {t.code(name)}, and the job counts {failed} failures", t.code(name) == "75" and not failed)
    t.must(f"the log has job.ended with {log.of('job.ended')[0]['data']['exit_code']}", log.of("job.ended")[0]["data"]["exit_code"] == 75)
    t.continued(log, 1, 2)
    t.whole(log)


def kill(t, then=""):
    """A container that is killed starts again in its pod, and restores from shared memory."""
    rules = re.search(r"^restartPolicyRules: .*$", (MANIFESTS.parents[1] / "docs/howto/kubernetes.md").read_text(), re.M)[0]
    pods = t.start(lambda text: below(text, "- name: trainer", "  restartPolicy: Never", f"  {rules}"))
    index = len(pods) - 1
    name = pods[index]["metadata"]["name"]
    before = t.trains(pods[0], 1)
    node, process = t.process(pods[index])
    at = time.time()
    t.c.on(node, "sh", "-c", f"kill -9 {process}; {then}")
    t.trains(pods[0], 2)
    _, process = t.process(t.pod(index))
    started = t.c.started(node, process)
    log = t.ended()
    done = log.of("restore.completed", attempt=2)
    data = done[0]["data"]
    [saved] = log.of("checkpoint.committed", checkpoint=data["checkpoint"])
    # A value that all ranks have is saved once: ranks on another node read it from the file.
    t.must(f"restored from {data['tier']}: {data.get('slots', 0)} of {data['bytes']} bytes from slots, the checkpoint has {saved['data']['bytes']}",
           data["tier"] == "slots" or len(pods) > 1 and data.get("slots") == saved["data"]["bytes"])
    codes = " ".join(sorted({"137", "0" if t.work.ends else "75"}))
    t.must(f"the same pod had the exit codes {t.code(name)}", t.code(name) == codes and len(before.attempts()) == 1)
    begun, restored = seconds(log.of("restore.begun", attempt=2)[0]["time"]), seconds(done[0]["time"])
    # The workers of several pods start when all trainers are there, and import PyTorch first.
    took = restored - (started if t.kind is JOB else begun)
    t.must(f"{restored - at:.2f} s from SIGKILL to the end of the restore, {restored - started:.2f} s of them in the new container, {restored - begun:.2f} s for the restore alone",
           took <= 1)
    t.continued(log, 1, 2, lost=t.work.lost)
    t.whole(log)


def busy(t):
    """The same, where other processes have taken the killed container's number of namespace."""
    kill(t, "for i in 1 2 3 4 5 6; do setsid unshare --mount --pid --fork sleep 20 </dev/null >/dev/null 2>&1 & done")


def suspend(t):
    """A suspended job (kueue) ends within its grace, and continues."""
    pods = t.start(("runAsUser: 65532", f"runAsUser: {t.user}"), ("runAsGroup: 65532", f"runAsGroup: {t.user}"), ("fsGroup: 65532", f"fsGroup: {t.user}"))
    names = [p["metadata"]["name"] for p in pods]
    t.trains(pods[0], 1)
    began = time.monotonic()
    t.k("patch", t.kind.resource, "bert", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    wait("the pods have ended", 170, lambda: not t.pods())
    took = time.monotonic() - began
    t.must(f"suspended in {took:.1f} s, the grace is 160 s", took < 160)
    failed = t.failures()
    t.k("patch", t.kind.resource, "bert", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    t.trains(t.pod(other_than=names), 2)
    log = t.ended()
    t.must(f"as user {t.user}: exit code {log.of('job.ended')[0]['data']['exit_code']}, {failed} failures", log.of("job.ended")[0]["data"]["exit_code"] == 75 and not failed)
    t.continued(log, 1, 2)
    t.whole(log)


suspend.user = 23456


def cause(t):
    """The cause of the end is the message of the container."""
    t.apply(t.manifest(("--nproc, \"2\"", "--nproc, \"two\"")))
    job = wait("the job fails at once", 60, lambda: (j := t.job())["status"].get("failed") and any(c["type"] == "Failed" for c in j["status"].get("conditions", [])) and j)
    reason = [c["reason"] for c in job["status"]["conditions"] if c["type"] == "Failed"][0]
    state = json.loads(t.k("get", "pods", "-o", "json"))["items"][0]["status"]["containerStatuses"][0]["state"]["terminated"]
    t.must(f"exit code {state['exitCode']}, {reason}: {state.get('message', '').strip()}", state["exitCode"] == 64 and reason == "PodFailurePolicy" and "--nproc" in state.get("message", ""))
    t.k("delete", "job", "bert", "--wait=true", timeout=90)
    t.apply(t.manifest(("--nproc, \"2\"", "--nproc, \"2\", --max-restarts, \"0\""), ("backoffLimit: 3", "backoffLimit: 0"), (WORK, "--steps, lots")))
    job = wait("the job fails", 60, lambda: (j := t.job())["status"].get("failed") and j)
    state = json.loads(t.k("get", "pods", "-o", "json"))["items"][0]["status"]["containerStatuses"][0]["state"]["terminated"]
    t.must(f"exit code {state['exitCode']}: {state.get('message', '').strip()}", state["exitCode"] == 1 and "last output of rank" in state.get("message", "") and "lots" in state["message"])


def annotate(t):
    """The last commit is an annotation of the pod."""
    t.k("apply", "-f", MANIFESTS / "annotate.yaml")
    t.apply(t.manifest(
        ("automountServiceAccountToken: false", "serviceAccountName: trainer\n      automountServiceAccountToken: true"),
        ("[trainer, run, ", "[trainer, run, --annotate-pod, $(POD_NAME), "),
        ("        env:\n", "        env:\n        - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}\n"),
    ))
    pod = t.pod()
    name = pod["metadata"]["name"]

    def annotation():
        return json.loads(t.k("get", "pod", name, "-o", "json"))["metadata"].get("annotations", {}).get("ckptstore/last-commit")

    first = wait("the pod has the annotation", 60, annotation)
    second = wait("the annotation changes", 60, lambda: (a := annotation()) != first and a)
    log = t.ended()
    t.must(f"ckptstore/last-commit of {name}: {second}", json.loads(second)["checkpoint"] in log.commits(1) and json.loads(first)["checkpoint"] in log.commits(1))


def drained(t, pods):
    """Drain the node of the last of several pods."""
    names, node = [p["metadata"]["name"] for p in pods], pods[-1]["spec"]["nodeName"]
    began = time.monotonic()
    t.c.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=160s", timeout=170)
    took = time.monotonic() - began
    again = [t.pod(i, other_than=names) for i in range(len(pods))]
    t.trains(again[0], 2)
    failed = t.failures()
    t.c.kubectl("uncordon", node)
    log = t.ended()
    codes = [t.code(n) for n in names]
    t.must(f"pod {len(pods) - 1} was drained from {node} in {took:.1f} s: the pods ended with {' and '.join(codes)}, and {failed} failures were counted",
           set(codes) == {"75"} and not failed)
    t.continued(log, 1, 2)
    t.whole(log)


def pair(t):
    """When one of two pods is drained, both save, end with 75, and are replaced."""
    pods = t.start()
    t.trains(pods[0], 1)
    drained(t, pods)


def unbroken(t):
    """A training that nothing disturbs, whose losses the next ones must have."""
    t.start()
    log = t.ended()
    t.work.learn(t, log)
    t.whole(log)


def nodes(t):
    """Two pods wait for a late DNS. When one is drained, both save, end with 75, and are replaced."""
    t.c.script("dns", "stop")
    try:
        pods = t.start()
        time.sleep(6) # nothing to wait for: the name stays unknown
        waiting = t.k("logs", pods[1]["metadata"]["name"])
    finally:
        t.c.script("dns", "start")
    began = time.monotonic()
    t.trains(pods[0], 1)
    t.must(f"without DNS for 6 s, pod 1 waited ({(waiting.strip().splitlines() or [''])[-1][:90]}…); with it, two commits after {time.monotonic() - began:.1f} s",
           not t.code(pods[1]["metadata"]["name"]) and "msg" in waiting)
    drained(t, pods)


def out_of_service(t, node):
    t.c.kubectl("taint", "nodes", node, "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute", "--overwrite")


def in_service(t, node):
    """Wait until a node is ready and has no taint."""
    t.c.kubectl("taint", "nodes", node, "node.kubernetes.io/out-of-service-", check=False)
    wait(f"{node} is ready", 90, lambda: any(
        c["type"] == "Ready" and c["status"] == "True" for c in json.loads(t.c.kubectl("get", "node", node, "-o", "json"))["status"]["conditions"]))


def terminating(t, name):
    pods = {p["metadata"]["name"]: p for p in json.loads(t.k("get", "pods", "-o", "json"))["items"]}
    return name in pods and pods[name]["metadata"].get("deletionTimestamp")


def crash(t, index=1):
    """The node of pod 1 crashes. Its replacement joins the job, which continues."""
    pods = t.start()
    name, node = pods[index]["metadata"]["name"], pods[index]["spec"]["nodeName"]
    t.trains(pods[0], 1)
    began = time.monotonic()
    t.c.script("crash", node)
    try:
        wait("Kubernetes deletes the pod of the lost node", 120, lambda: terminating(t, name))
        t.told(f"Kubernetes deletes the pod {time.monotonic() - began:.0f} s after the crash")
        out_of_service(t, node)
        again = t.pod(index, other_than=[name], limit=120)
        t.trains(again if index == 0 else pods[0], 2)
        t.told(f"two commits of the next attempt {time.monotonic() - began:.0f} s after the crash")
    finally:
        t.c.script("boot", node)
        in_service(t, node)
    log = t.ended()
    if index:
        left = log.of("job.node_left", node=index, lost=True)
        t.must(f"node {index} lost: {left[0]['data']['reason'] if left else 'not recorded'}", left)
    t.continued(log, 1, 2, lost=t.work.lost)
    t.whole(log)


def coordinator(t):
    """The node of pod 0 crashes, which coordinates. Pod 1 waits for its replacement."""
    crash(t, index=0)


def outlived(t, node, process, pod):
    """Wait until the process of a pod on a node has ended, and print its last words."""
    words = ""

    def ask():
        nonlocal words
        words = t.c.on(node, "sh", "-c", f"tail -n 3 /var/log/pods/{t.name}_{pod}_*/{t.kind.container}/*.log", check=False) or words
        return not t.c.on(node, "cat", f"/proc/{process}/cmdline", check=False)

    wait("the old container has ended", 200, ask)
    for line in words.splitlines():
        t.told(f"the old trainer: {line.partition(' F ')[2][:180]}")


@contextlib.contextmanager
def cut_off(t, node):
    """Cut a node off, and connect it again at the end."""
    t.c.script("cut", node)
    try:
        yield
    finally:
        t.c.script("heal", node)
        t.c.kubectl("taint", "nodes", node, "node.kubernetes.io/out-of-service-", check=False)


def partition(t):
    """The node of pod 1 is cut off, and its trainer lives. When it is back, it commits nothing."""
    pods = t.start()
    name, node = pods[1]["metadata"]["name"], pods[1]["spec"]["nodeName"]
    t.trains(pods[0], 1)
    _, process = t.process(pods[1])
    began = time.monotonic()
    with cut_off(t, node):
        wait("Kubernetes deletes the pod of the lost node", 120, lambda: terminating(t, name))
        out_of_service(t, node)
        t.pod(1, other_than=[name], limit=120)
        t.trains(pods[0], 2)
        alive = t.c.on(node, "cat", f"/proc/{process}/cmdline").replace("\0", " ")
        t.must(f"{time.monotonic() - began:.0f} s after the cut attempt 2 commits, and on {node} there is still: {alive[:40]}…", "trainer run" in alive)
    outlived(t, node, process, name)
    ended = time.time()
    in_service(t, node)
    if not t.work.ends:
        t.trains(pods[0], 2, commits=len(t.ask(pods[0]).commits(2)) + 2)
    log = t.ended()
    later = [e for e in log.of("checkpoint.committed", attempt=2) if seconds(e["time"]) > ended]
    t.must(f"attempt 2 committed {len(later)} times after the end of the old trainer", later)
    t.continued(log, 1, 2, lost=t.work.lost)
    t.whole(log)


def fence(t):
    """The trainer of a served store is cut off, and lives. The next pod's attempt fences it off."""
    host, secret = "ckptstore", t.c.lab / "secret"
    secret.mkdir()
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", secret / "tls.key", "-out", secret / "tls.crt", "-days", "2",
                    "-subj", f"/CN={host}", "-addext", f"subjectAltName=DNS:{host}"], check=True, capture_output=True)
    shutil.copy(secret / "tls.crt", secret / "ca.crt")
    token = hashlib.sha256(os.urandom(32)).hexdigest()
    (secret / "token").write_text(token)
    (secret / "users").write_text(f"rosa reader {hashlib.sha256(b'rosa').hexdigest()}\n")
    t.k("create", "secret", "generic", "ckptstore", *(f"--from-file={secret / f}" for f in ("tls.crt", "tls.key", "ca.crt", "token", "users")))
    serve = t.c.kubectl("kustomize", str(MANIFESTS / "serve")).replace("registry.example/ckptstore:latest", t.c.image)
    # No kube-proxy: the name of the Service leads to the pod itself.
    serve = serve.replace("\nspec:\n  ports:\n", "\nspec:\n  clusterIP: None\n  ports:\n", 1)
    t.must("the Service of serve is headless here", "clusterIP: None" in serve)
    t.c.kubectl("cordon", "n1")
    t.apply(serve)
    t.k("rollout", "status", "deployment/ckptstore", "--timeout=90s", timeout=100)
    t.c.kubectl("uncordon", "n1")
    t.c.kubectl("cordon", "n2")
    job = t.manifest(
        ("--store, /ckpts/store", f"--store, tls://{host}:4222"),
        ("  template:\n    spec:\n", "  template:\n    metadata: {labels: {ckptstore-client: \"true\"}}\n    spec:\n"),
        ("        env:\n", "        env:\n        - {name: CKPTSTORE_TLS_CA, value: /ca/ca.crt}\n"
         "        - {name: CKPTSTORE_STORE_TOKEN, valueFrom: {secretKeyRef: {name: ckptstore, key: token}}}\n"),
        ("        volumeMounts:\n", "        volumeMounts:\n        - {name: ca, mountPath: /ca, readOnly: true}\n"),
        ("      volumes:\n", "      volumes:\n      - name: ca\n        secret: {secretName: ckptstore, items: [{key: ca.crt, path: ca.crt}]}\n"),
    )
    t.apply(job)
    first = t.pod()
    name, node = first["metadata"]["name"], first["spec"]["nodeName"]
    t.c.kubectl("uncordon", "n2")
    server = t.k("get", "pods", "-l", "app.kubernetes.io/name=ckptstore", "-o", "jsonpath={.items[0].metadata.name}")
    t.trains(server, 1)
    _, process = t.process(first)
    began, cut = time.monotonic(), time.time()
    with cut_off(t, node):
        wait("Kubernetes deletes the pod of the lost node", 120, lambda: terminating(t, name))
        out_of_service(t, node)
        second = t.pod(other_than=[name], limit=120)
        t.trains(server, 2)
        alive = t.c.on(node, "cat", f"/proc/{process}/cmdline").replace("\0", " ")
        t.must(f"{time.monotonic() - began:.0f} s after the cut of {node} attempt 2 commits on {second['spec']['nodeName']}, and on {node} there is still: {alive[:40]}…", "trainer run" in alive)
    outlived(t, node, process, name)
    in_service(t, node)
    t.trains(server, 2, commits=len(t.ask(server).commits(2)) + 2)
    t.k("delete", "job", "bert", "--wait=true", "--timeout=60s", timeout=90)
    wait("the trainers have ended", 120, lambda: len(json.loads(t.k("get", "pods", "-o", "json"))["items"]) == 1)
    t.k("delete", "deployment", "ckptstore", "--wait=true", timeout=90)
    wait("no pod is left", 120, lambda: not json.loads(t.k("get", "pods", "-o", "json"))["items"])
    log = t.read()
    t.continued(log, 1, 2, lost=100, cut=cut)
    t.whole(log)


class Row(typing.NamedTuple):
    """A case: what is done, with which manifest, and with PyTorch or with demo workers."""

    run: typing.Callable
    kind: Kind = JOB
    torch: bool = False


CASES = {f.__name__: Row(f) for f in (drain, kill, busy, suspend, cause, annotate)}
CASES |= {f.__name__: Row(f, NODES) for f in (nodes, crash, coordinator, partition)}
CASES["fence"] = Row(fence)
CASES |= {f"jobset-{name}": Row(f, JOBSET) for name, f in (("drain", pair), ("kill", kill), ("suspend", suspend), ("crash", crash), ("partition", partition))}
CASES["trainjob-drain"] = Row(pair, KUBEFLOW)
CASES |= {f"torch-{name}": Row(f, JOBSET, True) for name, f in (
    ("unbroken", unbroken), ("drain", pair), ("kill", kill), ("crash", crash), ("partition", partition), ("suspend", suspend))}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--kube", required=True, help="the directory of build.sh")
    p.add_argument("--image", required=True, help="an OCI image with both programs, as the release makes it")
    p.add_argument("--bin", required=True, help="a directory with ckptstore, to read stores")
    p.add_argument("--python", help="a virtual environment with PyTorch, for the cases that train with it")
    p.add_argument("case", nargs="*")
    o = p.parse_args()
    for name in o.case:
        if name not in CASES:
            p.error(f"no case {name}; there are {' '.join(CASES)}")
    for s in (signal.SIGTERM, signal.SIGINT):
        signal.signal(s, lambda number, frame: sys.exit(128 + number))
    work, cases, left = None, list(o.case or CASES), {}
    if any(CASES[name].torch for name in cases):
        if "torch-unbroken" not in cases:
            cases.insert(0, "torch-unbroken")
        try:
            work = Torch(o.python)
        except Missing as err:
            left = {name: str(err) for name in cases if CASES[name].torch}
    for name in cases:
        for program in (os.path.join(o.kube, "bin", each) for each in CASES[name].kind.programs):
            if not os.access(program, os.X_OK):
                left.setdefault(name, f"no {program}; run build.sh {o.kube}")
    cases = [name for name in cases if name not in left]
    began = time.monotonic()
    if not cases:
        print("not run: " + "; ".join(f"{name}: {why}" for name, why in left.items()))
        return 3
    cluster, wrong, up = Cluster(o.kube, o.image, o.bin, work.sees if work else ()), 0, False
    try:
        code, text = cluster.script("up", str(cluster.tar), check=False)
        print(text.strip(), flush=True)
        if code != 0:
            up = code == 3  # nothing was started
            return code if code == 3 else 1
        up = True
        print(f"a cluster of {cluster.image} after {time.monotonic() - began:.0f} s", flush=True)
        for name in cases:
            row, at = CASES[name], time.monotonic()
            case = Case(cluster, name, row.kind, work if row.torch else Demo())
            case.user = getattr(row.run, "user", case.user)
            print(f"{name}: {row.run.__doc__} {row.kind.file}{', PyTorch' if row.torch else ''}", flush=True)
            try:
                case.begin()
                row.run(case)
                print(f"passed {name} ({time.monotonic() - at:.0f} s)", flush=True)
            except (Wrong, subprocess.TimeoutExpired, KeyError, IndexError) as err:
                wrong += 1
                print(f"WRONG: {name}: {type(err).__name__}: {err}", flush=True)
                explain(case)
            cluster.kubectl("delete", "namespace", name, "--wait=false", check=False)
        for name, why in left.items():
            print(f"not run: {name}: {why}")
        missing = f", {len(left)} were not run" if left else ""
        print(f"{len(cases) - wrong} of {len(cases)} cases passed in {time.monotonic() - began:.0f} s{missing}", flush=True)
        return 1 if wrong else 3 if left else 0
    finally:
        cluster.close(keep=not up)


def explain(case):
    """Print what helps to find the cause of a failure."""
    for args in (("get", "pods", "-o", "wide"), ("describe", "pods"), ("get", "events", "--sort-by=.lastTimestamp")):
        print(case.k(*args, check=False)[-6000:])
    for p in case.k("get", "pods", "-o", "name", check=False).split():
        print(f"-- {p}\n{case.k('logs', '--tail=30', p, check=False)}")
    print(case.watch.read_text()[-3000:])
    case.k("delete", f"{case.kind.resource}s,deployments", "--all", "--wait=true", "--timeout=60s", timeout=90, check=False)
    case.c.kubectl("uncordon", "n1", "n2", check=False) # for the next case


if __name__ == "__main__":
    sys.exit(main())
