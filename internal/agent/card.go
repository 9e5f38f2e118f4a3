package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// Files of an agent in the private directory of a store.
const (
	socketName = "agent.sock"
	cardName   = "agent.json"  // readable by this user alone: it has the token
	lockName   = "agent.lock"  // held by the agent
	startName  = "agent.start" // held by who starts one
	logName    = "agent.log"   // of an agent that was started by [Start]
)

// Card says where an agent is. It is agent.json, and what `ckptstore agent start
// --json` prints.
type Card struct {
	Socket    string `json:"socket"`
	Token     string `json:"token"` // of the header Authorization, for requests to the socket
	PID       int    `json:"pid"`
	Store     string `json:"store"`     // identity
	Protocols []int  `json:"protocols"` // versions of docs/reference/protocol.md that it speaks
	Version   string `json:"version"`   // of its program
}

// errHeld says that a lock is somebody else's.
var errHeld = errors.New("it is locked")

// lockFile takes the lock of a file, which is made, with its directory. It waits
// for it. The owner of another store may remove both while nobody holds them, so
// a lock counts only if its file still has its path.
func lockFile(ctx context.Context, path string, patience time.Duration) (*os.File, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, errHeld)
	defer cancel()
	for {
		f, err := openLock(path)
		if err != nil {
			return nil, err
		}
		if f, err = awaitLock(ctx, f); f != nil || err != nil {
			return f, err
		}
	}
}

func openLock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if !errors.Is(err, os.ErrNotExist) {
		return f, err
	}
	if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	return os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
}

// awaitLock returns nil when the file that it has locked has lost its path.
func awaitLock(ctx context.Context, f *os.File) (*os.File, error) {
	path := f.Name()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			mine, err := f.Stat()
			if err != nil {
				return nil, errors.Join(err, f.Close())
			}
			if now, err := os.Stat(path); err == nil && os.SameFile(mine, now) {
				return f, nil
			}
			return nil, f.Close()
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
		}
		select {
		case <-time.After(pollEvery):
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("lock %s: %w", path, context.Cause(ctx)), f.Close())
		}
	}
}

// pollEvery is the time between two looks at what other processes do.
const pollEvery = 20 * time.Millisecond

// readCard reads agent.json.
func readCard(runtime string) (c Card, err error) {
	data, err := os.ReadFile(filepath.Join(runtime, cardName))
	if err != nil {
		return c, fmt.Errorf("find the agent: %w", err)
	}
	if err := json.Unmarshal(data, &c); err != nil {
		return c, fmt.Errorf("find the agent: %s: %w", filepath.Join(runtime, cardName), err)
	}
	return c, nil
}

// publish writes agent.json, whole or not at all.
func publish(runtime string, c Card) error {
	data, err := json.Marshal(c)
	if err != nil {
		return err
	}
	path := filepath.Join(runtime, cardName)
	if err := os.WriteFile(path+".new", append(data, '\n'), 0o600); err != nil {
		return fmt.Errorf("say where the agent is: %w", err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("say where the agent is: %w", err)
	}
	return nil
}

// forget removes agent.json: nobody finds the agent any more.
func forget(runtime string) error {
	if err := os.Remove(filepath.Join(runtime, cardName)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
