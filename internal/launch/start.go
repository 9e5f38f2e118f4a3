package launch

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"strings"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/launch/process"
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
	restore, err := unblocked()
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
		for _, mark := range w.marks() {
			name, value, _ := strings.Cut(mark, "=")
			set[name] = value
		}
		set[client.EnvResume] = w.group.Resume
		set[client.EnvStoreID] = w.store.ID
		set[client.EnvRPC] = w.group.File(rank, rpcSocket)
		if w.cfg.Quiet {
			set[client.EnvQuiet] = "1"
		}
		stdout, stderr := w.outputs(rank)
		env := mergeEnv(inherited(w.cfg.Withheld), set)
		p, err := process.Start(rank, w.cfg.Command, env, stdout, stderr)
		if err != nil {
			return fmt.Errorf("%w: %w", ErrConfig, err)
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

// unblocked makes this thread block no signal, until the caller calls restore: a
// process started by this thread inherits its signal mask. The parent of the
// trainer may have blocked some signals, and a worker that blocks SIGTERM neither
// saves nor ends on it.
func unblocked() (restore func() error, err error) {
	runtime.LockOSThread()
	var was unix.Sigset_t
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &unix.Sigset_t{}, &was); err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("unblock the signals of the workers: %w", err)
	}
	return func() error {
		defer runtime.UnlockOSThread()
		if err := unix.PthreadSigmask(unix.SIG_SETMASK, &was, nil); err != nil {
			return errors.Join(errors.New("block the trainer's signals again"), err)
		}
		return nil
	}, nil
}
