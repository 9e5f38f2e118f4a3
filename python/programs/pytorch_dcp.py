"""PyTorch's own tests of its distributed checkpoint, with the store as their storage.

The runner is python/conformance. It runs each test with the store's storage, reruns failed
tests with PyTorch's own, and fails for a difference that its known.json does not list. The
tests are those of a release: from its commit, or from a source tree of that version,
--sources DIR/pytorch-VERSION with its version.txt.
"""

from __future__ import annotations

import pathlib
import subprocess

from running import PYTHON, Failed, Missing, Place

URL, FOLDER = "https://github.com/pytorch/pytorch", "test/distributed"
COMMITS = {"2.14.1": "5c4886908584029761b579af026dcfb627c84070", "2.6.0": None}  # None: a source tree only
RUNNER = pathlib.Path(__file__).resolve().parents[1] / "conformance" / "run.py"
LIMIT = 900.0  # seconds for all tests of a release, by one way


def tests(place: Place, version: str, way: str) -> str:
    place.needs("expecttest")
    name, commit = f"pytorch-{version}", COMMITS[version]
    tree = place.tree(name, version)
    if tree is None and commit is None:
        raise Missing(f"give --sources DIR with {name}, the source tree of that release")
    if tree is None:
        tree = place.source(name, URL, commit, FOLDER)
    try:
        done = subprocess.run(
            [PYTHON, str(RUNNER), str(tree), "--way", way], cwd=place.base, env=place.environment(place.base / "store-dcp-tests"),
            capture_output=True, text=True, timeout=LIMIT, check=False,
        )
    except subprocess.TimeoutExpired as late:
        raise Failed(f"the tests have not ended after {LIMIT:g} s") from late
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode == 2 or not lines:
        raise Missing((done.stderr.strip().splitlines() or ["no test was found"])[-1])
    if done.returncode != 0:
        raise Failed(" / ".join(lines[-4:]))
    return lines[-1]


PROGRAMS = {
    f"pytorch-{version}-dcp-tests-{way}": lambda place, version=version, way=way: tests(place, version, way)
    for version in COMMITS for way in ("native", "fsspec")
}
