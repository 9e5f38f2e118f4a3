"""Builds the wheels: a pure one, and one for this platform with the programs and the
native helper.

    python python/build.py [--out DIR] [--pure]
    python python/build.py --helper DIR
    python python/build.py --out DIR --programs DIR --platform TAG

The platform wheel needs Go, and a C compiler for the helper and for the trainer's GPU
support. Without a compiler the build fails, unless --pure-go leaves both out. The newest
glibc symbol in the programs determines the tag. --helper builds only the helper. --programs makes
the wheel of a platform from programs that are built, with the hatchling of this Python:
`task release` does so, for each platform.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)
CONSOLE = "github.com/ckptstore/ckptstore/internal/console"


def version() -> str:
    """Return the version in pyproject.toml, its only source."""
    with open(os.path.join(HERE, "pyproject.toml"), encoding="utf-8") as file:
        found = re.search(r'^version = "([^"]+)"$', file.read(), re.MULTILINE)
    if found is None:
        raise SystemExit("build: python/pyproject.toml has no version")
    return found[1]


def compiler() -> list[str]:
    """Return the command of the C compiler: $CC, which may have arguments."""
    words = shlex.split(os.environ.get("CC", "gcc"))
    if not words or not shutil.which(words[0]):
        raise SystemExit("build: the native helper and a trainer with GPU support need a C compiler: install gcc, or pass --pure-go")
    return words


def helper(folder: str) -> None:
    """Build the native helper into a folder."""
    os.makedirs(folder, exist_ok=True)
    subprocess.run(
        [*compiler(), "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-s", "-fvisibility=hidden",
         "-o", os.path.join(folder, "libckptstore.so"), os.path.join(HERE, "native", "verified.c")], check=True,
    )


def programs(folder: str, native: bool) -> None:
    """Build the programs and the native helper into a folder."""
    if native:
        helper(folder)
    for name, cgo in (("ckptstore", False), ("trainer", native)):
        subprocess.run(
            ["go", "build", "-buildvcs=false", "-ldflags", f"-s -w -X {CONSOLE}.release={version()}", "-o", os.path.join(folder, name), "./cmd/" + name],
            cwd=ROOT, env={**os.environ, "CGO_ENABLED": "1" if cgo else "0"}, check=True,
        )


def tag(folder: str) -> str:
    """Return the tag of the oldest platform on which the programs run."""
    needs = (2, 17)  # the oldest tag, also for static programs
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=os.path.join(HERE, "dist"), help="folder for the wheels (python/dist)")
    parser.add_argument("--pure", action="store_true", help="build only the pure wheel")
    parser.add_argument("--pure-go", action="store_true", help="build no native helper, and a trainer without GPU support: needs no C compiler")
    parser.add_argument("--helper", metavar="DIR", help="build only the native helper, into DIR; for a source tree: python/src/ckptstore/bin")
    parser.add_argument("--programs", metavar="DIR", help="build only the wheel with the programs in DIR; needs hatchling in this Python")
    parser.add_argument("--platform", metavar="TAG", help="the platform of --programs, such as manylinux_2_17_aarch64")
    options = parser.parse_args()
    if bool(options.programs) != bool(options.platform):
        parser.error("--programs and --platform belong together")
    if options.programs:
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", os.path.abspath(options.out)], cwd=HERE, check=True,
            env={**os.environ, "CKPTSTORE_WHEEL_PROGRAMS": os.path.abspath(options.programs), "CKPTSTORE_WHEEL_PLATFORM": options.platform},
        )
        return
    if options.helper:
        helper(options.helper)
        return
    wheel(options.out)
    if not options.pure:
        if sys.platform != "linux":
            raise SystemExit("build: the programs run only on Linux: pass --pure")
        with tempfile.TemporaryDirectory() as folder:
            programs(folder, not options.pure_go)
            wheel(options.out, CKPTSTORE_WHEEL_PROGRAMS=folder, CKPTSTORE_WHEEL_PLATFORM=tag(folder))
    for name in sorted(os.listdir(options.out)):
        print(os.path.join(options.out, name))


if __name__ == "__main__":
    main()
