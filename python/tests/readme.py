"""Runs the Python programs of README.md as they stand there.

    python3 readme.py README.md [--bin DIR] [--name NAME.py …]

A block of Python that begins with `# NAME.py` is a program; it is written to an empty
folder under that name. Then the bash blocks of the same section that name one are run
there, line by line, with this Python as python3 and the commands of --bin (or the
PATH); with --name only the lines that name those. A program that needs PyTorch where
there is none is said to be not run. Exit code 1: a line did not end well, or none runs
a program.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile

PROGRAM = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.M | re.S)
BASH = re.compile(r"^```bash\n(.*?)^```$", re.M | re.S)
LIMIT = 180  # seconds of one line


def has_torch():
    """Whether this Python has PyTorch; a folder of that name is none."""
    return subprocess.run([sys.executable, "-c", "import torch.distributed"], cwd="/", capture_output=True).returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("readme", type=pathlib.Path)
    parser.add_argument("--bin", type=pathlib.Path, help="where trainer and ckptstore are (PATH)")
    parser.add_argument("--name", nargs="+", help="these programs alone")
    options = parser.parse_args()
    text = options.readme.read_text()
    programs = dict(PROGRAM.findall(text))
    wanted = set(options.name or programs)
    if not programs or wanted - programs.keys():
        sys.exit(f"{options.readme} has the programs {sorted(programs)}, not {sorted(wanted - programs.keys())}")
    blocks = [block for section in text.split("\n## ") if PROGRAM.search(section) for block in BASH.findall(section)]
    lines = [line for block in blocks if any(name in block.split() for name in programs) for line in block.splitlines()]
    failed, ran, torch = [], set(), has_torch()
    with tempfile.TemporaryDirectory(prefix="readme-") as folder:
        for name in wanted:
            pathlib.Path(folder, name).write_text(programs[name])
        here = pathlib.Path(folder, "bin")
        here.mkdir()
        python = here / "python3"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        path = os.pathsep.join([str(here), *([str(options.bin.resolve())] if options.bin else []), os.environ["PATH"]])
        for line in lines:
            name = next((name for name in programs if name in line.split()), None)
            if name not in wanted and (name or options.name):
                continue
            ran.add(name)
            if name and "torch" in programs[name] and not torch:
                print(f"not run: {line}: this Python has no PyTorch", flush=True)
                continue
            print(f"$ {line}", flush=True)
            try:
                code = subprocess.run(["bash", "-euo", "pipefail", "-c", line], cwd=folder, env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL, timeout=LIMIT).returncode
            except subprocess.TimeoutExpired:
                code = f"nothing for {LIMIT} s"
            if code != 0:
                failed.append(f"{line}: ended with {code}")
        # The agent that a program has started would end by itself, later.
        subprocess.run(["ckptstore", "agent", "stop", "--store", str(pathlib.Path(folder, "ckpts"))], env={**os.environ, "PATH": path}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=LIMIT, check=False)
    failed += [f"{name}: no line of bash runs it" for name in sorted(wanted - ran)]
    for said in failed:
        print(said)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
