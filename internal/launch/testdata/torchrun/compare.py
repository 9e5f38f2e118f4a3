"""Compares `trainer run` with torchrun: runs the same script under both. Every
difference must be in the table of docs/howto/torchrun.md, with a reason.

    python3 compare.py TRAINER [--table docs/howto/torchrun.md]

It compares the environment of the ranks; the exit codes of the launchers on success,
when a rank fails in several ways, and when the launcher is asked to end; what @record
writes, and which rank is named as the cause; what a restarted group sees; and
that a gloo process group can be made. A difference that is not in the table is an error,
and so is a row without a difference.

It needs a Python with torch, two cores, and half a minute to two minutes. Exit code 0:
they differ as in the table. 1: they do not; the output lists where. It leaves nothing
behind.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
NPROC = 2
LIMIT = 120  # seconds that one launch may take
UNSET = "not set"

# How many restarts each case has, in addition to those of the launch itself.
CASES = {
    "success": 0,
    "exception": 0,
    "sys.exit(3)": 0,
    "SIGKILL of a rank": 0,
    "SIGSEGV": 0,
    "SIGTERM to the launcher": 0,
    "missing script": 0,
    "restarts exhausted": 1,
    "record": 0,
    "restart": 1,
    "gloo": 0,
}
# The same kinds of failure in each launcher's words for the rank that caused it.
CAUSE = {
    "torchrun": re.compile(r"Root Cause \(first observed failure\):.*?rank\s*: (\d+)", re.S),
    "trainer run": re.compile(r"^trainer: .*?: rank (\d+) (?:exited|was killed)", re.M),
}


class Launch:
    """One case under one launcher."""

    def __init__(self, launcher, case, folder, trainer):
        self.launcher, self.case = launcher, case
        self.out = folder / re.sub(r"\W+", "-", f"{launcher}-{case}")
        self.out.mkdir()
        script = HERE / ("missing.py" if case == "missing script" else "workload.py")
        work = ["-u", str(script), case, str(self.out)]
        if launcher == "torchrun":
            self.command = [sys.executable, str(HERE / "launch.py"), "--rdzv-id=compared", "--master-addr=127.0.0.1", f"--master-port={free_port()}", f"--nproc-per-node={NPROC}", f"--max-restarts={CASES[case]}", *work[1:]]
        else:
            store = self.out / "store"
            self.command = [trainer, "run", "--store", str(store), "--name", "compared", f"--nproc-per-node={NPROC}", f"--max-restarts={CASES[case]}", "--", sys.executable, *work]

    def run(self):
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.out), "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
        environment["USE_LIBUV"] = "0"  # not every build of PyTorch has it
        with (self.out / "said").open("w+") as said:
            process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment, cwd=self.out)
            try:
                if self.case == "SIGTERM to the launcher":
                    self.end(process)
                self.code = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"{self.launcher}, {self.case}: still running after {LIMIT} s\n{self.text()}") from None
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        self.environments = {}
        for path in self.out.glob("env-*.json"):
            _, restart, rank = path.stem.split("-")
            self.environments[int(restart), int(rank)] = json.loads(path.read_text())
        return self

    def end(self, process):
        ready = [self.out / f"ready-{rank}" for rank in range(NPROC)]
        started = lambda: all(path.exists() and path.read_text() for path in ready)
        await_(lambda: started() or process.poll() is not None, f"{self.launcher}: the ranks do not start")
        if not started():
            raise RuntimeError(f"{self.launcher} ended before it was told to\n{self.text()}")
        process.send_signal(signal.SIGTERM)
        process.wait(LIMIT)
        for path in ready:
            await_(lambda: not alive(int(path.read_text())), f"{self.launcher}: a rank lives on after its launcher")

    def text(self):
        return (self.out / "said").read_text(errors="replace")

    def exit_code(self):
        """As a shell says it."""
        return str(self.code if self.code >= 0 else 128 - self.code)

    def cause(self):
        found = CAUSE[self.launcher].search(self.text())
        return found and int(found[1])


def free_port():
    """For torchrun, which has one port for all its launches unless told otherwise."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def await_(condition, otherwise):
    deadline = time.monotonic() + LIMIT
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(otherwise)
        time.sleep(0.02)


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def table(path):
    """The rows: what, and the cells of torchrun, trainer run and the reason."""
    rows = {}
    for line in path.read_text().splitlines():
        row = re.fullmatch(r"\| `((?:env|exit|restart) .+?)` \| (.+?) \| (.+?) \| (.+?) \|", line)
        if row:
            if row[1] in rows:
                raise SystemExit(f"{path}: two rows of {row[1]}")
            rows[row[1]] = row.groups()[1:]
    if not rows:
        raise SystemExit(f"{path} has no table of differences")
    return rows


def differences(cases):
    """All that differs in environment and exit code: what, and the two values."""
    found = {}
    for case, (ours, theirs) in cases.items():
        if ours.exit_code() != theirs.exit_code():
            found[f"exit {case}"] = (theirs.exit_code(), ours.exit_code())
        if case == "missing script":
            continue
        if ours.environments.keys() != theirs.environments.keys() or not ours.environments:
            raise Wrong(f"{case}: restarts and ranks are {sorted(ours.environments)}, under torchrun {sorted(theirs.environments)}\n{ours.text()}\n{theirs.text()}")
        for key, environment in ours.environments.items():
            other = theirs.environments[key]
            for name in environment.keys() | other.keys():
                # The folder of the case is its launch's own.
                here, there = environment.get(name, UNSET).replace(str(ours.out), "OUT"), other.get(name, UNSET).replace(str(theirs.out), "OUT")
                if here != there:
                    found.setdefault(f"env {name}", (there, here))
    ports = [["fresh", "kept"][launch.environments[0, 0]["MASTER_PORT"] == launch.environments[1, 0]["MASTER_PORT"]] for launch in reversed(cases["restart"])]
    if ports[0] != ports[1]:
        found["restart MASTER_PORT"] = tuple(ports)
    return found


class Wrong(Exception):
    pass


def judge(found, rows):
    """What of the differences the table does not say, or says and is not."""
    wrong = []
    for what, values in sorted(found.items()):
        if what not in rows:
            wrong.append(f"{what} is {values[0]!r} under torchrun and {values[1]!r} under trainer run: the table does not have it")
            continue
        for cell, value, launcher in zip(rows[what], values, ("torchrun", "trainer run")):
            literal = re.fullmatch(r"`(.*)`", cell)
            if (literal and literal[1] != value) or (cell == UNSET) != (value == UNSET):
                wrong.append(f"{what} is {value!r} under {launcher}: the table has {cell}")
    for what in rows.keys() - found.keys():
        wrong.append(f"{what} does not differ: the table has it")
    return wrong


def check_error_file(ours, theirs):
    files = []
    for launch in (theirs, ours):
        body = json.loads((launch.out / "error.json").read_text())
        message = body["message"]
        extra = message["extraInfo"]
        stack = [line.strip() for line in extra["py_callstack"].splitlines()]
        if "rank 1 is at fault" not in message["message"] or not extra["timestamp"].isdigit() or not stack:
            raise Wrong(f"record: {launch.launcher} has {body}")
        files.append((sorted(body), sorted(message), sorted(extra), message["message"], stack))
    if files[0] != files[1]:
        raise Wrong(f"record: error files differ: {files}")


def check_causes(cases):
    for case, (ours, theirs) in cases.items():
        # Without a script both ranks fail, and either may be the first.
        if case != "missing script" and theirs.cause() is not None and ours.cause() != theirs.cause():
            raise Wrong(f"{case}: the cause is rank {ours.cause()}, under torchrun rank {theirs.cause()}\n{ours.text()}")
    if cases["record"][1].cause() != 1:
        raise Wrong(f"torchrun names no rank 1 as the cause:\n{cases['record'][1].text()}")


def check_restart(*launches):
    for launch in launches:
        seen = launch.environments
        if sorted(seen) != [(restart, rank) for restart in range(2) for rank in range(NPROC)]:
            raise Wrong(f"restart: {launch.launcher} has started {sorted(seen)}\n{launch.text()}")
        for (restart, rank), environment in seen.items():
            want = {"TORCHELASTIC_RESTART_COUNT": str(restart), "WORLD_SIZE": str(NPROC), "RANK": str(rank), "MASTER_PORT": seen[restart, 0]["MASTER_PORT"]}
            if any(environment[name] != value for name, value in want.items()):
                raise Wrong(f"restart: {launch.launcher} gives rank {rank} {environment}, want {want}")


def check_gloo(*launches):
    for launch in launches:
        sums = [path.read_text() for path in launch.out.glob("sum-*")]
        if launch.code != 0 or sums != ["3.0"] * NPROC:
            raise Wrong(f"gloo: {launch.launcher} ends with {launch.code}, sums {sums}\n{launch.text()}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trainer", type=pathlib.Path)
    parser.add_argument("--table", type=pathlib.Path, default=HERE.parents[3] / "docs" / "howto" / "torchrun.md")
    options = parser.parse_args()
    trainer = str(options.trainer.resolve())
    rows = table(options.table)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="compare-") as folder, concurrent.futures.ThreadPoolExecutor(3) as pool:
        launches = {case: [pool.submit(Launch(launcher, case, pathlib.Path(folder), trainer).run) for launcher in ("trainer run", "torchrun")] for case in CASES}
        try:
            cases = {case: tuple(launch.result() for launch in pair) for case, pair in launches.items()}
        except RuntimeError as error:
            pool.shutdown(cancel_futures=True)
            sys.exit(f"WRONG: {error}")
        wrong = []
        for check in (
            lambda: check_restart(*cases["restart"]),
            lambda: wrong.extend(judge(differences(cases), rows)),
            lambda: check_error_file(*cases["record"]),
            lambda: check_causes(cases),
            lambda: check_gloo(*cases["gloo"]),
        ):
            try:
                check()
            except (Wrong, OSError, KeyError) as error:
                wrong.append(f"{type(error).__name__}: {error}")
    for text in wrong:
        print("WRONG:", text)
    print(f"{len(CASES)} cases under torchrun and trainer run, {len(rows)} differences known, {len(wrong)} wrong, in {time.monotonic() - began:.0f} s")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
