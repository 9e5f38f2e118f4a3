"""Stores that the user can read but not write."""

from __future__ import annotations

import os
import pathlib
import shutil
import stat
import sys
import textwrap

from launch import CKPTSTORE, Launches

OTHER_UID = 65534

# An agent without write permission. Under root, it runs as a user who owns no files.
UNPRIVILEGED = f"""
    #!{sys.executable}
    import os, sys
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid({OTHER_UID})
        os.setuid({OTHER_UID})
    os.environ["XDG_RUNTIME_DIR"] = RUNTIME
    os.execv(PROGRAM, ["ckptstore", *sys.argv[1:]])
"""

READS = """
    checkpoint = ckptstore.open("train@latest")
    from ckptstore._reading import read
    with read(services(), checkpoint.ref, [{"fqn": "w", "dtype": "float32", "shape": [4], "offsets": [1], "sizes": [2]}]) as loaded:
        emit([checkpoint.id, checkpoint.step, list(checkpoint.tensors), loaded.bytes(0).decode()])
    emit([row["checkpoint"] for row in services().call("store/list")["checkpoints"]])
    for attempt in (lambda: ckptstore.open("train@step-7"), current, lambda: services().call("store/fs/stat", path="train")):
        try:
            attempt()
        except ckptstore.Refused as refused:
            emit([refused.status, refused.message])
"""


class ReadOnly(Launches):
    def setUp(self) -> None:
        super().setUp()
        self.runtime = os.path.join(self.folder, "r")
        os.mkdir(self.runtime)

    def unprivileged(self) -> str:
        program = os.path.join(self.folder, "program")
        shutil.copy(CKPTSTORE, program)
        os.chmod(program, 0o755)
        os.chmod(self.folder, 0o755)
        if os.geteuid() == 0:
            os.chown(self.runtime, OTHER_UID, OTHER_UID)
        os.chmod(self.runtime, 0o700)
        path = os.path.join(self.folder, "ckptstore")
        source = textwrap.dedent(UNPRIVILEGED).lstrip().replace("PROGRAM", repr(program)).replace("RUNTIME", repr(self.runtime))
        pathlib.Path(path).write_text(source)
        os.chmod(path, 0o755)
        return path

    def seal(self) -> None:
        """Make the store readable for all users, and writable only for root."""
        paths = [pathlib.Path(self.store), *pathlib.Path(self.store).rglob("*")]
        for path in paths:
            mode = stat.S_IMODE(path.stat().st_mode)
            self.addCleanup(os.chmod, path, mode)
            os.chmod(path, 0o555 if path.is_dir() else 0o444)

    def test_is_read_and_not_written(self) -> None:
        self.program("""
            slot = save(current(), 3, b"aaaabbbbccccdddd")
            current().wait(slot.checkpoint, "committed")
        """)
        self.stop_agent()
        self.seal()
        program = self.unprivileged()
        try:
            heard = self.program(READS, CKPTSTORE_BIN=program)
        finally:
            stopped = self.run_program([program, "agent", "stop", "--now", "--store", self.store])
        self.assertEqual(stopped.returncode, 0, stopped.stderr)
        self.assertEqual(heard[:2], [["step-3.a1", 3, ["w"], "bbbbcccc"], ["step-3.a1"]])
        (missing, absent), (refused, why), (files, instead) = heard[2:]
        self.assertEqual((missing, refused, files), (404, 403, 403))
        self.assertIn("step-7", absent)
        self.assertIn(self.store, why)
        self.assertIn("ckptstore.open", why)
        self.assertIn("ckptstore.open", instead)
