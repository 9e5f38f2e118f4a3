"""PyTorch's own tests of torch.distributed.checkpoint, with the store in the place of its files.

Each test file that names a storage is run three times, with one line before it (`import
storage`, of instead/storage.py): with PyTorch's FileSystemWriter and FileSystemReader, with
ckptstore.dcp's, and with PyTorch's own on ckptstore:// URLs. A test passes when it does so and
has written to or read from the store. It is not applicable where it is skipped or fails with
PyTorch's files as well, uses no storage, or is named in NOT_APPLICABLE; all others fail.
"""

from __future__ import annotations

import collections
import json
import pathlib
import re
import subprocess

from running import DEADLINE, PYTHON, Failed, Place

URL, FOLDER = "https://github.com/pytorch/pytorch", "test/distributed/checkpoint"

# The repository of --sources, by version of the tests, and its commit.
COMMITS = {
    "2.14": ("pytorch-2.14", "5c4886908584029761b579af026dcfb627c84070"),  # v2.14.1
    "2.1": ("pytorch-2.1", "1149ba5553dc3467afed7e1867dffc7065c742c7"),  # main, 2023-04-12
}

STORAGE = re.compile(r"FileSystem(Writer|Reader)|checkpoint_id")
INSTEAD = pathlib.Path(__file__).resolve().with_name("instead")

WAYS = ("writer", "url")

# What is no statement about a store, unless it passes: a pattern of the test's name, and why.
NOT_APPLICABLE = {
    r"Rot13|ZStandard": "stream transforms (_extensions), which the store refuses",
    r"ThreadCount": "the threads and the private methods of FileSystemWriter",
    r"test_storage_meta": "compares the checkpoint ID with the path, which was replaced",
}


def tests(place: Place, version: str) -> str:
    place.needs("expecttest")
    name, commit = COMMITS[version]
    folder = place.source(name, URL, commit, FOLDER) / FOLDER
    files = [file for file in sorted(folder.rglob("test_*.py")) if STORAGE.search(file.read_text())]
    passed, counted, failed = 0, collections.Counter[str](), []
    for file in files:
        file.write_text("import storage\n" + file.read_text())
        theirs = _results(place, file, "none", f"{version}-none")
        for way in WAYS:
            if not any(own["outcome"] == "passed" for own in theirs.values()):
                ours = theirs
            else:
                ours = _results(place, file, way, f"{version}-{way}")
            for test, result in ours.items():
                own = theirs.get(test, {"outcome": "absent", "why": "is not found with PyTorch's files"})
                excused = next((why for pattern, why in NOT_APPLICABLE.items() if re.search(pattern, test)), None)
                if own["outcome"] != "passed":
                    why = f"is {own['outcome']} with PyTorch's files too: {_last(own['why'])}"
                elif not own["used"]:
                    why = "uses no storage"
                elif result["outcome"] == "passed" and result["used"]:
                    passed += 1
                    continue
                elif excused is not None:
                    why = excused
                else:
                    failed.append(f"{way}: {test}: {_last(result['why']) or result['outcome'] + ', and nothing was in the store'}")
                    continue
                counted[way] += 1
                print(f"    {way}: {test}: not applicable: {why}", flush=True)
    if failed or not passed:
        raise Failed(f"{len(failed)} of {passed + len(failed)} tests fail: " + " / ".join(failed))
    return f"{passed} passed, {sum(counted.values())} not applicable, over {len(WAYS)} ways ({len(files)} files that use a storage)"


def _last(why: str) -> str:
    lines = [line.strip() for line in why.splitlines() if line.strip() and "PYTORCH_" not in line]
    return next((line for line in reversed(lines) if re.match(r"[\w.]*[A-Z]\w+: ", line)), lines[-1] if lines else "")[:200]


def _results(place: Place, file: pathlib.Path, way: str, name: str) -> dict[str, dict]:
    """What became of each test of a file: outcome, why, and how often it has used the storage."""
    base = place.base / f"dcp-{name}"
    base.mkdir(exist_ok=True)
    log, results = base / f"{file.stem}.log", base / f"{file.stem}.json"
    log.touch()
    env = place.environment(
        base / "store", CKPTSTORE_INSTEAD=way, CKPTSTORE_INSTEAD_LOG=str(log), CKPTSTORE_RUN=file.stem, PYTORCH_PRINT_REPRO_ON_FAILURE="0",
    )
    env["PYTHONPATH"] = ":".join([str(INSTEAD), str(file.parent), env.get("PYTHONPATH", "")])
    try:
        done = subprocess.run([PYTHON, "-W", "ignore", str(INSTEAD / "storage.py"), file.stem, str(results)], cwd=base, env=env,
                              capture_output=True, text=True, timeout=DEADLINE, check=False)
        said = done.stderr
    except subprocess.TimeoutExpired:
        said = f"{file.name} has not ended after {DEADLINE:g} s"
    if not results.exists():
        return {f"{file.stem}": {"outcome": "failed", "why": said, "used": 0}}
    times = [float(line.split()[0]) for line in log.read_text().splitlines()]
    outcomes = json.loads(results.read_text())
    for result in outcomes.values():
        result["used"] = sum(result.get("began", 0) <= at <= result.get("ended", 0) for at in times)
    return outcomes


PROGRAMS = {f"pytorch-{version}-dcp-tests": lambda place, version=version: tests(place, version) for version in COMMITS}
