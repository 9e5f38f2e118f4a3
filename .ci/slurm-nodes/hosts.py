"""Hosts on this machine, and Slurm on them.

A host is a set of namespaces. It has its own processes, network, name, /run, /tmp, /dev/shm and boot
ID. Its files are those of a root directory, which stays unchanged: what a host writes lies in a layer
of its own, its disk, which outlives a crash. The shared directory is on all hosts, as a network
filesystem would be. All of it ends with this program, also when that is killed.
"""

import contextlib
import ctypes
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import uuid

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "deploy" / "kubernetes" / "cluster"))

from lab import Wrong, wait  # noqa: E402

CLONE_NEWNS = 0x20000
NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")

# The first process of a host: it makes the host's files, and then waits for orphans.
FIRST = r"""
set -e
name=$1 disk=$2 root=$3 names=$4
shift 4
mount -t overlay overlay -o "lowerdir=$root,upperdir=$disk/upper,workdir=$disk/work" "$disk/root"
cd "$disk/root"
mkdir -p old proc sys dev run tmp
mount -t proc proc proc
mount --bind "$disk/boot_id" proc/sys/kernel/random/boot_id
mount --rbind /sys sys
mount --rbind /dev dev
mount -t tmpfs -o size=2g,mode=1777 tmpfs dev/shm
mount -t tmpfs -o mode=755 tmpfs run
mkdir run/lock
mount -t tmpfs -o mode=1777 tmpfs tmp
for d in "$@"; do
	mkdir -p ".$d"
	mount --rbind "$d" ".$d"
done
rm -f etc/hosts etc/resolv.conf etc/hostname
printf '127.0.0.1 localhost\n%s\n' "$names" >etc/hosts
: >etc/resolv.conf
echo "$name" >etc/hostname
hostname "$name"
pivot_root . old
cd /
umount -l /old
echo ready
exec bash -c 'exec >/dev/null; while :; do sleep 3600 & wait; done'
"""


class Missing(Exception):
    """This machine, or the root, lacks something that the campaign needs."""


def spawn(command, **options):
    """Start a process that ends with this one. It gets no signal of this one's terminal or group."""
    return subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *map(str, command)], stdin=subprocess.DEVNULL, start_new_session=True, **options)


class Host:
    def __init__(self, lab, name, number):
        self.lab, self.name, self.address = lab, name, f"10.77.0.{number}"
        self.disk = lab.disks / name
        self.first = None  # the process that holds the namespaces' first one
        self.pid = 0  # of the namespaces' first process
        self.daemons = []

    def boot(self):
        for d in ("upper", "work", "root"):
            (self.disk / d).mkdir(parents=True, exist_ok=True)
        (self.disk / "boot_id").write_text(f"{uuid.uuid4()}\n")
        names = "\n".join(f"{h.address} {h.name}" for h in self.lab.hosts.values())
        with open(self.lab.logs / f"host.{self.name}.log", "a") as log:
            self.first = spawn(
                ["unshare", *NAMESPACES, "--fork", "--kill-child", "bash", "-c", FIRST, "first", self.name, self.disk, self.lab.root, names, *self.lab.sees],
                stdout=subprocess.PIPE, stderr=log,
            )
        readable, _, _ = select.select([self.first.stdout], [], [], 30)
        ready = self.first.stdout.readline() if readable else b""
        self.first.stdout.close()
        if ready != b"ready\n":
            raise Missing(f"no host in namespaces: {(self.lab.logs / f'host.{self.name}.log').read_text().strip()}")
        self.pid = int(pathlib.Path(f"/proc/{self.first.pid}/task/{self.first.pid}/children").read_text())
        cable = f"v-{self.name}"
        self.lab.switch("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        self.lab.switch("link", "set", cable, "master", "br0", "up")
        self.on("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.on("ip", "link", "set", "lo", "up")
        self.on("ip", "link", "set", "eth0", "up")

    def crash(self):
        """End all of the host at once. Other hosts receive no last frame from it."""
        if self.first is None:
            return
        self.lab.switch("link", "del", f"v-{self.name}", check=False)
        self.first.kill()  # with it, the first process of the namespaces, and so all others
        self.first.wait()
        wait(f"{self.name} has ended", 30, lambda: not os.path.exists(f"/proc/{self.pid}"))
        for daemon in self.daemons:
            daemon.wait()
        self.first, self.pid, self.daemons = None, 0, []

    def enter(self, *command):
        return ["nsenter", "--target", str(self.pid), *NAMESPACES, "--", "env", "-i", *(f"{k}={v}" for k, v in self.lab.env.items()), *map(str, command)]

    def on(self, *command, check=True, limit=60):
        """Run a command on the host, and return what it prints."""
        done = subprocess.run(self.enter("timeout", limit, *command), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit + 30)
        if check and done.returncode != 0:
            raise Wrong(f"{self.name}: {' '.join(map(str, command))}: exit code {done.returncode}: {(done.stderr or done.stdout).strip()}")
        return done.stdout if done.returncode == 0 else ""

    def daemon(self, program, *arguments):
        with open(self.lab.logs / f"{program}.{self.name}.log", "a") as log:
            self.daemons.append(spawn(self.enter(*arguments), stdout=log, stderr=log))


class Lab:
    """A switch and hosts. The hosts' files are those of root."""

    def __init__(self, root, names, sees):
        self.root, self.env, self.network = root, dict(os.environ), None
        self.dir = pathlib.Path(tempfile.mkdtemp(prefix="slurm-nodes-")).resolve()
        self.disks, self.logs, self.shared = self.dir / "disks", self.dir / "log", self.dir / "shared"
        self.sees = sorted({str(self.shared), *map(str, sees)})  # a directory before those in it
        self.hosts = {name: Host(self, name, 10 + i) for i, name in enumerate(names)}

    def start(self):
        """Make the switch. The mounts of this process are its own from now on."""
        for program in ("ip", "nsenter", "unshare", "setpriv", "mount"):
            if not shutil.which(program):
                raise Missing(f"no {program}")
        if os.getuid() != 0:
            raise Missing("its hosts are namespaces, which root makes")
        if ctypes.CDLL(None).unshare(CLONE_NEWNS) != 0 or subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True).returncode != 0:
            raise Missing("mounts are not allowed")
        for d in (self.disks, self.logs, self.shared):
            d.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", self.disks], check=True)  # an overlay's layers must not lie in each other
        self.network = spawn(["unshare", "--net", "sleep", "infinity"])
        own = os.stat("/proc/self/ns/net").st_ino
        wait("the switch", 10, lambda: os.stat(f"/proc/{self.network.pid}/ns/net").st_ino != own)
        self.switch("link", "add", "br0", "type", "bridge")
        self.switch("link", "set", "br0", "up")

    def switch(self, *words, check=True):
        done = subprocess.run(["nsenter", "--target", str(self.network.pid), "--net", "ip", *words], capture_output=True, text=True, timeout=30)
        if check and done.returncode != 0:
            raise Missing(f"ip {' '.join(words)}: {done.stderr.strip()}")

    def close(self, keep=False):
        for host in self.hosts.values():
            with contextlib.suppress(Wrong):
                host.crash()
        if self.network:
            self.network.kill()
            self.network.wait()
            subprocess.run(["umount", "--lazy", self.disks], check=False)
        if not keep:
            shutil.rmtree(self.dir, ignore_errors=True)


CONFIGURATION = """\
ClusterName=lab
SlurmctldHost=ctl({control})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=/run/munge/socket
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0,requeue_delay=0
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=15
SlurmdParameters=config_overrides
KillWait=20
MinJobAge=3600
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=day Nodes=ALL Default=YES PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=60 MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


class Slurm:
    """slurmctld on the first host of a lab, slurmd on the others. A job has its hosts alone."""

    def __init__(self, lab):
        self.lab = lab
        self.control, *self.nodes = lab.hosts.values()
        self.version = ""
        self.hastened = set()

    def start(self):
        for host in self.lab.hosts.values():
            host.boot()
        for program in ("munged", "slurmctld", "slurmd", "srun", "sbatch", "squeue", "scontrol", "sinfo", "setpriv", "ip"):
            if not self.control.on("sh", "-c", f"command -v {program}", check=False):
                raise Missing(f"no {program} in {self.lab.root}: install slurmctld, slurmd, slurm-client and munge there")
        self.version = self.control.on("slurmd", "-V").split()[-1]
        etc = pathlib.Path(self.lab.env["SLURM_CONF"]).parent
        etc.mkdir()
        (etc / "munge.key").write_bytes(os.urandom(1024))
        # 22.05 looks for cgroups even where nothing uses them.
        old = int(self.version.split(".")[0]) <= 22
        (etc / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n" if old else "CgroupPlugin=disabled\n")
        nodes = "\n".join(f"NodeName={h.name} NodeAddr={h.address} CPUs=1 State=UNKNOWN" for h in self.nodes)
        (etc / "slurm.conf").write_text(CONFIGURATION.format(control=self.control.address, nodes=nodes))
        self.munge(self.control)
        self.control.on("mkdir", "-p", "/var/spool/slurmctld")
        self.control.daemon("slurmctld", "slurmctld", "-D", "-c")
        for host in self.nodes:
            self.serve(host)
        wait("all nodes are idle", 60, lambda: self.idle(*self.nodes))

    def munge(self, host):
        key = pathlib.Path(self.lab.env["SLURM_CONF"]).parent / "munge.key"
        host.on("sh", "-c", f"install -d -o munge -g munge -m 711 /run/munge && install -o munge -g munge -m 400 '{key}' /run/munge/key")
        host.daemon("munged", "setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "munged", "--foreground", "--socket=/run/munge/socket",
                    "--key-file=/run/munge/key", "--pid-file=/run/munge/pid", "--log-file=/run/munge/log", "--seed-file=/run/munge/seed")
        wait(f"munged answers on {host.name}", 30, lambda: host.on("sh", "-c", "test -S /run/munge/socket && echo yes", check=False))

    def serve(self, host):
        """Start slurmd on a host that has just booted."""
        self.munge(host)
        host.on("mkdir", "-p", "/var/spool/slurmd")
        host.daemon("slurmd", "slurmd", "-D")

    def ask(self, *command, check=True):
        return self.control.on(*command, check=check).strip()

    def idle(self, *hosts):
        return set(self.ask("sinfo", "-h", "-N", "-t", "idle", "-p", "day", "-o", "%N", check=False).split()) >= {h.name for h in hosts}

    def hosts_of(self, job):
        """Return the hosts of a running job, in the order of its nodes."""
        names = self.ask("scontrol", "show", "hostnames", self.ask("squeue", "-h", "-j", job, "-o", "%N")).split()
        return [self.lab.hosts[n] for n in names]

    def field(self, job, name):
        """Return a field of a job, as scontrol shows it."""
        for word in self.ask("scontrol", "-o", "show", "job", job).split():
            key, _, value = word.partition("=")
            if key == name:
                return value
        raise Wrong(f"job {job} has no {name}")

    def hasten(self):
        """Start requeued jobs early. Slurm would let them wait for two minutes; it needs some seconds to drop the previous credential."""
        for line in self.ask("squeue", "-h", "-t", "PD", "-o", "%A %r", check=False).splitlines():
            job, _, reason = line.partition(" ")
            again = (job, self.field(job, "Restarts"))
            if reason == "BeginTime" and again not in self.hastened:
                self.ask("scontrol", "update", f"JobId={job}", "StartTime=now+3seconds", check=False)  # it may have just started
                self.hastened.add(again)
