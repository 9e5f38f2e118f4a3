"""Runs the Python programs of pages as they stand there.

    python3 pages.py PAGE.md [PAGE.md …] [--bin DIR] [--name NAME.py …]

A block of Python that begins with ``# NAME.py`` is a program. Each page gets an empty folder
with its programs. The bash blocks from the first section with a program on run there, line by
line, with this Python as python3 and the commands of --bin (or the PATH). A block without a
language after a bash block is its output: its lines must be printed in their order, apart
from dates, durations, identities and paths; ``…`` stands for any text. With --name only the
lines run that name one of these programs, and output is not compared. Exit code 1: a line
fails, output is missing, or no line runs a program. Exit code 3: a program needs PyTorch,
and this Python has none.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile

PROGRAM = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.M | re.S)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
# What differs between two runs: the same pattern is in cmd/pages_test.go.
VARYING = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{8,}\b|[0-9]{4}-[0-9]{2}-[0-9]{2}|[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?|\b([0-9]+m)?[0-9]+(\.[0-9]+)?(ns|µs|ms|s)\b|/[^\s,;:]+")
LIMIT = 180  # seconds of one line


def has_torch():
    """Reports whether this Python has PyTorch; a folder of that name does not count."""
    return subprocess.run([sys.executable, "-c", "import torch.distributed"], cwd="/", capture_output=True).returncode == 0


def alike(text):
    """Returns the text without what varies between runs."""
    return re.sub(r"[ \t]+", " ", VARYING.sub("0", text))


def missing(printed, shown):
    """Returns the first line of a page's output that was not printed after the line before it."""
    rest = alike(printed).split("\n")
    for line in [line.strip() for line in shown.splitlines() if line.strip() not in ("", "…")]:
        pattern = re.compile(".*".join(re.escape(alike(part)) for part in line.split("…")))
        at = next((number for number, text in enumerate(rest) if pattern.search(text)), None)
        if at is None:
            return [line]
        rest = rest[at + 1 :]
    return []


def blocks(text):
    """Returns the bash blocks of the sections from the first program on, each with the output that the page shows for it."""
    found, program, last = [], False, None
    for section in text.split("\n## "):
        program = program or bool(PROGRAM.search(section))
        if not program:
            continue
        for language, body in BLOCK.findall(section):
            if language == "bash":
                last = [body, ""]
                found.append(last)
            elif language == "" and last is not None:
                last[1] += body
            else:
                last = None
    return found


class Missing(Exception):
    """A page cannot be run here."""


class Page:
    """A page whose programs run in a folder."""

    def __init__(self, path, folder, environment, names, torch):
        self.text, self.folder, self.environment, self.torch = path.read_text(), folder, environment, torch
        self.path, self.programs, self.names = path, dict(PROGRAM.findall(self.text)), names
        self.failed, self.ran = [], set()

    def run(self):
        """Runs the page's lines. Returns what failed."""
        wanted = [name for name in self.names or self.programs if name in self.programs]
        if not self.names and not self.torch and any("torch" in program for program in self.programs.values()):
            raise Missing(f"{self.path}: this Python has no PyTorch")
        for name in wanted:
            (self.folder / name).write_text(self.programs[name])
        for body, shown in blocks(self.text):
            printed = "".join(self.line(line, wanted) for line in body.splitlines())
            if not self.names:
                self.failed += [f"{self.path}: not printed: {line}" for line in missing(printed, shown)]
        self.failed += [f"{self.path}: {name}: no line of bash runs it" for name in wanted if name not in self.ran]
        # The agent that a program has started would end by itself, later.
        subprocess.run(["ckptstore", "agent", "stop", "--store", str(self.folder / "ckpts")], env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=LIMIT, check=False)
        return self.failed

    def line(self, line, wanted):
        """Runs one line of bash, or not. Returns what it printed."""
        name = next((name for name in self.programs if name in line.split()), None)
        if self.names and name not in wanted:
            return ""
        self.ran.add(name)
        if name and "torch" in self.programs[name] and not self.torch:
            raise Missing(f"{line}: this Python has no PyTorch")
        print(f"$ {line}", flush=True)
        try:
            done = subprocess.run(["bash", "-euo", "pipefail", "-c", line], cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            self.failed.append(f"{line}: has not ended after {LIMIT} s")
            return ""
        print(done.stdout, end="", flush=True)
        if done.returncode != 0:
            self.failed.append(f"{line}: ended with {done.returncode}")
        return done.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=pathlib.Path, nargs="+")
    parser.add_argument("--bin", type=pathlib.Path, help="where trainer and ckptstore are (PATH)")
    parser.add_argument("--name", nargs="+", help="these programs alone")
    options = parser.parse_args()
    pages = [path for path in options.pages if PROGRAM.search(path.read_text())]
    known = {name for path in pages for name in dict(PROGRAM.findall(path.read_text()))}
    if not known or set(options.name or ()) - known:
        sys.exit(f"the pages have the programs {sorted(known)}, not {sorted(set(options.name or ()) - known)}")
    failed, torch = [], has_torch()
    for page in pages:
        with tempfile.TemporaryDirectory(prefix="pages-") as base:
            programs, folder = pathlib.Path(base, "bin"), pathlib.Path(base, "work")
            programs.mkdir()
            folder.mkdir()
            python = programs / "python3"
            python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
            python.chmod(0o755)
            # Pages show the warnings that users see.
            environment = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
            path = os.pathsep.join([str(programs), *([str(options.bin.resolve())] if options.bin else []), os.environ["PATH"]])
            environment["PATH"] = path
            try:
                failed += Page(page, folder, environment, options.name, torch).run()
            except Missing as why:
                print(f"not run: {why}")
                return 3
    for problem in failed:
        print(problem)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
