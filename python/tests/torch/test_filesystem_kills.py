"""A process killed between any two filesystem calls leaves the previous checkpoint or its own, whole."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from typing import Any, Callable

from entry_point import install

FOLDER = install()

import fsspec
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ckptstore._requests import Requests
from ckptstore.filesystem import Writer

WORLD = 2
LIMIT = 60.0  # seconds for one process, on a busy machine
DONE = 99  # more calls than any save makes


def state(rank: int, seed: int) -> dict[str, Any]:
    """Return a rank's state: its own tensors, a sharded tensor, and values."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return {
        f"rank{rank}": {"weight": torch.randn(300, 100, generator=generator), "small": torch.randn(3, generator=generator)},
        "shared": torch.full((5,), float(seed)),
        "seed": seed,
    }


def expected(seed: int) -> dict[str, Any]:
    return {**state(0, seed), **state(1, seed)}


def kill_before(call: int) -> None:
    """Kill this process before its n-th filesystem request, counted from 1."""
    made = 0
    real = Requests.__call__

    def counted(self: Requests, request: str, /, **fields: Any) -> Any:
        nonlocal made
        made += 1
        if made == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, request, **fields)

    Requests.__call__ = counted  # type: ignore[method-assign]


def kill_within_a_block() -> None:
    """Kill this process after it has copied half of its first write."""
    real = Writer._fill

    def half(self: Writer, part: memoryview) -> None:
        real(self, part[: len(part) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    Writer._fill = half  # type: ignore[method-assign]


def child(work: Callable[[], None]) -> int:
    """Run a function in a separate process, which has imported torch."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        warnings.simplefilter("ignore")
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(pids: dict[int, int]) -> dict[int, int]:
    """Return the exit code of each process, by rank. A process that does not end is killed: -9."""
    left, out = dict(pids), {}
    deadline = time.monotonic() + LIMIT
    while left:
        for rank, pid in list(left.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                out[rank] = os.waitstatus_to_exitcode(status)
                del left[rank]
        if left and time.monotonic() > deadline:
            for pid in left.values():
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"ranks {sorted(left)} have not ended within {LIMIT} s")
        time.sleep(0.01)
    return out


def quiet() -> None:
    """Hide stderr: the surviving rank prints long errors."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)


class Kills(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # the agent may still be closing its log
        cls.store = str(pathlib.Path(cls.folder.name) / "store")
        cls.trial = 0

    @classmethod
    def tearDownClass(cls) -> None:
        binary = os.environ.get("CKPTSTORE_BIN", "ckptstore")
        subprocess.run([binary, "agent", "stop", "--store", cls.store], capture_output=True, timeout=LIMIT)
        cls.folder.cleanup()

    def setUp(self) -> None:
        os.environ["CKPTSTORE_STORE"] = self.store

    def save(self, url: str, seed: int, killed: int, before: int) -> dict[int, int]:
        """Save on two ranks, one of which is killed before a call, or in the middle of a block for 0.

        Return the exit codes.
        """
        type(self).trial += 1
        meet = f"file://{self.folder.name}/meet{self.trial}"

        def rank_of(rank: int) -> Callable[[], None]:
            def work() -> None:
                if rank == killed:
                    kill_before(before) if before else kill_within_a_block()
                if before < DONE:
                    quiet()
                dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=WORLD)
                dcp.save(state(rank, seed), checkpoint_id=url)
                dist.barrier()

            return work

        return ended({rank: child(rank_of(rank)) for rank in range(WORLD)})

    def loaded(self, url: str, *seeds: int) -> int:
        """Return the seed of all bytes of a checkpoint, and check that the listing agrees."""
        read, write = os.pipe()

        def work() -> None:
            into = expected(0)
            into["seed"] = -1
            dcp.load(into, checkpoint_id=url, no_dist=True)
            run, name = url.removeprefix("ckptstore://").split("/")
            fs = fsspec.filesystem("ckptstore")
            names = fs.ls(run, detail=False)
            assert names.count(f"{run}/{name}") == 1, names
            assert fs.isdir(url) and fs.isfile(url + "/.metadata") and not fs.exists(url + "/.metadata.tmp"), fs.ls(url)
            os.write(write, json.dumps([s for s in seeds if same(into, expected(s))]).encode())

        how = ended({0: child(work)})
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        self.assertEqual(how, {0: 0})
        found = json.loads(text)
        self.assertEqual(len(found), 1, f"the checkpoint is none of {seeds}")
        return found[0]

    def listed(self, run: str) -> list[str]:
        read, write = os.pipe()
        how = ended({0: child(lambda: os.write(write, json.dumps(fsspec.filesystem("ckptstore").ls(run, detail=False)).encode()))})
        os.close(write)
        with os.fdopen(read) as pipe:
            text = pipe.read()
        self.assertEqual(how, {0: 0})
        return json.loads(text)

    def test_a_kill_between_any_two_calls_leaves_the_old_or_the_new_checkpoint(self) -> None:
        url = "ckptstore://again/step-1"
        self.assertEqual(self.save(url, 1, 0, DONE), {0: 0, 1: 0})
        seed, have = 1, 1
        for killed in range(WORLD):
            before, over = 0, False
            while not over:
                before, seed = before + 1, seed + 1
                with self.subTest(rank=killed, before=before):
                    how = self.save(url, seed, killed, before)
                    over = how[killed] == 0  # the save made fewer calls
                    now = self.loaded(url, have, seed)
                    if over:
                        self.assertEqual((how, now), ({0: 0, 1: 0}, seed))
                    else:
                        self.assertEqual(how[killed], -signal.SIGKILL)
                    have = now
                if before == DONE:
                    self.fail("a save makes too many calls")
            # Fewer calls would mean that some are not counted.
            self.assertGreater(before, (7, 3)[killed])

    def test_a_kill_within_a_block_leaves_the_old_checkpoint(self) -> None:
        url = "ckptstore://within/step-1"
        self.assertEqual(self.save(url, 1, 0, DONE), {0: 0, 1: 0})
        for killed in range(WORLD):
            how = self.save(url, 2 + killed, killed, 0)
            self.assertEqual((how[killed], self.loaded(url, 1, 2, 3)), (-signal.SIGKILL, 1))
        self.assertEqual(self.save(url, 4, 0, DONE), {0: 0, 1: 0})
        self.assertEqual(self.loaded(url, 1, 2, 3, 4), 4)

    def test_a_kill_in_a_save_under_a_new_name_leaves_none_or_all_of_it(self) -> None:
        self.assertEqual(self.save("ckptstore://fresh/step-0", 1, 0, DONE), {0: 0, 1: 0})
        for before in range(1, DONE):
            name = f"step-{before}"
            how = self.save(f"ckptstore://fresh/{name}", 1 + before, 0, before)
            with self.subTest(before=before):
                names = self.listed("fresh")
                self.assertIn("fresh/step-0", names)
                self.assertEqual(self.loaded("ckptstore://fresh/step-0", 1), 1)
                if how[0] == 0:
                    self.assertIn("fresh/" + name, names)
                if "fresh/" + name in names:
                    self.assertEqual(self.loaded(f"ckptstore://fresh/{name}", 1 + before), 1 + before)
            if how[0] == 0:
                return
        self.fail("a save makes too many calls")


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    if a.keys() != b.keys():
        return False
    return all(
        same(a[k], b[k]) if isinstance(b[k], dict) else torch.equal(a[k], b[k]) if isinstance(b[k], torch.Tensor) else a[k] == b[k] for k in b
    )


if __name__ == "__main__":
    unittest.main()
