package testbed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/testbed/netfs"
)

// Limits of a node's life.
const (
	bootLimit = 30 * time.Second // until a node has set itself up
	endLimit  = 30 * time.Second // until the last process of a killed node has ended
)

// Config describes a node.
type Config struct {
	// Name is the node's host name and that of its port at the switch.
	Name string
	// Shm is the size of its /dev/shm in bytes; 0 is 64 MiB.
	Shm int64
	// Binds are directories of the host by their absolute path in the node. Two nodes
	// that bind different directories at one path have a disk each.
	Binds map[string]string
	// Disks are network filesystems that the node mounts when it is powered on.
	Disks []Disk
	// Env is added to the environment of the node's commands, each NAME=VALUE.
	Env []string
}

// Disk is a network filesystem of a node.
type Disk struct {
	At      string // absolute path in the node, below /srv for instance
	Server  *netfs.Server
	Options netfs.Options
}

// Node is a machine of a testbed: namespaces of its own, and every process in them. Its
// methods may be called concurrently.
type Node struct {
	bed     *Testbed
	config  Config
	address netip.Prefix

	mu     sync.Mutex
	boot   *boot // nil while the node is off
	frozen bool
}

// boot is a node's life from power on to power off.
type boot struct {
	pid       int // of pid 1, on the host
	namespace string
	ended     chan struct{} // closed when no process of the node is left
	thread    *thread
	tap       io.ReadWriteCloser
	freezer   freezer
	commands  []*Cmd // that may run
	disks     map[string]*netfs.Client
}

// Name returns the node's host name.
func (n *Node) Name() string { return n.config.Name }

// Addr returns the node's IP address. It keeps it over a power off.
func (n *Node) Addr() netip.Addr { return n.address.Addr() }

// Environ returns the environment of the node's commands: that of this process, with
// the node's own directories.
func (n *Node) Environ() []string {
	env := append(os.Environ(),
		"HOSTNAME="+n.Name(),
		"XDG_RUNTIME_DIR="+runtimeDirectory(os.Geteuid()),
		"XDG_STATE_HOME="+filepath.Join(runtimeDirectory(os.Geteuid()), "state"),
	)
	return append(env, n.config.Env...)
}

// PowerOn boots a node that is off: new namespaces, an empty /dev/shm, a new boot ID,
// the same address, name and disks. It does nothing for a node that is on.
func (n *Node) PowerOn(ctx context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.boot != nil {
		return nil
	}
	b := &boot{thread: newThread(), ended: make(chan struct{}), disks: map[string]*netfs.Client{}}
	err := n.start(ctx, b)
	if err == nil {
		n.boot = b
		return nil
	}
	return fmt.Errorf("power on %s: %w", n.Name(), errors.Join(err, n.end(b)))
}

// start boots b. If it fails, the caller ends b.
func (n *Node) start(ctx context.Context, b *boot) (err error) {
	if err := b.thread.do(func() error { return n.execInit(ctx, b) }); err != nil {
		return err
	}
	if b.namespace, err = os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", b.pid)); err != nil {
		return err
	}
	b.freezer = n.newFreezer(b)
	// Last the mount namespace: its /proc does not show this process.
	err = b.thread.do(func() error { return enter(b.pid, "net", "uts", "ipc", "pid", "mnt") })
	if err != nil {
		return err
	}
	err = b.thread.do(func() error {
		tap, err := openTAP(n.address, n.bed.options.MTU, n.bed.options.Offload)
		if err == nil {
			b.tap = tap
		}
		return err
	})
	if err != nil {
		return err
	}
	if err := n.bed.fabric.Attach(n.Name(), b.tap); err != nil {
		return err
	}
	return b.thread.do(func() error { return n.mount(b) })
}

// mount mounts the node's disks, on its thread.
func (n *Node) mount(b *boot) error {
	for _, d := range n.config.Disks {
		if err := os.MkdirAll(d.At, 0o755); err != nil {
			return fmt.Errorf("mount a disk: %w; use a path below /srv or /tmp", err)
		}
		client, err := d.Server.Mount(d.At, d.Options)
		if err != nil {
			return err
		}
		b.disks[d.At] = client
	}
	return nil
}

// Disk returns the node's mount of the disk at a path, for its counters and faults. A
// node that is powered on again has another one. It is nil if there is no such disk or
// the node is off.
func (n *Node) Disk(at string) *netfs.Client {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.boot == nil {
		return nil
	}
	return n.boot.disks[at]
}

// execInit starts pid 1 and waits until it has set up the node.
func (n *Node) execInit(ctx context.Context, b *boot) error {
	in, give, err := os.Pipe()
	if err != nil {
		return err
	}
	defer give.Close()
	take, out, err := os.Pipe()
	if err != nil {
		in.Close()
		return err
	}
	defer take.Close()
	c := exec.Command("/proc/self/exe")
	c.Args, c.ExtraFiles = []string{initName}, []*os.File{in, out}
	c.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
		Pdeathsig:  unix.SIGKILL,
	}
	err = c.Start()
	in.Close()
	out.Close()
	if err != nil {
		return fmt.Errorf("start pid 1: %w", err)
	}
	b.pid = c.Process.Pid
	go func() {
		_ = c.Wait() // it ends by SIGKILL
		close(b.ended)
	}()
	deadline := time.Now().Add(bootLimit)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	if err := errors.Join(give.SetWriteDeadline(deadline), take.SetReadDeadline(deadline)); err != nil {
		return err
	}
	if err := json.NewEncoder(give).Encode(n.setUp()); err != nil {
		return fmt.Errorf("set up pid 1: %w", err)
	}
	problem, err := io.ReadAll(take)
	if err == nil && len(problem) > 0 {
		err = errors.New(string(problem))
	}
	if err != nil {
		return fmt.Errorf("set up pid 1: %w", err)
	}
	return nil
}

func (n *Node) setUp() setUp {
	s := setUp{
		Hostname: n.Name(), Boot: uuid.NewString(), Shm: n.config.Shm, User: os.Geteuid(),
		Private: []string{"/tmp"}, Empty: []string{"/srv"}, Binds: n.config.Binds,
		Files: map[string]string{"/etc/hosts": n.bed.hosts()},
	}
	if s.Shm == 0 {
		s.Shm = 64 << 20
	}
	if dir := filepath.Clean(os.TempDir()); dir != "/tmp" {
		s.Private = append(s.Private, dir)
	}
	return s
}

func (n *Node) newFreezer(b *boot) freezer {
	if !n.bed.options.Signals {
		if g, err := newCgroup(); err == nil {
			return g
		}
	}
	return &stopper{list: func() ([]Process, error) { return processes(b.namespace) }}
}

// PowerOff takes the power from the node: first the switch loses its frames, then all
// of its processes are killed, which none can notice or delay. What was not synced to
// a disk is lost. It returns when no process of the node is left. It does nothing for
// a node that is off.
func (n *Node) PowerOff() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	b := n.boot
	if b == nil {
		return nil
	}
	n.boot, n.frozen = nil, false
	if err := n.end(b); err != nil {
		return fmt.Errorf("power off %s: %w", n.Name(), err)
	}
	return nil
}

// end frees everything of a boot, however far it came.
func (n *Node) end(b *boot) error {
	n.bed.fabric.Detach(n.Name())
	var err error
	if b.pid != 0 {
		// A process that ends closes its files, which must not write them back.
		for _, d := range b.disks {
			d.Break(netfs.Fault{Hang: true})
		}
		_ = unix.Kill(b.pid, unix.SIGKILL)
		for _, d := range b.disks {
			d.Abort() // a process that waits for the disk can end now
		}
		for _, c := range b.commands {
			go func() { _ = c.Wait() }() // its caller has the error
		}
		limit := time.NewTimer(endLimit)
		defer limit.Stop()
		select {
		case <-b.ended: // the kernel ends pid 1 last
		case <-limit.C:
			err = fmt.Errorf("a process is still there after %v", endLimit)
		}
	}
	for _, d := range b.disks {
		err = errors.Join(err, b.thread.do(d.Unmount))
	}
	b.thread.end()
	if b.tap != nil {
		err = errors.Join(err, b.tap.Close())
	}
	if b.freezer != nil {
		err = errors.Join(err, b.freezer.close())
	}
	return err
}

// Freeze stops all processes of the node: their clocks continue, their connections stay
// open, the kernel still acknowledges what arrives. It returns when no process runs, or an
// error after 10 s: a process cannot stop while it waits for a disk that hangs.
func (n *Node) Freeze() error {
	return n.freezing(true, func(b *boot) error { return b.freezer.freeze() })
}

// Thaw continues a frozen node. Processes that were paused one by one stay so.
func (n *Node) Thaw() error {
	return n.freezing(false, func(b *boot) error { return b.freezer.thaw() })
}

func (n *Node) freezing(to bool, do func(*boot) error) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.boot == nil {
		return fmt.Errorf("freeze or thaw %s: %w", n.Name(), ErrOff)
	}
	if n.frozen == to {
		return nil
	}
	n.frozen = to // also if it fails: some processes may be frozen
	if err := do(n.boot); err != nil {
		return fmt.Errorf("freeze or thaw %s: %w", n.Name(), err)
	}
	return nil
}

// Pause stops one process of the node, by its ID on the host, and returns when none of
// its threads runs. It returns an error if the node has no such process.
func (n *Node) Pause(pid int) error {
	if err := n.signal(pid, unix.SIGSTOP); err != nil {
		return err
	}
	return poll(freezeLimit, fmt.Sprintf("process %d did not stop", pid), func() (bool, error) { return stopped(pid, false), nil })
}

// Resume continues a process that [Node.Pause] stopped.
func (n *Node) Resume(pid int) error { return n.signal(pid, unix.SIGCONT) }

func (n *Node) signal(pid int, s unix.Signal) error {
	all, err := n.Processes()
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(all, func(p Process) bool { return p.PID == pid && p.NodePID != 1 }) {
		return fmt.Errorf("signal process %d of %s: no such process", pid, n.Name())
	}
	return unix.Kill(pid, s)
}

// Processes returns the processes of the node, pid 1 included, and none if the node is
// off. Every process in the node's pid namespace is listed, also orphans and those that left their session.
func (n *Node) Processes() ([]Process, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.boot == nil {
		return nil, nil
	}
	return processes(n.boot.namespace)
}

// Path returns the path by which this process reaches a file of the node, until the
// node is powered off.
func (n *Node) Path(name string) (string, error) {
	pid, err := n.pid()
	return filepath.Join(fmt.Sprintf("/proc/%d/root", pid), name), err
}

func (n *Node) pid() (int, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.boot == nil {
		return 0, fmt.Errorf("node %s: %w", n.Name(), ErrOff)
	}
	return n.boot.pid, nil
}

// Dial connects this process to a numeric address, from the node's network. A freeze of
// the node does not act on this process.
func (n *Node) Dial(ctx context.Context, network, address string) (conn net.Conn, err error) {
	err = n.inNetwork(func() (err error) {
		conn, err = new(net.Dialer).DialContext(ctx, network, address)
		return err
	})
	return conn, err
}

// Listen has this process listen on a numeric address of the node's network. A freeze
// of the node does not act on this process.
func (n *Node) Listen(ctx context.Context, network, address string) (l net.Listener, err error) {
	err = n.inNetwork(func() (err error) {
		l, err = new(net.ListenConfig).Listen(ctx, network, address)
		return err
	})
	return l, err
}

// inNetwork calls fn on a thread in the node's network namespace. Sockets stay where
// they were made.
func (n *Node) inNetwork(fn func() error) error {
	pid, err := n.pid()
	if err != nil {
		return err
	}
	onThread(func() {
		if err = enter(pid, "net"); err == nil {
			err = fn()
		}
	})
	return err
}
