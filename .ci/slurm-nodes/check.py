#!/usr/bin/env python3
r"""Trains with PyTorch's FSDP2 over two hosts of Slurm, two ranks on each. Slurm warns, preempts and
requeues the job, and hosts crash.

    check.py --bin DIR [--root DIR] [--python PYTHON] [--sees DIR]… [CASE…]

The job scripts are those that `ckptstore slurm template` prints, unchanged. Each case is judged by the
log of its store, by Slurm's count of restarts, and by the bits of each rank's losses: those of a job
that nothing disturbs, which runs last.

Without cases it runs all. Exit code 1: a case is wrong. 3: this machine cannot run it; the last line
has the reason.

The Slurm is that of this machine (`.ci/slurm install`), or that of --root. Debian sid has 26.05:

    debootstrap --variant=minbase --no-check-gpg --include=iproute2 sid DIR
    printf '#!/bin/sh\nexit 101\n' >DIR/usr/sbin/policy-rc.d && chmod +x DIR/usr/sbin/policy-rc.d
    chroot DIR apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge libffi8 libssl3t64
    check.py --bin BIN --python PYTHON --root DIR

The directories of PYTHON outside of /usr are mounted on the hosts, so a virtual environment of this
machine has PyTorch there too.
"""

import argparse
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

from hosts import Lab, Missing, Slurm
from lab import Log, Wrong, step, wait

HERE = pathlib.Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
RANKS = 4
EVERY = 20  # steps from one save to the next

# Print the version of PyTorch. The import itself takes long on a busy machine.
VERSION = """\
import importlib.util, pathlib, runpy
print(runpy.run_path(pathlib.Path(importlib.util.find_spec("torch").origin).with_name("version.py"))["__version__"])
"""


class Case:
    """A job of its own name, with a store of its own."""

    def __init__(self, slurm, options, name):
        self.slurm, self.options, self.name = slurm, options, name
        self.dir = slurm.lab.shared / name
        self.store, self.losses = self.dir / "ckpts", self.dir / "losses"
        self.job = ""

    def submit(self, *flags, pace=0.1, steps=()):
        """Submit the printed script."""
        self.losses.mkdir(parents=True)
        train = (self.options.python, HERE / "train.py", self.losses, EVERY, pace, *steps)
        script = self.slurm.ask("ckptstore", "slurm", "template", "--name", self.name, "--nodes", "2", "--nproc", "2", "--store", self.store, *flags, "--", *train)
        (self.dir / "job.sbatch").write_text(script + "\n")
        self.job = self.slurm.ask("sbatch", "--parsable", f"--chdir={self.dir}", self.dir / "job.sbatch")

    def lines(self, attempt):
        """Return the losses of an attempt, by rank and step. A crash may leave a part of a line."""
        found = []
        for rank in range(RANKS):
            path = self.losses / f"a{attempt}.r{rank}"
            text = path.read_text() if path.exists() else ""
            found.append({int(line.split()[0]): line.split()[1:] for line in text.splitlines(keepends=True) if line.endswith("\n")})
        return found

    def attempts(self):
        return sorted({int(re.match(r"a(\d+)", p.name)[1]) for p in self.losses.iterdir()})

    def trained(self, attempt):
        """Return the last step that a rank of an attempt has trained."""
        return max(max(steps, default=0) for steps in self.lines(attempt))

    def trains(self, attempt, steps, limit=150):
        def ask():
            self.slurm.hasten()
            return min(map(len, self.lines(attempt))) >= steps
        wait(f"{self.name}: attempt {attempt} trains {steps} steps", limit, ask)

    def ended(self, limit=150):
        def ask():
            self.slurm.hasten()
            state = self.slurm.field(self.job, "JobState")
            if state in ("FAILED", "CANCELLED", "TIMEOUT"):
                raise Wrong(f"the job ended as {state}")
            return state == "COMPLETED"
        wait(f"{self.name}: the job has ended", limit, ask)

    def log(self):
        return Log(self.slurm.ask("ckptstore", "events", self.name, "--store", self.store, "--json"))

    def output(self):
        path = self.dir / f"{self.name}.{self.job}.out"
        return path.read_text() if path.exists() else ""

    def told(self, what):
        print(f"  {self.name}: {what}", flush=True)

    def must(self, what, holds):
        """Print a statement, and fail if it does not hold."""
        if not holds:
            raise Wrong(what)
        self.told(what)

    def started(self, log, restarts):
        """Slurm, job.started and the attempts agree on how often the job was restarted."""
        found = []
        for start in log.of("job.started"):
            data = start["data"]
            groups = [e["data"]["attempt"] for e in log.of("group.started", job=data["job"])]
            found.append((data.get("slurm_job"), data.get("slurm_restarts", 0), groups))
        counted = int(self.slurm.field(self.job, "Restarts"))
        self.must(f"Slurm restarted job {self.job} {counted} times; job.started has (job, restarts, attempts) {' '.join(map(str, found))}",
                  counted == restarts and found == [(self.job, n, [n + 1]) for n in range(restarts + 1)])

    def judge(self, most):
        """Judge a job that was restarted once, and lost at most so many steps.

        A save that was not committed yet when a host crashed adds the steps since it began.
        """
        log = self.log()
        self.started(log, 1)
        commits, resume = log.commits(1), log.of("group.started", attempt=2)[0]["data"].get("resume", "")
        self.must(f"attempt 2 continued from {resume or 'nothing'}, the last commit of attempt 1 is {commits[-1]}", resume == commits[-1])
        lost = self.trained(1) - step(resume)
        begun = [step(e["data"]["checkpoint"]) for e in log.of("checkpoint.begun", attempt=1)]
        if most and begun[-1] > step(resume):
            self.told(f"the save of step {begun[-1]} was not committed")
            most += self.trained(1) - begun[-1]
        self.must(f"attempt 1 trained {self.trained(1)} steps, of which {lost} are lost (at most {most})", 0 <= lost <= most)
        first = {min(steps) for steps in self.lines(2)}
        self.must(f"attempt 2 began with step {' '.join(map(str, first))}", first == {step(resume) + 1})
        self.must(f"{len(log.fenced())} commits of attempt 1 after the start of attempt 2", not log.fenced())
        self.slurm.ask("ckptstore", "verify", "--store", self.store, "--log")
        self.told("ckptstore verify --log: exit code 0")

    def saved(self, signalled):
        """The first job ended with a checkpoint of its last step."""
        code = self.log().of("job.ended")[0]["data"]["exit_code"]
        line = re.search(r"^trainer: preempted .*", self.output(), re.M)
        self.must(f"exit code {code}; {line[0] if line else 'no cause was printed'}", code == 75 and line and signalled in line[0] and "is committed" in line[0])

    def compare(self, unkilled):
        """Each loss of each rank has the bits of the job that nothing disturbed."""
        want, compared = unkilled.lines(1), 0
        for attempt in self.attempts():
            for rank, steps in enumerate(self.lines(attempt)):
                for number, losses in steps.items():
                    compared += 1
                    if want[rank].get(number) != losses:
                        raise Wrong(f"attempt {attempt}, rank {rank}, step {number}: the losses are {losses}, unkilled {want[rank].get(number)}")
        self.told(f"{compared} losses of {RANKS} ranks in {len(self.attempts())} attempts are bit-equal to the unkilled job's")


def submit_warning(t):
    """Submit a job with a time limit. Slurm may warn it a minute early, so it needs time to start."""
    t.submit("--time", "3", "--warning", "85s")


def warning(t):
    """Slurm warns the job before its time limit."""
    t.ended(limit=240)
    t.saved("SIGUSR1")
    t.judge(0)


def preemption(t):
    """A job of a partition of higher priority takes both hosts."""
    t.submit("--partition", "low")
    t.trains(1, 30)
    names = ",".join(h.name for h in t.slurm.hosts_of(t.job))
    other = t.slurm.ask("sbatch", "--parsable", "-p", "high", "-N", "2", "-w", names, "-o", "/dev/null", "--wrap", "sleep 1")
    t.ended()
    t.must(f"job {other} of the other partition ran on {names}: {t.slurm.field(other, 'JobState')}", t.slurm.field(other, "JobState") == "COMPLETED")
    t.saved("SIGTERM")
    t.judge(0)


def lose(t, index, away):
    """Crash a host of the job. It boots again at once, or when the job trains on a spare."""
    t.submit()
    t.trains(1, 2 * EVERY + 7)
    hosts = t.slurm.hosts_of(t.job)
    host, began = hosts[index], time.monotonic()
    host.crash()
    if not away:
        host.boot()
        t.slurm.serve(host)
    t.trains(2, 1, limit=240)
    now = t.slurm.hosts_of(t.job)
    t.told(f"{host.name} of {hosts[0].name} and {hosts[1].name} crashed; {time.monotonic() - began:.0f} s later, attempt 2 trains on {now[0].name} and {now[1].name}")
    if away:
        t.must(f"{host.name} has not booted, and attempt 2 trains", host not in now)
        host.boot()
        t.slurm.serve(host)
    t.ended()
    t.judge(EVERY)
    wait(f"{host.name} is idle", 60, lambda: t.slurm.idle(host))


def crash(t):
    """The second host crashes. The job is requeued, and a spare host takes the place."""
    lose(t, 1, away=True)


def reboot(t):
    """The first host crashes, with the coordinating trainer and the script, and boots again at once."""
    lose(t, 0, away=False)


CASES = {f.__name__: f for f in (preemption, crash, reboot, warning)}
EARLY = {"warning": submit_warning}  # it trains until Slurm warns it, in parallel with the other cases


def unkilled(slurm, options, cases):
    """Train as far as the cases did, undisturbed, and compare their losses."""
    t, wrong = Case(slurm, options, "unkilled"), 0
    t.submit(pace=0, steps=[max(c.trained(a) for c in cases for a in c.attempts())])
    t.ended(limit=300)
    t.started(t.log(), 0)
    for case in cases:
        try:
            case.compare(t)
        except Wrong as err:
            wrong += 1
            print(f"WRONG: {case.name}: {err}", flush=True)
    return wrong


def places(python):
    """Return the path of a Python, and its directories outside of /usr."""
    found = shutil.which(python)
    if not found:
        raise Missing(f"no {python}")
    ask = "import sys; print(sys.prefix); print(sys.base_prefix)"
    done = subprocess.run([found, "-c", ask], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise Missing(f"{python}: {done.stderr.strip()}")
    return os.path.abspath(found), [d for d in (os.path.dirname(os.path.abspath(found)), *done.stdout.split()) if not d.startswith("/usr")]


def environment(options, conf):
    """Return the environment of programs and jobs on the hosts."""
    drop = ("TMPDIR", "XDG_RUNTIME_DIR", "DISPLAY")
    env = {k: v for k, v in os.environ.items() if k not in drop and not k.startswith("SLURM")}
    system = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    env.update(PATH=f"{options.bin}:{env.get('PATH', system)}:{system}", SLURM_CONF=str(conf), PYTHONDONTWRITEBYTECODE="1")
    # Not every build of PyTorch has libuv. With one thread, sums have one order.
    for name, value in (("PYTHONPATH", str(CHECKOUT / "python" / "src")), ("USE_LIBUV", "0"), ("OMP_NUM_THREADS", "1")):
        env.setdefault(name, value)
    return env


def explain(case):
    """Print what helps to find the cause of a failure."""
    print(case.slurm.ask("squeue", "-l", check=False))
    print(case.output()[-6000:])
    for log in sorted(case.slurm.lab.logs.iterdir()):
        print(f"-- {log.name}\n{log.read_text(errors='replace')[-1500:]}")
    case.slurm.ask("scancel", case.job, check=False)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--bin", required=True, type=lambda d: pathlib.Path(d).resolve(), help="a directory with trainer and ckptstore")
    p.add_argument("--root", default="/", type=lambda d: pathlib.Path(d).resolve(), help="the files of the hosts, with Slurm (default: those of this machine)")
    p.add_argument("--python", default=sys.executable, help="a Python of this machine that has PyTorch")
    p.add_argument("--sees", action="append", default=[], help="another directory of this machine that the hosts need")
    p.add_argument("--keep", action="store_true", help="keep the directory of stores, outputs and logs")
    p.add_argument("case", nargs="*")
    options = p.parse_args()
    for name in options.case:
        if name not in CASES:
            p.error(f"no case {name}; there are {' '.join(CASES)}")
    for s in (signal.SIGTERM, signal.SIGINT):
        signal.signal(s, lambda number, frame: sys.exit(128 + number))
    began, lab = time.monotonic(), None
    try:
        options.python, sees = places(options.python)
        lab = Lab(options.root, ["ctl", "n1", "n2", "n3", "n4", "n5"], [CHECKOUT, options.bin, *sees, *options.sees])
        lab.start()
        lab.env = environment(options, lab.shared / "etc" / "slurm.conf")
        slurm = Slurm(lab)
        slurm.start()
        try:
            torch = slurm.ask(options.python, "-c", VERSION)
        except Wrong as err:
            raise Missing(f"{options.python} has no PyTorch on the hosts: {str(err).splitlines()[-1]}") from None
        print(f"Slurm {slurm.version} with 5 nodes, PyTorch {torch}, after {time.monotonic() - began:.0f} s", flush=True)
        return run(slurm, options, began)
    except Missing as err:
        print(f"not run: {err}")
        return 3
    finally:
        if lab:
            lab.close(options.keep)
            if options.keep:
                print(f"kept {lab.dir}")


def run(slurm, options, began):
    names = [n for n in CASES if not options.case or n in options.case]
    cases = {n: Case(slurm, options, n) for n in names}
    wrong, done = 0, []
    for name in EARLY:
        if name in cases:
            EARLY[name](cases[name])
    for name, case in cases.items():
        at = time.monotonic()
        print(f"{name}: {CASES[name].__doc__}", flush=True)
        try:
            CASES[name](case)
            print(f"passed {name} ({time.monotonic() - at:.0f} s)", flush=True)
            done.append(case)
        except (Wrong, Missing, subprocess.TimeoutExpired, KeyError, IndexError, ValueError) as err:
            wrong += 1
            print(f"WRONG: {name}: {type(err).__name__}: {err}", flush=True)
            explain(case)
    if done:
        wrong += unkilled(slurm, options, done)
    print(f"{len(names) - wrong} of {len(names)} cases passed on Slurm {slurm.version} in {time.monotonic() - began:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
