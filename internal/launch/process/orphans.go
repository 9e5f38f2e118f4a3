package process

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/client"
)

// trainerWait bounds how long a trainer may take to accept a connection.
const trainerWait = time.Second

// Orphans narrows the hunt to processes whose trainer is dead: the environment
// names the trainer's socket, [client.EnvSocket], and no process listens there. A
// process with the marker of a job that is spared because its trainer is not dead
// is logged, once.
func (h *Hunt) Orphans(ctx context.Context, log *slog.Logger) *Hunt {
	said := map[int]bool{}
	h.spares = func(pid int, env [][]byte) bool {
		why := hasTrainer(ctx, env)
		if why != "" && !said[pid] {
			said[pid] = true
			log.Warn("process with the mark of an earlier job not ended", "pid", pid, "reason", why)
		}
		return why != ""
	}
	return h
}

// hasTrainer returns why the trainer of a process with this environment is not
// known to be dead; "" if it is dead.
func hasTrainer(ctx context.Context, env [][]byte) string {
	socket := ""
	for _, v := range env {
		if path, ok := bytes.CutPrefix(v, []byte(client.EnvSocket+"=")); ok {
			socket = string(path)
		}
	}
	if socket == "" {
		return "its environment names no trainer socket"
	}
	ctx, cancel := context.WithTimeout(ctx, trainerWait)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", socket)
	if err == nil {
		_ = conn.Close()
		return "its trainer is alive"
	}
	if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	return "its trainer may be alive: " + err.Error()
}

// ReapEarlier kills the processes of earlier jobs that outlived their trainers:
// processes with the marker of one of the jobs and all variables of env,
// NAME=value, in their environment. It returns when none is left.
func ReapEarlier(ctx context.Context, log *slog.Logger, jobs []string, env ...string) error {
	return NewHunt(jobs...).Of(env...).Orphans(ctx, log).Kill(ctx)
}
