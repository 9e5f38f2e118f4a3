#!/usr/bin/env python3
"""Runs the manifests of deploy/kubernetes on the cluster of cluster.sh, and judges each case by
the log of its store.

    check.py --kube DIR --image TAR --bin DIR [CASE…]

Without cases it runs all. Exit code 1: a case is wrong. 3: this machine cannot run a cluster;
the last line has the reason.
"""

import argparse
import datetime
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
MANIFESTS = HERE.parent
WORK = "--steps, \"1000000\", --save-every, \"100\", --delay, 20ms"


class Wrong(Exception):
    """A case does not end as it must."""


def parse(text):
    """Return the time of an event, in seconds."""
    whole, _, fraction = text.rstrip("Z").partition(".")
    at = datetime.datetime.fromisoformat(whole + "+00:00").timestamp()
    return at + float("0." + (fraction or "0"))


class Log:
    """The events of a run, in their order."""

    def __init__(self, text):
        self.events = [json.loads(line) for line in text.splitlines() if line.startswith("{")]

    def of(self, kind, **match):
        """Return the events of a kind whose bodies have the given values."""
        found = []
        for e in self.events:
            if f".{kind}." in e["type"] and all(e["data"].get(k) == v for k, v in match.items()):
                found.append(e)
        return found

    def commits(self, attempt):
        return [e["data"]["checkpoint"] for e in self.of("checkpoint.committed", attempt=attempt)]

    def attempts(self):
        return [e["data"]["attempt"] for e in self.of("group.started")]

    def trained(self, attempt, before=float("inf")):
        """Return the last iteration that an attempt reported, of those that ended before a time."""
        return max((e["data"]["iteration"] for e in self.of("report.metrics", attempt=attempt) if parse(e["time"]) < before), default=0)

    def fenced(self):
        """Return the commits of attempts that a later one had already followed."""
        newest, late = 0, []
        for e in self.events:
            if ".group.started." in e["type"]:
                newest = max(newest, e["data"]["attempt"])
            if ".checkpoint.committed." in e["type"] and e["data"]["attempt"] < newest:
                late.append(e["data"]["checkpoint"])
        return late


def step(checkpoint):
    return int(re.match(r"step-(\d+)\.", checkpoint)[1])


class Cluster:
    def __init__(self, kube, image, bin):
        self.kube, self.bin = pathlib.Path(kube).resolve(), pathlib.Path(bin).resolve()
        self.tar = pathlib.Path(image).resolve()
        self.image = name_of(self.tar)
        self.lab = pathlib.Path(tempfile.mkdtemp(prefix="kube-"))
        self.lab.chmod(0o711) # the user of the pods reads stores below it
        self.env = dict(os.environ, KUBE=str(self.kube), LAB=str(self.lab))
        self.watches = []

    def script(self, *args, timeout=300, check=True):
        # A file, not a pipe: the programs that the script starts keep it open.
        with tempfile.TemporaryFile("w+") as out:
            code = subprocess.run([HERE / "cluster.sh", *args], env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, timeout=timeout).returncode
            out.seek(0)
            text = out.read()
        if check and code != 0:
            print(text)
            raise Wrong(f"cluster.sh {args[0]} ended with {code}")
        return code, text

    def kubectl(self, *args, input=None, timeout=60, check=True):
        done = subprocess.run(
            ["nsenter", "--net=/run/netns/kube-ctl", self.kube / "bin/kubectl", "--kubeconfig", self.lab / "etc/admin.kubeconfig", *args],
            input=input, capture_output=True, text=True, timeout=timeout, env=dict(os.environ, HOME=str(self.lab)),
        )
        if check and done.returncode != 0:
            raise Wrong(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
        return done.stdout if done.returncode == 0 else ""

    def on(self, host, *args, check=True):
        done = subprocess.run([HERE / "cluster.sh", "on", host, *args], env=self.env, capture_output=True, text=True, timeout=60)
        if check and done.returncode != 0:
            raise Wrong(f"on {host}: {' '.join(args)}: {done.stderr.strip()}")
        return done.stdout

    def started(self, host, process):
        """Return when a process of a host has started, in seconds, by the kernel's ticks of 10 ms."""
        ticks = int(self.on(host, "cat", f"/proc/{process}/stat").rpartition(")")[2].split()[19])
        uptime = float(pathlib.Path("/proc/uptime").read_text().split()[0])
        return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")

    def close(self):
        for w in self.watches:
            w.kill()
            w.wait()
        self.script("down", check=False)
        shutil.rmtree(self.lab, ignore_errors=True)


def name_of(tar):
    """Return the name of the image in a tar file."""
    with tarfile.open(tar) as t:
        index = json.load(t.extractfile("index.json"))
    return index["manifests"][0]["annotations"]["io.containerd.image.name"]


def wait(what, limit, ask):
    """Return the first true answer."""
    end = time.monotonic() + limit
    while True:
        answer = ask()
        if answer:
            return answer
        if time.monotonic() > end:
            raise Wrong(f"timed out after {limit} s: {what}")
        time.sleep(0.3)


class Case:
    """A case has a namespace and a store of its own."""

    user = 65532

    def __init__(self, cluster, name):
        self.c, self.name = cluster, name
        self.dir = cluster.lab / "shared" / name
        self.store = self.dir / "store"
        self.watch = pathlib.Path(os.devnull)

    def k(self, *args, **options):
        return self.c.kubectl("-n", self.name, *args, **options)

    def begin(self):
        self.dir.mkdir()
        os.chown(self.dir, self.user, self.user)
        self.c.kubectl("create", "namespace", self.name)
        # The claim of claim.yaml asks for no class: this volume is bound to it.
        self.k("apply", "-f", "-", input=json.dumps({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": self.name},
            "spec": {
                "capacity": {"storage": "100Gi"}, "accessModes": ["ReadWriteMany"], "hostPath": {"path": str(self.dir)},
                "claimRef": {"namespace": self.name, "name": "ckpts"},
            },
        }))
        self.k("apply", "-f", MANIFESTS / "claim.yaml")
        path = self.c.lab / "log" / f"pods.{self.name}.txt"
        fields = (
            '{.metadata.name}{" node="}{.spec.nodeName}{" phase="}{.status.phase}{" restarts="}{.status.containerStatuses[0].restartCount}'
            '{" code="}{.status.containerStatuses[0].state.terminated.exitCode}{" last="}{.status.containerStatuses[0].lastState.terminated.exitCode}'
            '{" message="}{.status.containerStatuses[0].state.terminated.message}{"\\n"}'
        )
        self.watch = path
        self.c.watches.append(subprocess.Popen(
            ["nsenter", "--net=/run/netns/kube-ctl", self.c.kube / "bin/kubectl", "--kubeconfig", self.c.lab / "etc/admin.kubeconfig",
             "-n", self.name, "get", "pods", "--watch", "-o", "jsonpath=" + fields],
            stdout=open(path, "w"), stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
        ))

    def manifest(self, file, *changes):
        """Return a manifest with the image of this tree, and with a run that lasts."""
        text = (MANIFESTS / file).read_text()
        for old, new in (
            ("docker.io/ckptstore/ckptstore:latest", self.c.image),
            ('--steps, "100000", --save-every, "1000"', WORK),
            ('requests: {cpu: "1", memory: 2Gi}', 'requests: {cpu: 100m, memory: 256Mi}'), # two nodes are one machine
            *changes,
        ):
            if old not in text:
                raise Wrong(f"{file} has no {old!r}")
            text = text.replace(old, new)
        return text

    def apply(self, text):
        self.k("apply", "-f", "-", input=text)

    def pods(self):
        """Return the pods that have not ended."""
        found = json.loads(self.k("get", "pods", "-o", "json"))["items"]
        return [p for p in found if p["status"]["phase"] in ("Pending", "Running")]

    def pod(self, index=0, other_than=(), limit=90):
        """Return the running pod of an index."""
        def ask():
            for p in self.pods():
                if p["metadata"]["labels"].get("batch.kubernetes.io/job-completion-index") != str(index):
                    continue
                if p["metadata"]["name"] in other_than or p["metadata"].get("deletionTimestamp") or p["status"]["phase"] != "Running":
                    continue
                if all(s["ready"] for s in p["status"].get("containerStatuses", [{"ready": False}])):
                    return p
            return None
        return wait(f"pod {index} runs", limit, ask)

    def ask(self, pod):
        """Return the log, as a command in a pod prints it."""
        name = pod if isinstance(pod, str) else pod["metadata"]["name"]
        return Log(self.k("exec", name, "--", "ckptstore", "events", "bert", "--store", "/ckpts/store", "--json", check=False))

    def trains(self, pod, attempt, commits=2, limit=90):
        """Wait until an attempt has committed, and return the log."""
        def ask():
            log = self.ask(pod)
            return log if len(log.commits(attempt)) >= commits else None
        return wait(f"attempt {attempt} commits {commits} times", limit, ask)

    def ended(self):
        """Delete the jobs, and return the log of the store."""
        self.k("delete", "jobs", "--all", "--wait=true", "--timeout=60s", timeout=90)
        wait("no pod is left", 120, lambda: not json.loads(self.k("get", "pods", "-o", "json"))["items"])
        return self.read()

    def read(self):
        return Log(self.command("ckptstore", "events", "bert", "--store", self.store, "--json"))

    def command(self, *args):
        """Run a command as the user of the pods."""
        user = str(self.user)
        with tempfile.TemporaryDirectory(prefix="kube-", dir="/tmp") as sockets: # of short paths
            os.chown(sockets, self.user, self.user)
            done = subprocess.run(
                ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", self.c.bin / args[0], *args[1:]],
                capture_output=True, text=True, timeout=60, env={"HOME": sockets, "TMPDIR": sockets, "PATH": os.environ["PATH"]},
            )
        if done.returncode != 0:
            raise Wrong(f"{' '.join(map(str, args))}: exit code {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def job(self):
        return json.loads(self.k("get", "job", "bert", "-o", "json"))

    def process(self, pod):
        """Return the process of a pod's container, by its number on the node."""
        node, id = pod["spec"]["nodeName"], pod["status"]["containerStatuses"][0]["containerID"].partition("://")[2]
        for line in self.c.on(node, "ctr", "-n", "k8s.io", "task", "ls").splitlines():
            if line.startswith(id):
                return node, line.split()[1]
        raise Wrong(f"{node} has no task {id}")

    def told(self, what):
        print(f"  {self.name}: {what}", flush=True)

    def must(self, what, holds):
        """Print a statement, and fail if it does not hold."""
        if not holds:
            raise Wrong(what)
        self.told(what)

    def continued(self, log, old, new, lost=0, cut=float("inf")):
        """An attempt continued from the last commit of another one, which was cut off at a time."""
        commits = log.commits(old)
        started = log.of("group.started", attempt=new)
        if not commits or not started:
            raise Wrong(f"attempt {old} has {len(commits)} commits, attempt {new} {'has' if started else 'has not'} started")
        resume = started[0]["data"].get("resume", "")
        trained, kept = log.trained(old, before=cut), step(commits[-1])
        if log.trained(old) > trained:
            self.told(f"attempt {old} trained on without the log, to step {log.trained(old)}")
        self.must(f"attempt {new} continued from {resume or 'nothing'}, the last commit of attempt {old} is {commits[-1]}", resume == commits[-1])
        self.must(f"attempt {old} reported {trained} steps, of which {max(0, trained - kept)} are lost (at most {lost})", trained - kept <= lost)

    def whole(self, log):
        late = log.fenced()
        self.must(": ".join([f"{len(late)} commits of an old attempt after the start of the next", *late]), not late)
        self.command("ckptstore", "verify", "--store", self.store, "--log")
        listed = self.command("ckptstore", "ls", "bert", "--store", self.store, "--output", "jsonl").splitlines()
        commits = sum(len(log.commits(a)) for a in log.attempts())
        self.must(f"ckptstore verify --log: exit code 0; ls lists {len(listed)} checkpoints, the log has {commits} commits", len(listed) == commits)

    def code(self, pod):
        """Return the exit codes that the API server has shown for a pod, sorted."""
        found = re.findall(rf"^{re.escape(pod)} .* code=(\d*) last=(\d*)", self.watch.read_text(), re.M)
        return " ".join(sorted({code for codes in found for code in codes if code}))


def drain(t):
    """A drained pod saves, ends with 75, and continues on the other node."""
    t.apply(t.manifest("job.yaml"))
    first = t.pod()
    name, node = first["metadata"]["name"], first["spec"]["nodeName"]
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
    failed = t.job()["status"].get("failed", 0)
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
    t.apply(t.manifest("job.yaml", (
        "      - name: trainer\n        image:",
        "      - name: trainer\n        restartPolicy: Never\n"
        f"        {rules}\n        image:",
    )))
    pod = t.pod()
    name = pod["metadata"]["name"]
    before = t.trains(pod, 1)
    node, process = t.process(pod)
    at = time.time()
    t.c.on(node, "sh", "-c", f"kill -9 {process}; {then}")
    t.trains(name, 2)
    _, process = t.process(t.pod())
    started = t.c.started(node, process)
    log = t.ended()
    done = log.of("restore.completed", attempt=2)
    t.must(f"restored from {done[0]['data']['tier']}", done[0]["data"]["tier"] == "slots")
    t.must(f"the same pod had the exit codes {t.code(name)}", t.code(name) == "137 75" and len(before.attempts()) == 1)
    restored = parse(done[0]["time"])
    t.must(f"{restored - at:.2f} s from SIGKILL to the end of the restore, {restored - started:.2f} s of them in the new container (at most 1)", restored - started <= 1)
    t.continued(log, 1, 2, lost=100)
    t.whole(log)


def busy(t):
    """The same, where other processes have taken the killed container's number of namespace."""
    kill(t, "for i in 1 2 3 4 5 6; do setsid unshare --mount --pid --fork sleep 20 </dev/null >/dev/null 2>&1 & done")


def suspend(t):
    """A suspended job (kueue) ends within its grace, and continues."""
    t.apply(t.manifest("job.yaml", ("runAsUser: 65532", f"runAsUser: {t.user}"), ("runAsGroup: 65532", f"runAsGroup: {t.user}"), ("fsGroup: 65532", f"fsGroup: {t.user}")))
    first = t.pod()
    name = first["metadata"]["name"]
    t.trains(first, 1)
    began = time.monotonic()
    t.k("patch", "job", "bert", "-p", '{"spec":{"suspend":true}}')
    wait("the pods have ended", 170, lambda: not t.pods())
    took = time.monotonic() - began
    t.must(f"suspended in {took:.1f} s, the grace is 160 s", took < 160)
    failed = t.job()["status"].get("failed", 0)
    t.k("patch", "job", "bert", "-p", '{"spec":{"suspend":false}}')
    t.trains(t.pod(other_than=[name]), 2)
    log = t.ended()
    t.must(f"as user {t.user}: exit code {log.of('job.ended')[0]['data']['exit_code']}, {failed} failures", log.of("job.ended")[0]["data"]["exit_code"] == 75 and not failed)
    t.continued(log, 1, 2)
    t.whole(log)


suspend.user = 23456


def cause(t):
    """The cause of the end is the message of the container."""
    t.apply(t.manifest("job.yaml", ("--nproc, \"2\"", "--nproc, \"two\"")))
    job = wait("the job fails at once", 60, lambda: (j := t.job())["status"].get("failed") and any(c["type"] == "Failed" for c in j["status"].get("conditions", [])) and j)
    reason = [c["reason"] for c in job["status"]["conditions"] if c["type"] == "Failed"][0]
    state = json.loads(t.k("get", "pods", "-o", "json"))["items"][0]["status"]["containerStatuses"][0]["state"]["terminated"]
    t.must(f"exit code {state['exitCode']}, {reason}: {state.get('message', '').strip()}", state["exitCode"] == 64 and reason == "PodFailurePolicy" and "--nproc" in state.get("message", ""))
    t.k("delete", "job", "bert", "--wait=true", timeout=90)
    t.apply(t.manifest("job.yaml", ("--nproc, \"2\"", "--nproc, \"2\", --max-restarts, \"0\""), ("backoffLimit: 3", "backoffLimit: 0"), (WORK, "--steps, lots")))
    job = wait("the job fails", 60, lambda: (j := t.job())["status"].get("failed") and j)
    state = json.loads(t.k("get", "pods", "-o", "json"))["items"][0]["status"]["containerStatuses"][0]["state"]["terminated"]
    t.must(f"exit code {state['exitCode']}: {state.get('message', '').strip()}", state["exitCode"] == 1 and "last output of rank" in state.get("message", "") and "lots" in state["message"])


def annotate(t):
    """The last commit is an annotation of the pod."""
    t.k("apply", "-f", MANIFESTS / "annotate.yaml")
    t.apply(t.manifest(
        "job.yaml", ("automountServiceAccountToken: false", "serviceAccountName: trainer\n      automountServiceAccountToken: true"),
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


def two(t, *changes):
    """Start the job of two pods, one on each node, and return the pods."""
    t.apply(t.manifest("job-nodes.yaml", *changes))
    pods = [t.pod(0), t.pod(1)]
    where = [p["spec"]["nodeName"] for p in pods]
    t.must(f"pod 0 on {where[0]}, pod 1 on {where[1]}", len(set(where)) == 2)
    return pods


def nodes(t):
    """Two pods wait for a late DNS. When one is drained, both save, end with 75, and are replaced."""
    t.c.script("dns", "stop")
    try:
        pods = two(t)
        time.sleep(6) # nothing to wait for: the name stays unknown
        waiting = t.k("logs", pods[1]["metadata"]["name"])
    finally:
        t.c.script("dns", "start")
    began = time.monotonic()
    t.trains(pods[0], 1)
    t.must(f"without DNS for 6 s, pod 1 waited ({(waiting.strip().splitlines() or [''])[-1][:90]}…); with it, two commits after {time.monotonic() - began:.1f} s",
           not t.code(pods[1]["metadata"]["name"]) and "msg" in waiting)
    names, node = [p["metadata"]["name"] for p in pods], pods[1]["spec"]["nodeName"]
    t.c.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=160s", timeout=170)
    again = [t.pod(i, other_than=names) for i in (0, 1)]
    t.trains(again[0], 2)
    failed = t.job()["status"].get("failed", 0)
    t.c.kubectl("uncordon", node)
    log = t.ended()
    codes = [t.code(n) for n in names]
    t.must(f"pod 1 was drained from {node}: both ended with {' and '.join(codes)}, the job counts {failed} failures", codes == ["75", "75"] and not failed)
    t.continued(log, 1, 2)
    t.whole(log)


def out_of_service(t, node):
    t.c.kubectl("taint", "nodes", node, "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute", "--overwrite")


def in_service(t, node):
    """Wait until a node is ready, of which the taint is gone."""
    t.c.kubectl("taint", "nodes", node, "node.kubernetes.io/out-of-service-", check=False)
    wait(f"{node} is ready", 90, lambda: any(
        c["type"] == "Ready" and c["status"] == "True" for c in json.loads(t.c.kubectl("get", "node", node, "-o", "json"))["status"]["conditions"]))


def terminating(t, name):
    pods = {p["metadata"]["name"]: p for p in json.loads(t.k("get", "pods", "-o", "json"))["items"]}
    return name in pods and pods[name]["metadata"].get("deletionTimestamp")


def crash(t, index=1):
    """The node of pod 1 crashes. Its replacement joins the job, which continues."""
    pods = two(t)
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
    t.continued(log, 1, 2, lost=100)
    t.whole(log)


def coordinator(t):
    """The node of pod 0 crashes, which coordinates. Pod 1 waits for its replacement."""
    crash(t, index=0)


def outlived(t, node, process, pod):
    """Wait until the process of a pod on a node has ended, and print its last words."""
    words = ""

    def ask():
        nonlocal words
        words = t.c.on(node, "sh", "-c", f"tail -n 3 /var/log/pods/{t.name}_{pod}_*/trainer/*.log", check=False) or words
        return not t.c.on(node, "cat", f"/proc/{process}/cmdline", check=False)

    wait("the old container has ended", 200, ask)
    for line in words.splitlines():
        t.told(f"the old trainer: {line.partition(' F ')[2][:180]}")


def partition(t):
    """The node of pod 1 is cut off, and its trainer lives. When it is back, it commits nothing."""
    pods = two(t)
    name, node = pods[1]["metadata"]["name"], pods[1]["spec"]["nodeName"]
    t.trains(pods[0], 1)
    _, process = t.process(pods[1])
    began = time.monotonic()
    t.c.script("cut", node)
    try:
        wait("Kubernetes deletes the pod of the lost node", 120, lambda: terminating(t, name))
        out_of_service(t, node)
        t.pod(1, other_than=[name], limit=120)
        t.trains(pods[0], 2)
        alive = t.c.on(node, "cat", f"/proc/{process}/cmdline").replace("\0", " ")
        t.must(f"{time.monotonic() - began:.0f} s after the cut attempt 2 commits, and on {node} there is still: {alive[:40]}…", "trainer run" in alive)
    finally:
        t.c.script("heal", node)
        t.c.kubectl("taint", "nodes", node, "node.kubernetes.io/out-of-service-", check=False)
    outlived(t, node, process, name)
    in_service(t, node)
    t.trains(pods[0], 2, commits=len(t.ask(pods[0]).commits(2)) + 2)
    log = t.ended()
    t.continued(log, 1, 2, lost=100)
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
    serve = t.c.kubectl("kustomize", str(MANIFESTS / "serve")).replace("docker.io/ckptstore/ckptstore:latest", t.c.image)
    # No kube-proxy: the name of the Service leads to the pod itself.
    serve = serve.replace("kind: Service\n", "kind: Service\n", 1).replace("\nspec:\n  ports:\n", "\nspec:\n  clusterIP: None\n  ports:\n", 1)
    t.must("the Service of serve is headless here", "clusterIP: None" in serve)
    t.c.kubectl("cordon", "n1")
    t.apply(serve)
    t.k("rollout", "status", "deployment/ckptstore", "--timeout=90s", timeout=100)
    t.c.kubectl("uncordon", "n1")
    t.c.kubectl("cordon", "n2")
    job = t.manifest(
        "job.yaml", ("--store, /ckpts/store", f"--store, tls://{host}:4222"),
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
    t.c.script("cut", node)
    try:
        wait("Kubernetes deletes the pod of the lost node", 120, lambda: terminating(t, name))
        out_of_service(t, node)
        second = t.pod(other_than=[name], limit=120)
        t.trains(server, 2)
        alive = t.c.on(node, "cat", f"/proc/{process}/cmdline").replace("\0", " ")
        t.must(f"{time.monotonic() - began:.0f} s after the cut of {node} attempt 2 commits on {second['spec']['nodeName']}, and on {node} there is still: {alive[:40]}…", "trainer run" in alive)
    finally:
        t.c.script("heal", node)
        t.c.kubectl("taint", "nodes", node, "node.kubernetes.io/out-of-service-", check=False)
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


CASES = {f.__name__: f for f in (drain, kill, busy, suspend, cause, annotate, nodes, crash, coordinator, partition, fence)}


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--kube", required=True, help="the directory of build.sh")
    p.add_argument("--image", required=True, help="an OCI image with both programs, as the release makes it")
    p.add_argument("--bin", required=True, help="a directory with ckptstore, to read stores")
    p.add_argument("case", nargs="*")
    o = p.parse_args()
    for name in o.case:
        if name not in CASES:
            p.error(f"no case {name}; there are {' '.join(CASES)}")
    for s in (signal.SIGTERM, signal.SIGINT):
        signal.signal(s, lambda number, frame: sys.exit(128 + number))
    began = time.monotonic()
    cluster, wrong = Cluster(o.kube, o.image, o.bin), 0
    try:
        code, text = cluster.script("up", str(cluster.tar), check=False)
        print(text.strip(), flush=True)
        if code != 0:
            return code if code == 3 else 1
        print(f"a cluster of {cluster.image} after {time.monotonic() - began:.0f} s", flush=True)
        for name in o.case or CASES:
            case, at = Case(cluster, name), time.monotonic()
            case.user = getattr(CASES[name], "user", case.user)
            print(f"{name}: {CASES[name].__doc__}", flush=True)
            try:
                case.begin()
                CASES[name](case)
                print(f"passed {name} ({time.monotonic() - at:.0f} s)", flush=True)
            except (Wrong, subprocess.TimeoutExpired, KeyError, IndexError) as err:
                wrong += 1
                print(f"WRONG: {name}: {type(err).__name__}: {err}", flush=True)
                explain(case)
            cluster.kubectl("delete", "namespace", name, "--wait=false", check=False)
        print(f"{len(o.case or CASES) - wrong} of {len(o.case or CASES)} cases passed in {time.monotonic() - began:.0f} s", flush=True)
        return 1 if wrong else 0
    finally:
        cluster.close()


def explain(case):
    """Print what helps to find the cause of a failure."""
    for args in (("get", "pods", "-o", "wide"), ("describe", "pods"), ("get", "events", "--sort-by=.lastTimestamp")):
        print(case.k(*args, check=False)[-6000:])
    for p in case.k("get", "pods", "-o", "name", check=False).split():
        print(f"-- {p}\n{case.k('logs', '--tail=30', p, check=False)}")
    print(case.watch.read_text()[-3000:])
    case.k("delete", "jobs,deployments", "--all", "--wait=true", "--timeout=60s", timeout=90, check=False)
    case.c.kubectl("uncordon", "n1", "n2", check=False) # for the next case


if __name__ == "__main__":
    sys.exit(main())
