"""Kills a rank, a raylet and a host of a Ray cluster of two hosts with two ranks each.

    ray_kills.py [CASE…]      rank, raylet, host, preempted; all by default

Each training ends with the weights of a training to which nothing happened. At each point, Ray's
pointers are those of committed checkpoints, and tags are those of pointers. The head of the
cluster is a third host, with Ray's controller and the driver. The hosts are namespaces of
this machine: see hosts.py. Needs 5 GB of memory.

Exit code 1: a case is wrong. 3: this machine cannot run them; the last line has the reason.
"""

from __future__ import annotations

import json
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import threading
import time
import unittest
from typing import Any

try:
    import ray.train  # noqa: F401
    import torch  # noqa: F401
except ImportError as error:
    print(f"not run: killed hosts under Ray: {error}")
    sys.exit(3)

from hosts import Hosts, missing
from jobs import DEADLINE, SOURCES, program
from test_ray import HERE, Ray

PORT = 6379
# Fixed ports: on a busy machine, a raylet gives up before its agents have written theirs.
PORTS = ["--dashboard-agent-grpc-port=52001", "--dashboard-agent-listen-port=52002", "--runtime-env-agent-port=52003", "--metrics-export-port=52004"]
LIMIT = 3 * DEADLINE  # seconds for a training


class Kills(Ray):
    """Trainings on one cluster, in the order of their names."""

    ranks = 4
    unharmed = ""  # digest of the weights of a training that nothing happened to
    cluster: Hosts
    most = 0  # bytes of memory of the cluster

    @classmethod
    def setUpClass(cls) -> None:
        import tempfile

        cls.shared = pathlib.Path(tempfile.mkdtemp(prefix="ckptstore-ray-"))
        cls.token = secrets.token_hex(32)
        cls.cluster = Hosts(cls.shared, ["head", "n1", "n2"])
        cls.addClassCleanup(cls.down)
        began = time.monotonic()
        cls.ray("head", "--head", f"--port={PORT}", "--num-cpus=1", "--include-dashboard=false", "--temp-dir=/run/ray")
        ups = [threading.Thread(target=cls.join, args=(name,)) for name in ("n1", "n2")]
        for up in ups:
            up.start()
        for up in ups:
            up.join()
        told(f"a head and two hosts after {time.monotonic() - began:.1f} s")
        cls.ended = threading.Event()
        cls.sampler = threading.Thread(target=cls.sample)
        cls.sampler.start()

    @classmethod
    def down(cls) -> None:
        import shutil

        if hasattr(cls, "ended"):
            cls.ended.set()
            cls.sampler.join()
            told(f"the cluster took {cls.most / 1e9:.2f} GB of memory at most")
        cls.cluster.close()
        shutil.rmtree(cls.shared, ignore_errors=True)

    @classmethod
    def sample(cls) -> None:
        while not cls.ended.wait(3):
            try:
                cls.most = max(cls.most, cls.cluster.memory())
            except OSError:
                continue  # a host has crashed

    @classmethod
    def environment(cls) -> dict[str, str]:
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "CKPTSTORE_"))},
            "PYTHONPATH": os.pathsep.join([str(SOURCES), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]), "PYTHONWARNINGS": "ignore",
            "CKPTSTORE_BIN": program("ckptstore"), "XDG_RUNTIME_DIR": "/run/user", "XDG_STATE_HOME": "/run/user", "TMPDIR": "/tmp",
            "OMP_NUM_THREADS": "1", "USE_LIBUV": "0", "GLOO_SOCKET_IFNAME": "eth0", "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5",
            "RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": cls.token, "RAY_DISABLE_IMPORT_WARNING": "1",
            "RAY_worker_niceness": "0", "RAY_raylet_start_wait_time_s": "60", "RAY_gcs_server_request_timeout_seconds": "300",
            "RAY_worker_register_timeout_seconds": "300", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3", "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.3",
            "RAY_enable_worker_prestart": "false", "RAY_prestart_worker_first_driver": "false",
            "RAY_health_check_initial_delay_ms": "5000", "RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "5000", "RAY_health_check_failure_threshold": "3",
        }

    @classmethod
    def ray(cls, name: str, *options: str) -> None:
        """Start Ray on a host. On a busy machine, its raylet may give up before its agents have started: then again."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={cls.cluster.address(name)}", "--disable-usage-stats", f"--object-store-memory={80 << 20}", *PORTS, *options]
        for _ in range(3):
            with open(cls.shared / f"ray-{name}.log", "ab") as log:  # not a pipe: its daemons keep it open
                done = cls.cluster.run(name, *command, env=cls.environment(), stdout=log, stderr=subprocess.STDOUT, capture_output=False, timeout=LIMIT)
            if done.returncode == 0:
                return
            cls.stop(name)
        raise RuntimeError(f"ray start on {name}: {(cls.shared / f'ray-{name}.log').read_text()[-3000:]}")

    @classmethod
    def stop(cls, name: str) -> None:
        cls.cluster.run(name, sys.executable, "-m", "ray.scripts.scripts", "stop", "--force", env=cls.environment(), timeout=DEADLINE)

    @classmethod
    def join(cls, name: str) -> None:
        cls.ray(name, f"--address={cls.cluster.address('head')}:{PORT}", "--num-cpus=2", '--resources={"w": 2}')

    def setUp(self) -> None:
        self.folder = self.shared / self._testMethodName
        self.folder.mkdir()
        self.store, self.results = self.folder / "store", self.folder / "results"
        self.name = ""

    def start(self, name: str, **config: Any) -> subprocess.Popen[str]:
        self.name = name
        out, file = self.folder / f"out-{name}", self.folder / f"{name}.json"
        out.mkdir()
        file.write_text(json.dumps({
            "name": name, "store": str(self.store), "out": str(out), "results": str(self.results), "address": f"{self.cluster.address('head')}:{PORT}", "ranks": self.ranks,
            "resources": {"CPU": 1, "w": 1}, "placement": "PACK", "steps": 30, "every": 5, **config,
        }))
        self.out = open(self.folder / f"{name}.log", "w+")
        self.addCleanup(self.out.close)
        process = subprocess.Popen(
            self.cluster.command("head", sys.executable, str(HERE / self.script), str(file)), stdin=subprocess.DEVNULL, stdout=self.out, stderr=subprocess.STDOUT, text=True, env=self.environment(),
        )
        self.addCleanup(self.end, process)
        return process

    def end(self, process: subprocess.Popen[str]) -> None:
        if process.poll() is None:
            for one in self.cluster.processes("head", os.path.basename(sys.executable)):  # nsenter's child
                if self.script in pathlib.Path(f"/proc/{one}/cmdline").read_text():
                    os.kill(one, signal.SIGKILL)
            process.kill()
            process.wait(30)

    def finished(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        process.wait(LIMIT)
        self.out.seek(0)
        text = self.out.read()
        self.assertEqual(process.returncode, 0, text[-6000:])
        (line,) = [line for line in text.splitlines() if line.startswith("RESULT ")]
        result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
        return result

    def ckptstore(self, *command: str) -> str:
        """Run a command on the head, to which the agent of rank 0's host has given the store."""
        done = self.cluster.run("head", program("ckptstore"), *command, "--store", str(self.store), env=self.environment(), timeout=DEADLINE)
        self.assertEqual(done.returncode, 0, f"{command}: {done.stderr}")
        return done.stdout

    def placed(self, name: str) -> list[list[str]]:
        """Return the hosts of the ranks, for each worker group."""
        of = [[note["host"] for note in self.notes(name, f"rank-{rank}") if "begins" in note] for rank in range(self.ranks)]
        return [list(group) for group in zip(*of)]

    def expected(self) -> str:
        if not Kills.unharmed:
            began = time.monotonic()
            result = self.finished(self.start("whole"))
            self.assertEqual(self.in_step("whole", result), {"step-25.a1", "step-30.a1"})
            self.assertEqual([sorted(group) for group in self.placed("whole")], [["n1", "n1", "n2", "n2"]])
            Kills.unharmed = self.weights("whole")
            told(f"whole: weights {Kills.unharmed[:16]}, {time.monotonic() - began:.1f} s")
        return Kills.unharmed

    def killed(self, name: str, process: subprocess.Popen[str], began: float, killed: float) -> None:
        """Check a training whose first group has ended after step 10 was registered."""
        result = self.finished(process)
        ends = time.monotonic()
        begins, placed = self.begins(name), self.placed(name)
        self.assertEqual([one["attempt"] for one in begins], list(range(1, len(begins) + 1)))
        self.assertEqual(len(begins), 2, begins)
        self.assertEqual([sorted(group) for group in placed], [["n1", "n1", "n2", "n2"]] * 2)
        self.assertIsNone(begins[0]["pointer"])
        self.assertGreaterEqual(begins[1]["begins"], 10)
        self.assertEqual(begins[1]["pointer"], f"{name}@{begins[1]['restored']}", "it resumes from what Ray has registered")
        registered = [one["ref"] for one in self.notes(name, "registered")]
        self.assertEqual(len(registered), len(set(registered)), registered)
        self.assertIn(begins[1]["pointer"], registered)
        self.assertEqual(len(self.notes(name, "settled")), 2)
        self.assertEqual(self.weights(name), self.expected())
        pointers = self.in_step(name, result)
        self.assertEqual(pointers, {"step-25.a2", "step-30.a2"})
        told(f"{name}: resumed from {begins[1]['restored']}, weights {self.weights(name)[:16]}, pointers {sorted(pointers)}, "
             f"{ends - killed:.1f} s from the kill to the end, {ends - began:.1f} s in all")

    def victim(self, name: str, rank: int) -> dict[str, Any]:
        """Wait until Ray has registered step 10, and return how a rank has begun."""
        end = time.monotonic() + LIMIT
        while not any(one["step"] >= 10 for one in self.notes(name, "registered")):
            self.assertLess(time.monotonic(), end, f"{name}: step 10 is not registered")
            time.sleep(0.02)
        return [note for note in self.notes(name, f"rank-{rank}") if "begins" in note][-1]

    def test_rank(self) -> None:
        """A rank of the second host is killed by SIGKILL."""
        self.expected()
        began = time.monotonic()
        process = self.start("rank", kills=[{"rank": 3, "step": 12, "registered": True}])
        self.victim("rank", 3)
        self.killed("rank", process, began, time.monotonic())

    def test_raylet(self) -> None:
        """The raylet of rank 0's host is killed by SIGKILL, and started again."""
        self.expected()
        began = time.monotonic()
        process = self.start("raylet", holds=16)
        host = self.victim("raylet", 0)["host"]
        (raylet,) = self.cluster.processes(host, "raylet")
        os.kill(raylet, signal.SIGKILL)
        killed = time.monotonic()
        self.stop(host)
        self.join(host)
        self.killed("raylet", process, began, killed)

    def test_whole_host(self) -> None:
        """Rank 0's host crashes, with the agent that has the store, and boots again."""
        self.expected()
        began = time.monotonic()
        process = self.start("host", holds=16)
        host = self.victim("host", 0)["host"]
        self.cluster.crash(host)
        killed = time.monotonic()
        self.cluster.boot(host)
        self.join(host)
        self.killed("host", process, began, killed)


    def test_preempted(self) -> None:
        """Ray announces the end of rank 0's host, all ranks save, and it crashes before that end: to Ray, a failure."""
        self.expected()
        began = time.monotonic()
        process = self.start("preempted", awaits=12, failures=1)
        first = self.victim("preempted", 0)
        self.noted("preempted", "awaits")
        self.on_head(_DRAIN, first["node"])
        self.noted("preempted", "saved")
        asked = [[(note["asked"], note["step"]) for note in self.notes("preempted", f"rank-{rank}") if "asked" in note] for rank in range(self.ranks)]
        self.assertEqual(asked, [[("save", 12)]] * self.ranks)
        self.cluster.crash(first["host"])
        killed = time.monotonic()
        self.cluster.boot(first["host"])
        self.join(first["host"])
        self.killed("preempted", process, began, killed)
        self.assertEqual(self.begins("preempted")[1]["pointer"], "preempted@step-12.a1")

    def noted(self, name: str, what: str) -> None:
        """Wait until all ranks have noted something."""
        end = time.monotonic() + LIMIT
        while not all(any(what in note for note in self.notes(name, f"rank-{rank}")) for rank in range(self.ranks)):
            self.assertLess(time.monotonic(), end, f"{name}: not all ranks have noted {what!r}")
            time.sleep(0.05)

    def on_head(self, script: str, *arguments: str) -> None:
        done = self.cluster.run("head", sys.executable, "-c", script, f"{self.cluster.address('head')}:{PORT}", *arguments, env=self.environment(), timeout=DEADLINE)
        self.assertEqual(done.returncode, 0, done.stderr)


_DRAIN = """
import sys, time
import ray
from ray.core.generated import autoscaler_pb2
preemption = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
accepted, why = ray._raylet.GcsClient(address=sys.argv[1]).drain_node(sys.argv[2], preemption, "test", time.time_ns() // 1_000_000 + 300_000)
sys.exit(None if accepted else why)
"""
CASES = {"rank": "test_rank", "raylet": "test_raylet", "host": "test_whole_host", "preempted": "test_preempted"}


def told(what: str) -> None:
    print(what, flush=True)


def main(cases: list[str]) -> int:
    why = missing()
    if why is not None:
        print(f"not run: killed hosts under Ray: {why}")
        return 3
    unknown = set(cases) - set(CASES)
    if unknown:
        print(f"unknown cases {sorted(unknown)}: {', '.join(CASES)}")
        return 64
    suite = unittest.TestSuite(Kills(CASES[case]) for case in cases or CASES)
    return 0 if unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
