"""A training under a real Ray Train, for test_ray: two ranks, with a store.

    training.py CONFIG      a file in JSON

It writes what the ranks and the controller see as lines of JSON into files below "out", and
the result of Ray as the last line on stdout.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import ray
import ray.train
import torch
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchTrainer

import ckptstore
import ckptstore.ray

DEADLINE = 120.0  # seconds


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


def until(what: str, happened) -> None:
    end = time.monotonic() + DEADLINE
    while not happened():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {DEADLINE} s: {what}")
        time.sleep(0.05)


def train(config: dict) -> None:
    rank = ray.train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = torch.nn.parallel.DistributedDataParallel(model)
    state = {"step": 0}
    found = ray.train.get_checkpoint()
    restored = ckptstore.load(state, model=model, optimizer=optimizer, ref="resume")
    note(
        config, f"rank-{rank}", begins=state["step"], attempt=ckptstore.context().attempt, pid=os.getpid(), run=ckptstore.context().run,
        pointer=ckptstore.ray.reference(found) if found else None, restored=restored.checkpoint if restored else None,
        node=ray.get_runtime_context().get_node_id(),
    )
    for step in range(state["step"] + 1, config["steps"] + 1):
        torch.manual_seed(1000 * step + rank)
        loss = model(torch.randn(8, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["step"] = step
        asked = ckptstore.ray.should_stop() if config.get("asks") else None
        if asked:
            note(config, f"rank-{rank}", asked=asked, step=step)
        if step % config["every"] == 0 or asked in ("save", "preempt"):
            handle = ckptstore.save(state, model=model, optimizer=optimizer, step=step)
            ckptstore.ray.report({"step": step, "loss": loss.item()}, handle, wait=config.get("wait", False))
        if asked in ("preempt", "stop"):
            break
        for kill in config.get("kills", ()):
            if rank == 1 and step == kill["step"] and not os.path.exists(os.path.join(config["out"], f"killed-{step}")):
                if kill["registered"]:
                    ray.train.get_all_reported_checkpoints()  # waits until Ray has processed every report
                if once(config, f"killed-{step}"):
                    os.kill(os.getpid(), signal.SIGKILL)
        for pause in config.get("pauses", ()):
            if step == pause:  # until the test has done its part
                note(config, f"rank-{rank}", pauses=step)
                until(f"the test continues step {step}", lambda: os.path.exists(os.path.join(config["out"], f"continue-{step}")))
    weights = b"".join(p.detach().numpy().tobytes() for p in model.module.parameters())
    note(config, f"rank-{rank}", ends=state["step"], weights=hashlib.sha256(weights).hexdigest())


class Watch(UserCallback):
    """Looks in the store for each checkpoint at the moment at which Ray has registered it."""

    def __init__(self, config: dict):
        self.config = config

    def after_report(self, run_context, metrics, checkpoint) -> None:
        if checkpoint is None:
            return
        ref = ckptstore.ray.reference(checkpoint)
        shown = subprocess.run([os.environ["CKPTSTORE_BIN"], "ls", ref.partition("@")[0], "--all", "--json", "--store", self.config["store"]], capture_output=True, text=True, check=False)
        rows = json.loads(shown.stdout)["checkpoints"] if shown.returncode == 0 else []
        (row,) = [row for row in rows if ref.endswith("@" + row["id"])] or [{"state": shown.stderr, "tags": []}]
        note(self.config, "registered", ref=ref, state=row["state"], tags=row.get("tags", []), step=metrics[0]["step"])

    def after_exception(self, run_context, worker_exceptions) -> None:
        note(self.config, "failed", ranks=sorted(worker_exceptions))


def main(config: dict) -> None:
    workers = {"env_vars": {"OMP_NUM_THREADS": "1", "USE_LIBUV": "0", "GLOO_SOCKET_IFNAME": "lo"}}
    if config.get("address"):
        ray.init(address=config["address"], runtime_env=workers)
    else:
        ray.init(
            num_cpus=4, object_store_memory=80 << 20, include_dashboard=False, _node_ip_address="127.0.0.2", _temp_dir=config["temp"], runtime_env=workers,
        )
    trainer = TorchTrainer(
        train, train_loop_config=config, torch_config=ckptstore.ray.TorchConfig(backend="gloo", store=config["store"], resume=config.get("resume")),
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker=config.get("resources", {"CPU": 1}), placement_strategy=config.get("placement", "PACK")),
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
    print("RESULT " + json.dumps({"path": result.path, "opened": opened, "latest": ckptstore.ray.reference(result.checkpoint) if result.checkpoint else None}), flush=True)


if __name__ == "__main__":
    main(json.loads(pathlib.Path(sys.argv[1]).read_text()))
