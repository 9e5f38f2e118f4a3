package launch

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/launch/standby"
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
