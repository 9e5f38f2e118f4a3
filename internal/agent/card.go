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

// Kinds of files of an agent in the private directory of a store; see fileOf.
const (
	socketFile = "sock"
	cardFile   = "json"  // readable by this user alone: it has the token
	lockFile   = "lock"  // held by the agent
	startFile  = "start" // held by the process that starts an agent
	logFile    = "log"   // of an agent that was started by [Start]
)

// launchPart is how much of a launch's key file names have: a socket's path is short.
const launchPart = 12

// fileOf returns the path of a file of an agent: agent.KIND, or agent-LAUNCH.KIND of
// an agent that follows another machine's in one launch.
func fileOf(runtime, launch, kind string) string {
	name := "agent"
	if launch != "" {
		name += "-" + launch[:min(len(launch), launchPart)]
	}
	return filepath.Join(runtime, name+"."+kind)
}

// Card holds the address of an agent. It is the content of agent.json and the
// output of `ckptstore agent start --json`.
type Card struct {
	Socket    string `json:"socket"`
	Token     string `json:"token"` // of the header Authorization, for requests to the socket
	PID       int    `json:"pid"`
	Store     string `json:"store"`     // identity
	Protocols []int  `json:"protocols"` // versions of docs/reference/protocol.md that it speaks
	Version   string `json:"version"`   // of its program
}

// errHeld reports that another process holds a lock.
var errHeld = errors.New("it is locked")

// takeLock waits for the lock of a file, which it creates with its directory. The
// owner of another store may remove both while no process holds them, so a lock
// counts only if its file still has its path.
func takeLock(ctx context.Context, path string, patience time.Duration) (*os.File, error) {
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

// awaitLock returns nil if the file that it has locked has lost its path.
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

// pollEvery is the pause between polls of other processes.
const pollEvery = 20 * time.Millisecond

// readCard reads the card of an agent.
func readCard(runtime, launch string) (c Card, err error) {
	path := fileOf(runtime, launch, cardFile)
	data, err := os.ReadFile(path)
	if err != nil {
		return c, fmt.Errorf("find the agent: %w", err)
	}
	if err := json.Unmarshal(data, &c); err != nil {
		return c, fmt.Errorf("find the agent: %s: %w", path, err)
	}
	return c, nil
}

// publish writes the card atomically.
func publish(runtime, launch string, c Card) error {
	data, err := json.Marshal(c)
	if err != nil {
		return err
	}
	path := fileOf(runtime, launch, cardFile)
	if err := os.WriteFile(path+".new", append(data, '\n'), 0o600); err != nil {
		return fmt.Errorf("publish the agent's address: %w", err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		return fmt.Errorf("publish the agent's address: %w", err)
	}
	return nil
}

// forget removes the card, so that no process finds the agent.
func forget(runtime, launch string) error {
	if err := os.Remove(fileOf(runtime, launch, cardFile)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
