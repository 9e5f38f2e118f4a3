"""Kills a training at random moments and proves that it resumes bit by bit.

    python3 prove_resume.py [--ways save dcp url] [--kills 6] [--seed N] [--bin DIR] [--data URL]

examples/transformer.py trains with FSDP2 under `trainer run`. At random moments a rank or the
trainer receives SIGKILL. The trainer restarts the same number of ranks; a killed trainer is
launched again, on 2 or 4 ranks. Each step's loss and gradient norm, as printed and as in the
log, must have the same bits as

    on the same number of ranks: those of a training without kills
    on more or fewer ranks: those of a training that PyTorch itself has resumed there at
        that step, by dcp.load from FileSystemWriter's files

The trainings without kills save only with FileSystemWriter. It prints a line for each life of
a killed training. Exit code 0: all claims hold; 1: a claim fails. --quick is one kill of each
kind and one way.

With --data s3://BUCKET/PREFIX?…, the checkpoints of the killed trainings are in a bucket, each
training's below a new prefix there, which stays. In the end they are verified without the log.
"""

import argparse
import contextlib
import json
import os
import pathlib
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

TRANSFORMER = pathlib.Path(__file__).resolve().parents[3] / "examples" / "transformer.py"
STEP = re.compile(r"(?:\[rank0\] )?step (\d+) loss (\S+) norm (\S+)\n")
BEGIN = re.compile(r"(?:\[rank0\] )?on (\d+) ranks after step (\d+)(?:, from (\S+))?\n")
LIMIT = 180  # seconds without a line of output


class Wrong(Exception):
    """A claim does not hold, or a step of the test failed."""


class Launch:
    """One `trainer run` of the transformer, and its output."""

    def __init__(self, options, folder, world, way, steps, resume=None):
        self.folder, self.way = folder, way
        command = [options.trainer, "run", "-q", "--store", str(folder / "store"), "--name", "gpt", "--nproc", str(world), f"--max-restarts={options.kills}", "--"]
        command += [sys.executable, str(TRANSFORMER), "--way", way, "--steps", str(steps), "--save-every", str(options.save_every), "--files", str(folder / "files")]
        if resume:
            command += ["--resume", str(resume)]
        environment = {**os.environ, "CKPTSTORE_BIN": options.ckptstore, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        self.output, self.lines = [], queue.Queue()
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self):
        for line in self.process.stdout:
            self.output.append(line)
            self.lines.put(line)
        self.lines.put(None)

    def next(self):
        """Return the next line, or None at the end."""
        try:
            return self.lines.get(timeout=LIMIT)
        except queue.Empty:
            raise Wrong(f"{self.folder}: nothing was printed for {LIMIT} s\n{self.text()}") from None

    def ranks(self):
        """Return the processes of the ranks, which are children of the trainer, by rank."""
        found = {}
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError):
                if int((path / "stat").read_text().rpartition(")")[2].split()[1]) == self.process.pid:
                    for variable in (path / "environ").read_bytes().split(b"\0"):
                        if variable.startswith(b"RANK="):
                            found[int(variable[5:])] = int(path.name)
        return found

    def close(self):
        """Wait for the end. A trainer that does not exit is killed, and its guard ends its ranks."""
        try:
            return self.process.wait(LIMIT)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
            self.reader.join(LIMIT)

    def text(self):
        return "".join(self.output[-60:])


class Twin:
    """A training without kills, saved and resumed with PyTorch's own files."""

    def __init__(self, options, world, origin=None, at=0):
        self.world, self.origin, self.at, self.losses, self.next = world, origin, at, {}, {}
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=f"twin-{world}-", dir=options.folder))
        resume = origin.folder / "files" / f"step-{at}" if at else None
        launch = Launch(options, self.folder, world, "files", options.steps, resume)
        try:
            while (line := launch.next()) is not None:
                if match := STEP.fullmatch(line):
                    self.losses[int(match[1])] = match[2], match[3]
        finally:
            code = launch.close()
        if code != 0 or set(self.losses) != set(range(at + 1, options.steps + 1)):
            raise Wrong(f"the training with PyTorch's own files on {world} ranks from step {at} ended with {code}:\n{launch.text()}")

    def on(self, options, world, at):
        """Return the training that continues this one from a step, on that many ranks."""
        if self.origin and at <= self.at:  # of a save before this life
            return self.origin.on(options, world, at)
        if world == self.world:
            return self
        if (world, at) not in self.next:
            self.next[world, at] = Twin(options, world, self if at else None, at)
        return self.next[world, at]

    def name(self):
        if self.origin is None:
            return f"{self.world} ranks, never killed"
        return f"dcp.load at step {self.at}: {self.origin.world} to {self.world} ranks"


class Life:
    """The time from one start of the ranks to the next."""

    def __init__(self, world, after, resumed):
        self.world, self.after, self.resumed = world, after, resumed
        self.losses, self.last, self.end = {}, after, "went to the end"
        self.twin, self.differs = None, []

    def compare(self, twin):
        """Compare each step with that of a training without kills."""
        self.twin = twin
        for step, losses in self.losses.items():
            if losses != twin.losses[step]:
                self.differs.append(f"step {step}: {losses}, and {twin.losses[step]} of {twin.name()}")


class Killed:
    """A training of one way that is killed, launched again, and compared."""

    def __init__(self, options, way, chance):
        self.options, self.way, self.chance = options, way, chance
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=f"killed-{way}-", dir=options.folder))
        self.lives, self.line = [], {}
        self.data = options.data and below(options.data, f"{options.folder.name}/{self.folder.name}")

    def run(self):
        if self.data:
            self.ckptstore("init", "--store", str(self.folder / "store"), "--data", self.data)
        kills = [("rank", None), ("trainer", 4), ("trainer", 2)][: self.options.kills]
        while len(kills) < self.options.kills:
            kills.append(self.chance.choice([("rank", None), ("trainer", 2), ("trainer", 4)]))
        world = 2
        while True:
            launch = Launch(self.options, self.folder, world, self.way, self.options.steps)
            killed = False
            try:
                killed, world = self.follow(launch, kills, world)
            finally:
                code = launch.close()
            if not killed:
                break
        if code != 0:
            raise Wrong(f"way {self.way}: the last launch ended with {code}:\n{launch.text()}")
        if kills:
            raise Wrong(f"way {self.way}: {len(kills)} kills came too late")
        changed = [life.world != before.world for before, life in zip(self.lives, self.lives[1:]) if life.resumed]
        if set(changed) != {False, True}:
            raise Wrong(f"way {self.way}: nothing was resumed on {'as many ranks' if True in changed else 'another number of ranks'}")
        self.log()
        if self.data:
            self.bucket()

    def follow(self, launch, kills, world):
        """Read until the launch ends, and carry out the kills.

        Return whether the trainer was killed, and the number of ranks of the next launch.
        """
        target = None
        while (line := launch.next()) is not None:
            if match := BEGIN.fullmatch(line):
                self.begin(int(match[1]), int(match[2]), match[3])
                # The first two kills come after a save, the others at any moment.
                least = self.options.save_every + 1 if len(kills) > self.options.kills - 2 else 1
                target = self.lives[-1].after + self.chance.randint(least, 2 * self.options.save_every + 2)
            elif match := STEP.fullmatch(line):
                self.step(int(match[1]), (match[2], match[3]))
                if kills and target is not None and int(match[1]) >= target:
                    target, (who, then) = None, kills.pop(0)
                    time.sleep(self.chance.uniform(0, 0.06))  # anywhere in the following steps and saves
                    if who == "trainer":
                        launch.process.kill()
                        self.lives[-1].end = "trainer killed"
                        while (line := launch.next()) is not None:
                            if match := STEP.fullmatch(line):
                                self.step(int(match[1]), (match[2], match[3]))
                        return True, then
                    rank = self.chance.randrange(world)
                    pid = launch.ranks().get(rank)
                    if pid is None:
                        raise Wrong(f"way {self.way}: no process of rank {rank}\n{launch.text()}")
                    os.kill(pid, signal.SIGKILL)
                    self.lives[-1].end = f"rank {rank} killed"
        return False, world

    def begin(self, world, after, resumed):
        if after and after not in self.line:
            raise Wrong(f"way {self.way}: resumed after step {after}, which was not reached")
        self.lives.append(Life(world, after, resumed))
        self.line = {step: losses for step, losses in self.line.items() if step <= after}

    def step(self, step, losses):
        life = self.lives[-1]
        if step != life.last + 1:
            raise Wrong(f"way {self.way}: step {step} follows step {life.last}")
        life.last = step
        life.losses[step] = self.line[step] = losses

    def compare(self, twin):
        """Compare all lives, each of which continues the previous one.

        This happens after they have ended: a twin takes as long as they do, and they would
        not wait for their kill.
        """
        for life in self.lives:
            twin = twin.on(self.options, life.world, life.after)
            life.compare(twin)

    def log(self):
        """Check that the log's metrics of the run equal the printed ones."""
        rows = json.loads(self.ckptstore("metrics", "gpt", "--json", "--store", str(self.folder / "store")))["rows"]
        logged = {row["step"]: tuple(repr(float(row["metrics"][name]["last"])) for name in ("loss", "norm")) for row in rows}
        if len(rows) != self.options.steps or logged != self.line:
            raise Wrong(f"way {self.way}: the log's metrics of {len(rows)} iterations are not what was printed of {len(self.line)} steps")

    def bucket(self):
        """Check that the bucket alone has the checkpoints of the log, undamaged."""
        logged, found = (
            {row["id"] for row in json.loads(self.ckptstore("ls", "gpt", "--all", "--json", *where))["checkpoints"] if row["state"] == "committed"}
            for where in (("--store", str(self.folder / "store")), ("--offline", "--store", self.data))
        )
        if not found or logged != found:
            raise Wrong(f"way {self.way}: {self.data} has the checkpoints {sorted(found)}, the log {sorted(logged)}")
        self.ckptstore("verify", "--offline", "--store", self.data)

    def ckptstore(self, *arguments):
        """Run a command, and return its output."""
        done = subprocess.run([self.options.ckptstore, *arguments], check=False, capture_output=True, text=True, timeout=LIMIT)
        if done.returncode != 0:
            raise Wrong(f"way {self.way}: ckptstore {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout


def below(data, name):
    """Return the URL of a prefix below that of a bucket."""
    place, mark, parameters = data.partition("?")
    return f"{place.rstrip('/')}/{name}{mark}{parameters}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=("save", "dcp", "url"), default=["save", "dcp", "url"])
    parser.add_argument("--kills", type=int, default=6, help="of each way, at least 2")
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--seed", type=int, help="of the moments (a random one)")
    parser.add_argument("--bin", type=pathlib.Path, help="directory of trainer and ckptstore (PATH)")
    parser.add_argument("--folder", type=pathlib.Path, help="where the stores go (a temporary one)")
    parser.add_argument("--data", help="s3://BUCKET/PREFIX for the checkpoints (the store's directory); credentials are in the environment")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files are removed
    if options.quick:
        options.ways, options.kills = options.ways[:1], 2
    for name in ("trainer", "ckptstore"):
        found = shutil.which(name, path=options.bin and str(options.bin.resolve()))
        if found is None:
            sys.exit(f"{name} is not {'in ' + str(options.bin) if options.bin else 'on the PATH: use --bin DIR'}")
        setattr(options, name, found)
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1 << 32)
    # Each life ends at most this many steps after the previous one.
    options.steps = (options.kills + 1) * (2 * options.save_every + 6)
    options.folder = pathlib.Path(tempfile.mkdtemp(prefix="prove-resume-", dir=options.folder))
    print(f"seed {seed}, {options.kills} kills of each way, {options.steps} steps, a save every {options.save_every}", flush=True)
    wrong, compared, lives = [], 0, 0
    try:
        first = Twin(options, 2)
        print("\n| way | ranks | resumed from | steps | ended | same bits as | equal |\n|---|---:|---|---|---|---|---|", flush=True)
        for way in options.ways:
            killed = Killed(options, way, random.Random(f"{seed} {way}"))
            try:
                killed.run()
            except Wrong as error:
                wrong.append(str(error))
            killed.compare(first)
            for life in killed.lives:
                equal = "no" if life.differs else "yes"
                print(f"| {way} | {life.world} | {life.resumed or 'the beginning'} | {life.after + 1}–{life.last} | {life.end} | {life.twin.name()} | {equal} |", flush=True)
                wrong += life.differs[:3]
                compared, lives = compared + len(life.losses), lives + 1
    except Wrong as error:
        wrong.append(str(error))
    finally:
        shutil.rmtree(options.folder)
    print(f"\n{lives} lives, {compared} steps compared bit by bit: " + (f"{len(wrong)} claims do not hold (seed {seed})" if wrong else "all are equal"))
    for text in wrong:
        print(text)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
