package trainer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/logpeers"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/problem/system"
	"github.com/ckptstore/ckptstore/internal/store"
)

// logOptions configure how many copies a directory's log has.
type logOptions struct {
	logReplicas   int
	logReplicaDir string

	peerAddress string                // of this node; where its copy of the log is served
	succeeding  *logpeers.Coordinator // that this node coordinates in place of; nil of none
	living      string                // why this node coordinates a living group; empty: it starts groups
	beside      bool                  // a node of the job takes no ranks
	took        *bool                 // whether the log has this node as coordinator of a living group; nil without living
}

// copyIndex returns which copy of the log a node has; [logpeers.Copies] for none.
func (o runOptions) copyIndex(n placement) int {
	if !n.ranked || n.rank >= logpeers.Copies {
		return logpeers.Copies // a node without an index has no copy
	}
	return n.rank
}

// replicated checks the flags of a job whose log has several copies, and returns the
// store's directory.
func (o runOptions) replicated(n placement) (dir string, err error) {
	switch {
	case o.logReplicas != logpeers.Copies:
		return "", fmt.Errorf("%w: --log-replicas %d: want 1 or %d: two copies survive no more than one", launch.ErrConfig, o.logReplicas, logpeers.Copies)
	case strings.Contains(o.store, "://"):
		return "", fmt.Errorf("%w: --log-replicas is for a directory: `ckptstore init --replicas %d` gives the log of a cluster its copies", launch.ErrConfig, o.logReplicas)
	case n.max < logpeers.Copies:
		return "", fmt.Errorf("%w: --log-replicas %d: the job has at most %d nodes, and each copy is on another node: give --nnodes %d or more", launch.ErrConfig, o.logReplicas, n.max, logpeers.Copies)
	}
	if dir, err = filepath.Abs(o.store); err != nil {
		return "", fmt.Errorf("--store: %w", err)
	}
	if _, err := os.Stat(filepath.Join(dir, "store.json")); err == nil {
		return "", fmt.Errorf("%w: --log-replicas %d: the store %s has a log of one copy: leave the flag out, or choose another directory", launch.ErrConfig, o.logReplicas, dir)
	}
	return dir, nil
}

// unreplicated checks that a job over several nodes, whose trainers serve no copies of the
// log, has a store whose log has none: nothing would serve it. A node that follows asks only once
// it sees the store's directory: a network filesystem remembers names that were missing.
func (o runOptions) unreplicated(n placement) error {
	if o.logReplicas != 1 || n.max == 1 || strings.Contains(o.store, "://") || !logpeers.Replicated(o.store) {
		return nil
	}
	return fmt.Errorf("%w: the log of %s has %d copies (%s), which the trainers serve: give --log-replicas %d on each node, or another --store",
		launch.ErrConfig, o.store, logpeers.Copies, filepath.Join(o.store, "join", "log"), logpeers.Copies)
}

// withPeers runs this node's part of a job while it serves its copy of the log.
func (o runOptions) withPeers(ctx context.Context, cfg launch.Config, n placement, at string) error {
	dir, err := o.replicated(n)
	if err != nil {
		return err
	}
	host, _, err := net.SplitHostPort(at)
	if err != nil {
		return fmt.Errorf("--rdzv-endpoint: %w", err)
	}
	address := o.localAddr
	if address == "" {
		if all := nodes.Addresses(ctx, host); len(all) > 0 {
			address = all[0]
		}
	}
	if net.ParseIP(host) != nil && nodes.IsHere(ctx, at) {
		address = host
	}
	index := o.copyIndex(n)
	join := logpeers.Config{Store: dir, Formed: formed(dir), Index: index, Dir: o.logReplicaDir, Address: address, Wait: o.endpointWait, Logger: cfg.Logger}
	cfg.Logger.Info("waiting for the copies of the log", "store", dir)
	peer, access, err := logpeers.Join(ctx, join)
	if err != nil {
		return inVain(err)
	}
	if peer != nil {
		defer peer.Close()
		cfg.Logger.Info("serving a copy of the log", "copy", index)
	}
	if !join.Formed {
		form := o.awaitFormed
		if index == 0 {
			form = func(ctx context.Context, dir string) error { return o.createReplicated(ctx, cfg, dir, access) }
		}
		if err := form(ctx, dir); err != nil {
			return inVain(err)
		}
	}
	o.peerAddress = address
	return o.meet(ctx, cfg, n, at)
}

// formed reports whether the store in a directory has a log of several copies.
func formed(dir string) bool { return nodes.Listed(filepath.Join(dir, "location.json")) }

// vainError reports that a job has waited for its other nodes in vain.
type vainError struct{ error }

func (e vainError) Unwrap() error { return e.error }

// inVain makes an error a vainError if it is one of a wait for the other nodes.
func inVain(err error) error {
	if system.KindOf(err) == problem.Unavailable {
		return vainError{err}
	}
	return err
}

// createAgain is the pause before the log is created, or looked for, again.
const createAgain = 200 * time.Millisecond

// awaitFormed waits until node 0 has created the store.
func (o runOptions) awaitFormed(ctx context.Context, dir string) error {
	limit, cancel := context.WithTimeout(ctx, o.endpointWait)
	defer cancel()
	for !formed(dir) {
		select {
		case <-time.After(createAgain):
		case <-limit.Done():
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return problem.Errorf(problem.Unavailable, "open store %s: node 0 has not created it within %v: see the output of its trainer", dir, o.endpointWait)
		}
	}
	return nil
}

// createReplicated makes the store, as soon as the peers of its log can.
func (o runOptions) createReplicated(ctx context.Context, cfg launch.Config, dir string, at logpeers.Access) error {
	limit, cancel := context.WithTimeout(ctx, o.endpointWait)
	defer cancel()
	for {
		made, err := store.InitURL(limit, at.URL, store.URLOptions{Data: dir, Replicas: o.logReplicas, Access: &store.Access{Token: at.Token, TLS: at.TLS}})
		switch {
		case err == nil:
			cfg.Logger.Info("store created", "store", dir, "id", made.Store, "copies", made.Replicas)
			return nil
		case errors.Is(err, store.ErrExists) && formed(dir):
			return nil
		case errors.Is(err, store.ErrExists): // another store's log
			return err
		case formed(dir) || limit.Err() != nil:
			return err
		}
		cfg.Logger.Debug("log not created yet", "error", err)
		select {
		case <-time.After(createAgain):
		case <-limit.Done():
			return err
		}
	}
}
