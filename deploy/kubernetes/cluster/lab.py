"""A cluster of cluster.sh, one case on it, and the log that judges the case."""

import datetime
import json
import os
import pathlib
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
import typing

HERE = pathlib.Path(__file__).resolve().parent
MANIFESTS = HERE.parent
WORK = "--steps, \"1000000\", --save-every, \"100\", --delay, 20ms"


class Wrong(Exception):
    """A case does not end as it must."""


class Kind(typing.NamedTuple):
    """A manifest, what it makes, and the controller that it needs besides Kubernetes' own."""

    file: str
    resource: str = "job"
    job: str = "bert"
    pods: int = 1
    programs: tuple[str, ...] = ()
    container: str = "trainer"

    @property
    def jobset(self):
        """Whether a JobSet makes the job."""
        return bool(self.programs)


JOB = Kind("job.yaml")
NODES = Kind("job-nodes.yaml", pods=2)
JOBSET = Kind("jobset.yaml", "jobset", "bert-node-0", pods=2, programs=("jobset",))
KUBEFLOW = Kind("kubeflow.yaml", "trainjob", "bert-node-0", pods=2, programs=("jobset", "trainer-controller-manager"), container="node")


def seconds(text):
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
        return max((e["data"]["iteration"] for e in self.of("report.metrics", attempt=attempt) if seconds(e["time"]) < before), default=0)

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


def below(text, line, *lines):
    """Insert lines below the only line of a manifest that is line, indented as it is."""
    at = re.findall(rf"^( *){re.escape(line)}\n", text, re.M)
    if len(at) != 1:
        raise Wrong(f"the manifest has {len(at)} lines {line!r}, not 1")
    return re.sub(rf"^ *{re.escape(line)}\n", lambda found: found[0] + "".join(f"{at[0]}{new}\n" for new in lines), text, flags=re.M)


class Cluster:
    """The cluster. Its hosts see the directories sees of this machine below /machine."""

    def __init__(self, kube, image, bin, sees=()):
        self.kube, self.bin = pathlib.Path(kube).resolve(), pathlib.Path(bin).resolve()
        self.tar = pathlib.Path(image).resolve()
        self.image = name_of(self.tar)
        self.lab = pathlib.Path(tempfile.mkdtemp(prefix="kube-"))
        self.lab.chmod(0o711) # the user of the pods reads stores below it
        self.env = dict(os.environ, KUBE=str(self.kube), LAB=str(self.lab), SEES="\n".join(sees))
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

    def close(self, keep=False):
        """End the cluster. With keep, its directory stays, which has the logs of its programs."""
        for w in self.watches:
            w.kill()
            w.wait()
        self.script("down", check=False)
        if not keep:
            shutil.rmtree(self.lab, ignore_errors=True)


def name_of(tar):
    """Return the name of the image in a tar file."""
    with tarfile.open(tar) as t:
        index = json.load(t.extractfile("index.json"))
    return index["manifests"][0]["annotations"]["io.containerd.image.name"]


def wait(what, limit, ask):
    """Return the first true answer. A busy machine is asked less often."""
    end = time.monotonic() + limit
    while True:
        asked = time.monotonic()
        answer = ask()
        if answer:
            return answer
        now = time.monotonic()
        if now > end:
            raise Wrong(f"timed out after {limit} s: {what}")
        time.sleep(max(0.3, now - asked))


class Demo:
    """The demo workers of the image. They train until a stop request."""

    lost = 100 # steps after the last commit
    ends = False
    patience = 90

    def change(self, text):
        return text

    def judge(self, t, log):
        """There is nothing to compare."""


class Case:
    """A case has a namespace and a store of its own."""

    user = 65532

    def __init__(self, cluster, name, kind=JOB, work=Demo()):
        self.c, self.name, self.kind, self.work = cluster, name, kind, work
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

    def manifest(self, *changes):
        """Return the manifest with the image of this tree, and with a run that lasts.

        A change is a text and what replaces it, or a function of the whole text.
        """
        text = (MANIFESTS / self.kind.file).read_text()
        for change in (
            ("registry.example/ckptstore:latest", self.c.image),
            ('--steps, "100000", --save-every, "1000"', WORK),
            ('requests: {cpu: "1", memory: 2Gi}', 'requests: {cpu: 100m, memory: 256Mi}'), # two nodes are one machine
            self.work.change,
            *changes,
        ):
            if callable(change):
                text = change(text)
                continue
            old, new = change
            if old not in text:
                raise Wrong(f"{self.kind.file} has no {old!r}")
            text = text.replace(old, new)
        return text

    def apply(self, text):
        self.k("apply", "-f", "-", input=text)

    def start(self, *changes):
        """Start the run, and return its pods: each on a node of its own."""
        self.apply(self.manifest(*changes))
        pods = [self.pod(i) for i in range(self.kind.pods)]
        where = [p["spec"]["nodeName"] for p in pods]
        if len(pods) > 1:
            self.must(", ".join(f"pod {i} on {node}" for i, node in enumerate(where)), len(set(where)) == len(pods))
        return pods

    def pods(self):
        """Return the pods that have not ended."""
        found = json.loads(self.k("get", "pods", "-o", "json"))["items"]
        return [p for p in found if p["status"]["phase"] in ("Pending", "Running")]

    def pod(self, index=0, other_than=(), limit=90):
        """Return the running pod of an index that has none of the given names."""
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

    def trains(self, pod, attempt, commits=2):
        """Wait until an attempt has committed, and return the log."""
        def ask():
            log = self.ask(pod)
            return log if len(log.commits(attempt)) >= commits else None
        return wait(f"attempt {attempt} commits {commits} times", self.work.patience, ask)

    def ended(self):
        """Delete the jobs, after the last step if they have one, and return the log of the store."""
        if self.work.ends:
            wait("the job has completed", 2 * self.work.patience, lambda: self.job()["status"].get("succeeded", 0) == self.kind.pods)
            if self.kind.jobset:
                wait("the JobSet has completed", 30, lambda: self.jobset().get("terminalState") == "Completed")
        self.k("delete", f"{self.kind.resource}s", "--all", "--wait=true", "--timeout=60s", timeout=90)
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
        return json.loads(self.k("get", "job", self.kind.job, "-o", "json"))

    def jobset(self):
        """Return the state of the JobSet."""
        return json.loads(self.k("get", "jobset", "bert", "-o", "json")).get("status", {})

    def failures(self):
        """Return how many failures the job counts, and how many restarts a JobSet counts."""
        restarts = self.jobset().get("restarts", 0) if self.kind.jobset else 0
        return self.job()["status"].get("failed", 0) + restarts

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
        self.must(f"attempt {old} reported {trained} steps and lost {max(0, trained - kept)} (at most {lost})", trained - kept <= lost)

    def whole(self, log):
        late = log.fenced()
        self.must(": ".join([f"{len(late)} commits of an old attempt after the start of the next", *late]), not late)
        self.command("ckptstore", "verify", "--store", self.store, "--log")
        listed = self.command("ckptstore", "ls", "bert", "--store", self.store, "--output", "jsonl").splitlines()
        commits = sum(len(log.commits(a)) for a in log.attempts())
        self.must(f"ckptstore verify --log: exit code 0; ls lists {len(listed)} checkpoints, the log has {commits} commits", len(listed) == commits)
        self.work.judge(self, log)

    def code(self, pod):
        """Return the exit codes that the API server has shown for a pod, sorted."""
        found = re.findall(rf"^{re.escape(pod)} .* code=(\d*) last=(\d*)", self.watch.read_text(), re.M)
        return " ".join(sorted({code for codes in found for code in codes if code}))
