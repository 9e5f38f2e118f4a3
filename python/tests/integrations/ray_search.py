"""A search under a real Ray Tune, for test_ray_tune.

    ray_search.py CONFIG      a file in JSON

Trials note what they load and save as lines of JSON in files below "out". The result of the
search is the last line on stdout.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys

import ray
from ray import tune
from ray.tune.schedulers import PopulationBasedTraining
from ray_training import head, note, once, until

import ckptstore
import ckptstore.ray


def train(config: dict) -> None:
    job = config["job"]
    ckptstore.ray.trial({"rate": config["rate"]}, store=job["store"])
    state = {"step": 0, "weight": 10.0}
    found = tune.get_checkpoint()
    restored = ckptstore.load(state, ref="resume")
    me = ckptstore.context()
    note(
        job, me.trial, begins=state["step"], weight=state["weight"], attempt=me.attempt, run=me.run, configured=me.config,
        pointer=ckptstore.ray.reference(found) if found else None, restored=restored.checkpoint if restored else None, rate=config["rate"], pid=os.getpid(),
    )
    for step in range(state["step"] + 1, job["steps"] + 1):
        state.update(step=step, weight=state["weight"] * (1 - config["rate"]))
        asked: list[str | None] = []
        if step == job.get("awaits") and config["rate"] in job["rates"][:2]:
            note(job, me.trial, awaits=step)
            until("the store asks for something", lambda: asked.append(ckptstore.ray.should_stop()) or asked[-1])
            note(job, me.trial, asked=asked[-1], step=step)
        handle = ckptstore.save(state, step=step) if step % job["every"] == 0 or "preempt" in asked else None
        if handle is not None:
            note(job, me.trial, saves=handle.checkpoint, weight=state["weight"])
        if step == job.get("kills") and config["rate"] == job["rates"][0] and once(job, "killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        ckptstore.ray.report({"loss": state["weight"], "step": step, "words": ["not", "a", "number"]}, handle)
        if "preempt" in asked:
            return


def main(config: dict) -> None:
    ray.init(address=head(config).address, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})
    scheduler = None
    if config.get("population"):
        # The worse of two trials takes over the better one's checkpoint, and both wait for each other.
        scheduler = PopulationBasedTraining(
            time_attr="training_iteration", perturbation_interval=4, quantile_fraction=0.5, resample_probability=0.0, hyperparam_mutations={"rate": config["rates"]}, synch=True,
        )
    results = tune.Tuner(
        train, param_space={"job": config, "rate": tune.grid_search(config["rates"])},
        tune_config=tune.TuneConfig(metric="loss", mode="min", scheduler=scheduler, reuse_actors=config.get("reuse", False)),
        run_config=tune.RunConfig(
            name=config["name"], storage_path=config["results"], verbose=0, failure_config=tune.FailureConfig(max_failures=2),
            checkpoint_config=tune.CheckpointConfig(num_to_keep=config["keep"]), callbacks=[ckptstore.ray.TuneCallback(config["store"])],
        ),
    ).fit()
    ends = {}
    for one in results:
        with ckptstore.ray.open(one.checkpoint) as cp:
            ends[pathlib.Path(one.path).name] = {"ref": ckptstore.ray.reference(one.checkpoint), "step": cp.value("step"), "error": repr(one.error) if one.error else None}
    ray.shutdown()
    print("RESULT " + json.dumps({"trials": ends}), flush=True)


if __name__ == "__main__":
    main(json.loads(pathlib.Path(sys.argv[1]).read_text()))
