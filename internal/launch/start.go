package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/launch/standby"
	"golang.org/x/sys/unix"
)

// start opens the sockets and starts the processes.
func (w *watch) start(ctx context.Context, restart int) (err error) {
	if err := w.holdPort(); err != nil {
		return err
	}
	w.others.start(ctx, w.port.port)
	if err := w.enlist(ctx); err != nil {
		return err
	}
	if w.guard != nil {
		w.guard.Await()
	}
	restore, err := process.Unblocked()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, restore()) }()
	w.tokens = map[int]string{}
	for local, rank := range w.cfg.Local() {
		socket, token, err := w.group.Serve(rank)
		if err != nil {
			return err
		}
		w.tokens[rank] = token
		set := torchEnv(w.cfg, w.group.Number, restart, rank, w.port.port, w.group.File(rank, "error.json"))
		maps.Copy(set, w.backendHooks.env(local))
		set[client.EnvSocket], set[client.EnvToken] = socket, token
		maps.Copy(set, w.marked())
		set[client.EnvResume] = w.group.Resume
		set[client.EnvStoreID] = w.store.ID
		set[client.EnvRPC] = w.group.File(rank, rpcSocket)
		if w.cfg.Quiet {
			set[client.EnvQuiet] = "1"
		}
		stdout, stderr := w.outputs(rank)
		p := w.standbys.Start(rank, set, stdout, stderr)
		if p == nil {
			env := mergeEnv(inherited(w.cfg.Withheld), set)
			if p, err = process.Start(rank, w.cfg.Command, env, stdout, stderr); err != nil {
				return fmt.Errorf("%w: %w", ErrConfig, err)
			}
		}
		w.procs = append(w.procs, p)
		// The process has not been reaped yet, so its /proc entry exists even if
		// it has ended.
		root, err := p.Root()
		if err != nil {
			return err
		}
		w.processes.Add(root)
		w.guard.Watch(root)
		go func() {
			e := p.Wait()
			w.group.EndMessages(e.Rank)
			w.signals.gone(e.Rank)
			w.backendHooks.died(e)
			w.exits <- e
		}()
	}
	return nil
}

// keepStandbys starts processes that wait for the ranks of this node's next group, until the caller
// calls stop.
func (j *job) keepStandbys() (stop func(), err error) {
	if len(j.cfg.Preload) == 0 {
		return func() {}, nil
	}
	command, ok := standby.Command(j.cfg.Command, j.cfg.Preload)
	if !ok {
		return nil, fmt.Errorf("%w: --preload: the command is no Python script or module; leave the flag out", ErrConfig)
	}
	set := torchEnv(j.cfg, 0, 0, j.cfg.Local()[0], 0, "")
	for _, unknown := range []string{"RANK", "LOCAL_RANK", "ROLE_RANK", "GROUP_RANK", "WORLD_SIZE", "ROLE_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE", client.EnvAttempt} {
		delete(set, unknown)
	}
	maps.Copy(set, j.marked())
	set[client.EnvStoreID] = j.store.ID
	j.standbys, err = standby.New(command, mergeEnv(inherited(j.cfg.Withheld), set), len(j.cfg.Local()), j.cfg.Job, j.index(), j.processes, j.log)
	return j.standbys.Stop, err
}

// marked returns the variables of [job.marks].
func (j *job) marked() map[string]string {
	set := map[string]string{}
	for _, mark := range j.marks() {
		name, value, _ := strings.Cut(mark, "=")
		set[name] = value
	}
	return set
}

// torchEnv returns the environment that torchrun gives a worker, so that a script
// written for torchrun runs unchanged.
func torchEnv(cfg Config, attempt, restart, rank, port int, errorFile string) map[string]string {
	world, local := strconv.Itoa(cfg.World()), strconv.Itoa(len(cfg.Local()))
	env := map[string]string{
		"RANK":                            strconv.Itoa(rank),
		"LOCAL_RANK":                      strconv.Itoa(slices.Index(cfg.Local(), rank)),
		"WORLD_SIZE":                      world,
		"LOCAL_WORLD_SIZE":                local,
		"GROUP_RANK":                      strconv.Itoa(cfg.Node),
		"GROUP_WORLD_SIZE":                strconv.Itoa(len(cfg.Nodes)),
		"ROLE_NAME":                       cmp.Or(cfg.Torch.Role, "default"),
		"ROLE_RANK":                       strconv.Itoa(rank),
		"ROLE_WORLD_SIZE":                 world,
		"MASTER_ADDR":                     cfg.Torch.masterAddr(),
		"MASTER_PORT":                     strconv.Itoa(port),
		"TORCHELASTIC_RUN_ID":             cmp.Or(cfg.Torch.RunID, cfg.Run),
		"TORCHELASTIC_RESTART_COUNT":      strconv.Itoa(restart),
		"TORCHELASTIC_MAX_RESTARTS":       strconv.Itoa(cfg.MaxRestarts),
		"TORCHELASTIC_ERROR_FILE":         errorFile,
		"TORCHELASTIC_SIGNALS_TO_HANDLE":  "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
		"TORCHELASTIC_USE_AGENT_STORE":    "False",
		"TORCH_NCCL_ASYNC_ERROR_HANDLING": ncclErrorHandling(),
		client.EnvRun:                     cfg.Run,
		client.EnvJob:                     cfg.Job,
		client.EnvTrial:                   cfg.Trial,
		client.EnvAttempt:                 strconv.Itoa(attempt),
	}
	if len(cfg.Local()) > 1 && os.Getenv("OMP_NUM_THREADS") == "" {
		env["OMP_NUM_THREADS"] = "1"
	}
	return env
}

// mergeEnv returns base with the variables of set added or replaced.
func mergeEnv(base []string, set map[string]string) []string {
	var out []string
	for _, kv := range base {
		name, _, _ := strings.Cut(kv, "=")
		if _, ok := set[name]; !ok {
			out = append(out, kv)
		}
	}
	for k, v := range set {
		out = append(out, k+"="+v)
	}
	return out
}

// inherited is this process's environment without the withheld variables.
func inherited(withheld []string) []string {
	return slices.DeleteFunc(os.Environ(), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return slices.Contains(withheld, name)
	})
}

// HeldPort is a TCP port reserved for rank 0. It is bound with SO_REUSEADDR and
// never listens, so rank 0 can bind it too.
type HeldPort struct {
	fd   int
	port int
}

// HoldPort holds a free port for rank 0 of a later group.
func HoldPort() (*HeldPort, error) { return holdPort(0) }

// Port returns the number of the port.
func (h *HeldPort) Port() int { return h.port }

// holdPort holds a port, a free one if port is 0.
func holdPort(port int) (*HeldPort, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, notHeld(port, err)
	}
	err = errors.Join(
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
		unix.Bind(fd, &unix.SockaddrInet4{Port: port}),
	)
	var at unix.Sockaddr
	if err == nil {
		at, err = unix.Getsockname(fd)
	}
	if err != nil {
		_ = unix.Close(fd)
		return nil, notHeld(port, err)
	}
	return &HeldPort{fd, at.(*unix.SockaddrInet4).Port}, nil
}

// holdPort holds the port of the group's master, if rank 0 is on this node. Otherwise
// rank 0's node holds it.
func (w *watch) holdPort() (err error) {
	master := -1
	switch {
	case w.part != nil:
		master = w.part.order.MasterPort
	case w.others != nil:
		if first := w.fleet.members[0]; first.Index != w.fleet.own() {
			master = first.Port
		}
		w.cfg.Torch.MasterAddr = w.fleet.members[0].Address
	}
	switch {
	case master < 0:
		w.port, err = w.cfg.Torch.masterPort()
	case w.port0 != nil && w.cfg.Local()[0] == 0: // promised to the coordinating process
		w.port, w.port0 = w.port0, nil
	default:
		w.port = &HeldPort{fd: -1, port: master}
	}
	return err
}

func notHeld(port int, err error) error {
	if port == 0 {
		return fmt.Errorf("find a free port for MASTER_PORT: %w", err)
	}
	return fmt.Errorf("hold MASTER_PORT %d: %w", port, err)
}

func (h *HeldPort) release() {
	if h.fd >= 0 {
		_ = unix.Close(h.fd)
	}
}

// TorchConfig holds the settings of torchrun's flags for the workers'
// environment.
type TorchConfig struct {
	Role       string // ROLE_NAME; default "default"
	RunID      string // TORCHELASTIC_RUN_ID; default: the run's name
	MasterAddr string // default 127.0.0.1
	MasterPort int    // default: a free port, another for each attempt
}

func (c TorchConfig) masterAddr() string { return cmp.Or(c.MasterAddr, "127.0.0.1") }

// masterPort holds the port for rank 0.
func (c TorchConfig) masterPort() (*HeldPort, error) {
	h, err := holdPort(c.MasterPort)
	if errors.Is(err, syscall.EADDRINUSE) || errors.Is(err, syscall.EACCES) {
		return nil, fmt.Errorf("%w: %w; choose another --master-port, or leave it out for a free one", ErrConfig, err)
	}
	return h, err
}

// ncclErrorHandling returns the user's choice, or torchrun's.
func ncclErrorHandling() string {
	if v, set := os.LookupEnv("TORCH_NCCL_ASYNC_ERROR_HANDLING"); set {
		return v
	}
	return "1"
}
