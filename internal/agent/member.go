package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/peer"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// member is a process that has joined as one rank. It is watched from then on.
type member struct {
	rank   int
	pid    int
	node   int           // index of its machine; 0: this one
	host   string        // of another machine
	end    func()        // closes gone, once
	gone   chan struct{} // closed when the process has ended
	forgot chan struct{} // closed when the watch ends
	forget func()        // ends the watch
}

// enlist watches the process that the caller of a request names.
func enlist(ctx context.Context, rank, pid int) (*member, error) {
	caller, uid, err := peer.Who(ctx)
	if err != nil {
		return nil, problem.Errorf(problem.Internal, "rank %d: %w", rank, err)
	}
	if own := os.Geteuid(); uid != own {
		return nil, problem.Errorf(problem.Denied, "rank %d: process %d is of user %d, this agent is of user %d: each user has an agent of its own", rank, pid, uid, own)
	}
	m := &member{rank: rank, gone: make(chan struct{}), forgot: make(chan struct{})}
	if m.pid, err = same(caller, uid, rank, pid); err != nil {
		return nil, err
	}
	m.end = sync.OnceFunc(func() { close(m.gone) })
	stop, err := peer.Watch(m.pid, m.end)
	if errors.Is(err, unix.ESRCH) {
		return nil, gone(rank, pid)
	}
	if err != nil {
		return nil, problem.Errorf(problem.Internal, "rank %d: %w", rank, err)
	}
	m.forget = sync.OnceFunc(func() {
		stop()
		close(m.forgot)
	})
	return m, nil
}

// distant returns a process of another machine, whose agent watches it.
func distant(node int, r remoteJoin) *member {
	m := &member{rank: r.Rank, pid: r.PID, node: node, host: r.Host, gone: make(chan struct{}), forgot: make(chan struct{})}
	m.end = sync.OnceFunc(func() { close(m.gone) })
	m.forget = sync.OnceFunc(func() { close(m.forgot) })
	return m
}

// is reports whether two members are one process.
func (m *member) is(other *member) bool { return m.pid == other.pid && m.node == other.node }

// String names the process.
func (m *member) String() string {
	if m.host == "" {
		return fmt.Sprint("process ", m.pid)
	}
	return fmt.Sprintf("process %d on %s", m.pid, m.host)
}

func gone(rank, pid int) error {
	return problem.Errorf(problem.Conflict, "rank %d: process %d is gone: the process that joins must be the training process, and alive", rank, pid)
}

// same returns the number under which this process sees the joining process. That
// is the caller, which may have another number inside a container, or another
// process of the same user that the caller joins for.
func same(caller, uid, rank, pid int) (int, error) {
	if pid == 0 || pid == caller || pid == numberInside(caller) {
		return caller, nil
	}
	info, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
	if errors.Is(err, os.ErrNotExist) {
		return 0, gone(rank, pid)
	}
	if err != nil {
		return 0, problem.Errorf(problem.Conflict, "rank %d: look at process %d: %w", rank, pid, err)
	}
	if st, ok := info.Sys().(*syscall.Stat_t); !ok || int(st.Uid) != uid {
		return 0, problem.Errorf(problem.Denied, "rank %d: process %d is another user's than process %d, which joins for it", rank, pid, caller)
	}
	return pid, nil
}

// numberInside returns the number of a process in its own PID namespace, or 0 if
// the system does not reveal it.
func numberInside(pid int) int {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	for line := range bytes.Lines(text) {
		if rest, ok := bytes.CutPrefix(line, []byte("NSpid:")); ok {
			fields := bytes.Fields(rest)
			if len(fields) == 0 {
				return 0
			}
			n, err := strconv.Atoi(string(fields[len(fields)-1]))
			if err != nil {
				return 0
			}
			return n
		}
	}
	return 0
}

// lives reports whether the process has not ended.
func (m *member) lives() bool {
	select {
	case <-m.gone:
		return false
	default:
		return true
	}
}

// command returns the command line of the process, for the log, or nil if it is
// gone.
func (m *member) command() []string {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", m.pid))
	if err != nil || len(text) == 0 {
		return nil
	}
	var words []string
	for word := range bytes.SplitSeq(bytes.TrimSuffix(text, []byte{0}), []byte{0}) {
		words = append(words, string(word))
	}
	return words
}
