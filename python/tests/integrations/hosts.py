"""Hosts on one machine, as real as namespaces make them.

Each has its own processes, network, name, boot ID, /run and /dev/shm, and its own changes
to /tmp. All other files are those of this machine; one folder is shared, as by a network
filesystem. A crash ends all of a host at once: the frames that it would have sent are lost,
its memory is gone, and what it wrote to the folder is not. The hosts end with this process.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import time
import uuid
from typing import Any, Sequence

LIMIT = 60.0  # seconds for a host to start or to end

_SETUP = r"""
set -e
name=$1 own=$2 shared=$3 shm=$4
hostname "$name"
mount -t tmpfs -o mode=755 tmpfs /run
mkdir /run/shared /run/upper /run/work
mount --bind "$shared" /run/shared # the mounts below may hide it
mount --bind "$own" /mnt
mount -t overlay -o lowerdir=/tmp,upperdir=/run/upper,workdir=/run/work overlay /tmp
mount --bind /run/shared "$shared"
mount -t proc proc /proc
mount --bind /mnt/boot /proc/sys/kernel/random/boot_id
mount -t tmpfs -o "size=$shm,mode=1777" tmpfs /dev/shm
mount --bind /mnt/hosts /etc/hosts
mkdir -m 700 /run/user
echo up >/mnt/up
while :; do sleep 3600 & wait; done
"""


def missing() -> str | None:
    """Return why this machine cannot have hosts, or None."""
    if os.geteuid() != 0:
        return "hosts are namespaces, which root makes"
    for program in ("ip", "nsenter", "unshare", "setpriv", "mount", "hostname", "bash"):
        if shutil.which(program) is None:
            return f"no program {program}"
    tried = subprocess.run(["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "true"], capture_output=True, text=True, timeout=LIMIT, check=False)
    return f"unshare: {tried.stderr.strip()}" if tried.returncode != 0 else None


class Hosts:
    """Hosts on one network, with the addresses 10.77.0.1, 10.77.0.2 and so on."""

    def __init__(self, folder: pathlib.Path, names: Sequence[str], shm: str = "512m"):
        self.folder, self.names, self.shm = folder, list(names), shm
        self._inits: dict[str, subprocess.Popen[bytes]] = {}
        self._firsts: dict[str, int] = {}  # processes that have the number 1 in their host
        self._switch = self._spawn("unshare", "--net", "bash", "-c", "ip link add br0 type bridge && ip addr add 10.77.0.254/24 dev br0 && ip link set br0 up && ip link set lo up && exec sleep infinity")
        _until("the switch is up", lambda: self._on_switch("show", "br0", check=False).returncode == 0)
        for name in names:
            self.boot(name)

    def address(self, name: str) -> str:
        return f"10.77.0.{self.names.index(name) + 1}"

    def boot(self, name: str) -> None:
        """Start a host: with another boot ID, and with empty memory."""
        own = self.folder / "hosts" / name
        own.mkdir(parents=True, exist_ok=True)
        (own / "up").unlink(missing_ok=True)
        (own / "boot").write_text(f"{uuid.uuid4()}\n")
        (own / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{self.address(one)} {one}\n" for one in self.names))
        namespaces = ["--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child", "--propagation", "private"]
        with open(own / "log", "ab") as log:
            init = self._spawn("unshare", *namespaces, "bash", "-c", _SETUP, name, name, str(own), str(self.folder), self.shm, stdout=log)
        self._inits[name] = init
        _until(f"{name} is up; see {own}/log", lambda: (own / "up").exists() or init.poll() is not None)
        if init.poll() is not None:
            raise RuntimeError(f"host {name} has ended: {(own / 'log').read_text()}")
        (self._firsts[name],) = _children(init.pid)
        self._on_switch("add", f"v-{name}", "type", "veth", "peer", "name", "eth0", "netns", str(self._firsts[name]))
        self._on_switch("set", f"v-{name}", "master", "br0", "up")
        for command in (("addr", "add", f"{self.address(name)}/24", "dev", "eth0"), ("link", "set", "eth0", "up"), ("link", "set", "lo", "up"), ("route", "add", "default", "via", "10.77.0.254")):
            subprocess.run(self.command(name, "ip", *command), check=True, timeout=LIMIT)

    def command(self, name: str, *command: str) -> list[str]:
        """Return a command that runs a command on a host, in the directory /."""
        return ["nsenter", "--target", str(self._firsts[name]), "--mount", "--uts", "--ipc", "--net", "--pid", "--", *command]

    def run(self, name: str, *command: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(name, *command), **{"text": True, "capture_output": True, "stdin": subprocess.DEVNULL, "timeout": 2 * LIMIT, "check": False, **options})

    def processes(self, name: str, program: str) -> list[int]:
        """Return the processes of a host that run a program, by their numbers on this machine."""
        space, found = os.readlink(f"/proc/{self._firsts[name]}/ns/pid"), []
        for entry in pathlib.Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "ns/pid") == space and (entry / "comm").read_text().strip() == program[:15]:
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended
        return found

    def memory(self) -> int:
        """Return the proportional memory of all processes of all hosts, in bytes."""
        spaces, total = {os.readlink(f"/proc/{first}/ns/pid") for first in self._firsts.values()}, 0
        for entry in pathlib.Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.readlink(entry / "ns/pid") in spaces:
                    (line,) = [line for line in (entry / "smaps_rollup").read_text().splitlines() if line.startswith("Pss:")]
                    total += int(line.split()[1]) << 10
            except (OSError, ValueError):
                continue
        return total

    def crash(self, name: str) -> None:
        """End all of a host at once. Other hosts notice nothing but silence."""
        self._on_switch("set", f"v-{name}", "down")
        first, init = self._firsts.pop(name), self._inits.pop(name)
        init.kill()
        init.wait(LIMIT)
        _until(f"{name} has ended", lambda: not os.path.exists(f"/proc/{first}"))
        self._on_switch("del", f"v-{name}", check=False)  # the kernel may have done it

    def close(self) -> None:
        for name in list(self._inits):
            self.crash(name)
        self._switch.kill()
        self._switch.wait(LIMIT)

    def _spawn(self, *command: str, stdout: Any = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.STDOUT)

    def _on_switch(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(["nsenter", "--target", str(self._switch.pid), "--net", "--", "ip", "link", *command], check=check, capture_output=True, timeout=LIMIT)


def _children(parent: int) -> list[int]:
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _until(what: str, happened: Any) -> None:
    end = time.monotonic() + LIMIT
    while not happened():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {LIMIT:.0f} s: {what}")
        time.sleep(0.05)
