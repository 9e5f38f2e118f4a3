"""Builds the wheels: the pure one, and one for this platform with the programs in it.

    python python/build.py [--out DIR] [--pure]

The second needs Go, and a C compiler for a trainer that looks after GPUs; without one
it is refused, unless --without-gpu says that none is wanted. It is tagged by the
newest glibc symbol that its programs ask for.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)


def version() -> str:
    """The one place that says it."""
    with open(os.path.join(HERE, "pyproject.toml"), encoding="utf-8") as file:
        found = re.search(r'^version = "([^"]+)"$', file.read(), re.MULTILINE)
    if found is None:
        raise SystemExit("build: python/pyproject.toml has no version")
    return found[1]


def programs(folder: str, gpu: bool) -> None:
    """Build the programs into a folder."""
    if gpu and not shutil.which(os.environ.get("CC", "gcc")):
        raise SystemExit("build: a trainer that looks after GPUs needs a C compiler: install gcc, or say --without-gpu")
    for name, cgo in (("ckptstore", False), ("trainer", gpu)):
        subprocess.run(
            ["go", "build", "-buildvcs=false", "-ldflags", f"-s -w -X main.release={version()}", "-o", os.path.join(folder, name), "./cmd/" + name],
            cwd=ROOT, env={**os.environ, "CGO_ENABLED": "1" if cgo else "0"}, check=True,
        )


def tag(folder: str) -> str:
    """The oldest platform on which the programs run."""
    needs = (2, 17)  # what a static one is said to need: nothing older is told apart
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", file.read()):
                needs = max(needs, (int(major), int(minor)))
    return f"manylinux_{needs[0]}_{needs[1]}_{platform.machine()}"


def wheel(out: str, **environment: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--wheel-dir", out, HERE],
        env={**os.environ, **environment}, check=True,
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", default=os.path.join(HERE, "dist"), help="folder for the wheels (python/dist)")
    options.add_argument("--pure", action="store_true", help="the pure wheel alone")
    options.add_argument("--without-gpu", action="store_true", help="a trainer that knows nothing of GPUs, and needs no C compiler")
    said = options.parse_args()
    wheel(said.out)
    if not said.pure:
        if sys.platform != "linux":
            raise SystemExit("build: the programs run on Linux: say --pure")
        with tempfile.TemporaryDirectory() as folder:
            programs(folder, not said.without_gpu)
            wheel(said.out, CKPTSTORE_WHEEL_PROGRAMS=folder, CKPTSTORE_WHEEL_PLATFORM=tag(folder))
    for name in sorted(os.listdir(said.out)):
        print(os.path.join(said.out, name))


if __name__ == "__main__":
    main()
