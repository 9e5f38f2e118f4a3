"""A training under a real Ray Train, for test_ray and ray_kills: ranks with a store.

    ray_training.py CONFIG      a file in JSON

It writes what the ranks and the controller see as lines of JSON into files below "out", and
the result of Ray as the last line on stdout.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import ray
import ray.train
import torch
from ray.cluster_utils import Cluster
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.execution.callback import ReportCallback, WorkerGroupCallback

import ckptstore
import ckptstore.ray

DEADLINE = 300.0  # seconds, on a busy machine


def note(config: dict, who: str, **line: object) -> None:
    with open(os.path.join(config["out"], who), "a") as file:
        file.write(json.dumps(line) + "\n")


def once(config: dict, what: str) -> bool:
    """Report whether this is the first call of any life of any rank."""
    try:
        os.close(os.open(os.path.join(config["out"], what), os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        return True
    except FileExistsError:
        return False


def until(what: str, happened, limit: float = DEADLINE) -> None:
    end = time.monotonic() + limit
    while not happened():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {limit} s: {what}")
        time.sleep(0.05)


def listed(config: dict, run: str) -> list[dict]:
    """Return the checkpoints of a run, on a machine that reaches the store."""
    command = [os.environ["CKPTSTORE_BIN"], "ls", run, "--all", "--json", "--store", config["store"]]
    shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE)
    if shown.returncode not in (0, 4):  # 4: no such run
        raise RuntimeError(shown.stderr)
    return json.loads(shown.stdout)["checkpoints"] if shown.returncode == 0 else []


def look(config: dict, ref: str) -> dict:
    """Return state and tags of a checkpoint. It runs in the process of rank 0."""
    run, _, checkpoint = ref.partition("@")
    found = [row for row in listed(config, run) if row["id"] == checkpoint]
    return {"state": found[0]["state"], "tags": found[0].get("tags") or []} if found else {"state": "unknown", "tags": []}


def settled(config: dict) -> dict:
    """Return what Ray has registered, and what of it the store has, before a group trains."""
    try:
        with open(ray.train.get_context().get_storage().checkpoint_manager_snapshot_path) as file:
            pointers = {result["checkpoint_dir_name"] for result in json.load(file)["checkpoint_results"]}
    except FileNotFoundError:
        pointers = set()
    rows = listed(config, ckptstore.context().run)
    return {
        "pointers": sorted(pointers), "tagged": sorted(row["id"] for row in rows if row.get("tags")),
        "committed": sorted(row["id"] for row in rows if row["state"] == "committed" and row["id"] in pointers),
    }


def begun() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def gradients(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    """Compute a rank's gradients of a step, and return its loss."""
    torch.manual_seed(1000 * step + rank)
    loss = model(torch.randn(8, 64)).square().mean()
    model.zero_grad()
    loss.backward()
    return loss


def digest(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()


def alone(steps: int) -> str:
    """Train as two ranks do, in this process and without Ray, and return the digest of the weights."""
    torch.set_num_threads(1)
    model, optimizer = begun()
    for step in range(1, steps + 1):
        of = []
        for rank in range(2):
            gradients(model, step, rank)
            of.append([parameter.grad.clone() for parameter in model.parameters()])
        for parameter, first, second in zip(model.parameters(), *of):
            parameter.grad = (first + second) / 2
        optimizer.step()
    return digest(model)


def train(config: dict) -> None:
    rank = ray.train.get_context().get_world_rank()
    model, optimizer = begun()
    state = {"step": 0}
    found = ray.train.get_checkpoint()
    restored = ckptstore.load(state, model=model, optimizer=optimizer, ref="resume")
    note(
        config, f"rank-{rank}", begins=state["step"], attempt=ckptstore.context().attempt, pid=os.getpid(), run=ckptstore.context().run,
        pointer=ckptstore.ray.reference(found) if found else None, restored=restored.checkpoint if restored else None,
        node=ray.get_runtime_context().get_node_id(), host=os.uname().nodename,
    )
    if rank == 0:
        note(config, "settled", attempt=ckptstore.context().attempt, **settled(config))
    for step in range(state["step"] + 1, config["steps"] + 1):
        if rank == 0 and step == config.get("holds") and ckptstore.context().attempt == 1:
            until("this rank is killed", lambda: False)  # the others wait for it in their next collective
        loss = gradients(model, step, rank)
        # Not DDP: after its first step it changes the order of the gradients, and with it the order in which the values of
        # more than two ranks are added. A resumed training then differs in its last bits, with torch.save too.
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= ray.train.get_context().get_world_size()
        optimizer.step()
        state["step"] = step
        asked, answers = None, []
        if step == config.get("awaits") and ckptstore.context().attempt == 1:
            note(config, f"rank-{rank}", awaits=step)
            until("Ray or the store asks for something", lambda: answers.append(ckptstore.ray.should_stop()) or answers[-1])
            asked = answers[-1]
            note(config, f"rank-{rank}", asked=asked, step=step, answers=len(answers))
        if step % config["every"] == 0 or asked in ("save", "preempt"):
            extra = {}
            if rank == 1 and step == config.get("breaks") and once(config, f"broken-{step}"):
                extra = {"bad": torch.eye(2).to_sparse()}  # which no save takes
            if step == config.get("differs"):
                extra = {"replica": torch.ones(2 + rank)}  # aborts the save when all ranks have staged it
            try:
                handle = ckptstore.save({**state, **extra}, model=model, optimizer=optimizer, step=step)
                ckptstore.ray.report({"step": step, "loss": loss.item()}, handle, wait=step in config.get("waits", ()))
            except ckptstore.SaveAborted as aborted:
                if step != config.get("differs"):
                    raise
                note(config, f"rank-{rank}", aborted=aborted.checkpoint, step=step)
        if asked in ("preempt", "stop"):
            break
        if asked == "save":
            ray.train.get_all_reported_checkpoints()
            note(config, f"rank-{rank}", saved=step)
            until("the node of rank 0 ends", lambda: False)
        for kill in config.get("kills", ()):
            if rank == kill.get("rank", 1) and step == kill["step"] and not os.path.exists(os.path.join(config["out"], f"killed-{step}")):
                if kill["registered"]:
                    ray.train.get_all_reported_checkpoints()  # waits until Ray has processed every report
                if once(config, f"killed-{step}"):
                    os.kill(os.getpid(), signal.SIGKILL)
    note(config, f"rank-{rank}", ends=state["step"], weights=digest(model))


class Watch(WorkerGroupCallback, ReportCallback):
    """Has rank 0 look in the store for each checkpoint at the moment at which Ray has registered it."""

    def __init__(self, config: dict):
        self.config, self.group = config, None

    def after_worker_group_start(self, worker_group) -> None:
        self.group = worker_group

    def after_report(self, training_report, metrics) -> None:
        if training_report.checkpoint is None:
            return
        ref = ckptstore.ray.reference(training_report.checkpoint)
        try:
            found = ray.get(self.group.execute_single_async(0, look, self.config, ref), timeout=DEADLINE)
        except ray.exceptions.RayError:
            found = {"state": None, "tags": []}  # rank 0 has died
        note(self.config, "registered", ref=ref, step=metrics[0]["step"], **found)


ADDRESS = "127.0.0.2"  # Ray takes 127.0.0.1 for the address of another interface
MEMORY = 80 << 20  # bytes of an object store


def options(config: dict) -> dict:
    """Return the options of a node on this machine.

    Its agents have fixed ports: on a busy machine, a raylet gives up before they have written theirs.
    """
    names = ("metrics_agent_port", "dashboard_agent_listen_port", "runtime_env_agent_port", "metrics_export_port")
    probes = [socket.socket() for _ in names]
    for probe in probes:
        probe.bind(("", 0))
    ports = {name: probe.getsockname()[1] for name, probe in zip(names, probes)}
    for probe in probes:
        probe.close()
    return {**ports, "wait": False, "node_ip_address": ADDRESS, "object_store_memory": MEMORY, "include_dashboard": False, "temp_dir": config["temp"], "num_cpus": 2}


def started(start):
    """Start a node, up to three times: on a busy machine, its raylet may give up before its agents have started."""
    for _ in range(2):
        try:
            return start()
        except Exception as error:  # of no class of its own
            print(f"again: {error}", flush=True)
    return start()


def head(config: dict) -> Cluster:
    """Start Ray on this machine, for this process."""
    return started(lambda: Cluster(initialize_head=True, head_node_args=options(config)))


class Nodes:
    """A head and two nodes of Ray on this machine, each with its own raylet."""

    def __init__(self, config: dict):
        self.config, self.cluster = config, head(config)
        self.nodes = {node.node_id: node for node in (started(lambda: self.cluster.add_node(**options(config), resources={"w": 2})) for _ in range(2))}

    def begin(self) -> None:
        """Announce the end of rank 0's node when both ranks ask, and kill its raylet once they have saved and the end is due."""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        from ray.core.generated import autoscaler_pb2

        preemption = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")

        def announce(node: str, seconds: float) -> None:
            deadline = int((time.time() + seconds) * 1000)
            accepted, why = ray._raylet.GcsClient(address=self.cluster.address).drain_node(node, preemption, "test", deadline)
            if not accepted:
                raise RuntimeError(why)

        def noted(rank: int, what: str) -> list[dict]:
            try:
                lines = [json.loads(line) for line in open(os.path.join(self.config["out"], f"rank-{rank}"))]
            except FileNotFoundError:
                return []
            return [line for line in lines if what in line]

        try:
            until("both ranks ask", lambda: all(noted(rank, "awaits") for rank in range(2)), 2 * DEADLINE)  # from before the start of the ranks
            node = noted(0, "node")[0]["node"]
            announce(node, 300)
            until("both ranks have saved", lambda: all(noted(rank, "saved") for rank in range(2)))
            announce(node, 1)
            time.sleep(2)
            self.cluster.remove_node(self.nodes[node], allow_graceful=False)
            note(self.config, "nodes", killed=node)
        except BaseException as error:
            note(self.config, "nodes", failed=repr(error))


def main(config: dict) -> None:
    workers = {"env_vars": {"OMP_NUM_THREADS": "1", "USE_LIBUV": "0", "GLOO_SOCKET_IFNAME": "lo"}}
    if config.get("address"):
        ray.init(address=config["address"])
    elif config.get("nodes"):
        nodes = Nodes(config)
        ray.init(address=nodes.cluster.address, runtime_env=workers)
        nodes.begin()
    else:
        ray.init(address=head(config).address, runtime_env=workers)
    trainer = TorchTrainer(
        train, train_loop_config=config, torch_config=ckptstore.ray.TorchConfig(backend="gloo", store=config["store"], resume=config.get("resume")),
        scaling_config=ScalingConfig(num_workers=config.get("ranks", 2), resources_per_worker=config.get("resources", {"CPU": 1}), placement_strategy=config.get("placement", "PACK")),
        run_config=RunConfig(
            name=config["name"], storage_path=config["results"], failure_config=FailureConfig(max_failures=config.get("failures", 4)),
            checkpoint_config=CheckpointConfig(num_to_keep=config.get("keep", 2)), callbacks=[ckptstore.ray.Callback(), Watch(config)],
        ),
    )
    result = trainer.fit()
    opened = []
    for checkpoint, _ in result.best_checkpoints:
        with ckptstore.ray.open(checkpoint) as cp:
            opened.append({"ref": ckptstore.ray.reference(checkpoint), "step": cp.value("step"), "tensors": sorted(cp.tensors)})
    ray.shutdown()
    print("RESULT " + json.dumps({"path": result.path, "opened": opened, "latest": ckptstore.ray.reference(result.checkpoint) if result.checkpoint else None}), flush=True)


if __name__ == "__main__":
    main(json.loads(pathlib.Path(sys.argv[1]).read_text()))
