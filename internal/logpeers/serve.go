package logpeers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// Local is the servers of all copies that lie in a store, in one process. It exists for
// commands after the job: the trainers that were the log's peers have ended.
type Local struct{ peers []*Peer }

// agreeTime bounds the wait for a leader of local servers.
const agreeTime = 30 * time.Second

// Serve serves the copies that lie in a store on this machine's loopback address, if two of
// them are there and no other process serves them. wait bounds the wait for a process that is
// ending.
func Serve(ctx context.Context, store string, wait time.Duration, log *slog.Logger) (_ *Local, _ Access, err error) {
	s, err := readSecret(store)
	if err != nil {
		return nil, Access{}, fmt.Errorf("serve the log of %s: %w", store, err)
	}
	held, without := holdCopies(ctx, store, s, wait, log, -1)
	l := &Local{}
	defer func() {
		if err == nil {
			return
		}
		l.Close()
		for _, h := range held {
			if h != nil {
				err = errors.Join(err, h.release())
			}
		}
	}()
	if Copies-len(without) < Copies/2+1 {
		return nil, Access{}, problem.Wrap(problem.Locked, fmt.Errorf("serve the log of %s: %d of its %d copies can be served here, want %d: run the command while the job runs, or where the copies are: %w",
			store, Copies-len(without), Copies, Copies/2+1, errors.Join(without...)))
	}
	if len(without) > 0 {
		log.Warn("log is served from two of its copies", "store", store, "error", errors.Join(without...))
	}
	var all [Copies]*card
	for k, h := range held {
		if h == nil {
			continue
		}
		c, err := newCard("127.0.0.1")
		if err != nil {
			return nil, Access{}, fmt.Errorf("serve the log of %s: %w", store, err)
		}
		all[k] = &c
	}
	limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), agreeTime)
	defer cancel()
	for k, h := range held {
		if h == nil {
			continue
		}
		p, err := startPeer(limit, k, h, all, s, log)
		if err != nil {
			return nil, Access{}, fmt.Errorf("serve copy %d of the log: %w", k, err)
		}
		l.peers, held[k] = append(l.peers, p), nil
	}
	for _, p := range l.peers {
		for !p.settled() {
			select {
			case <-time.After(10 * time.Millisecond):
			case <-limit.Done():
				return nil, Access{}, problem.Errorf(problem.Unavailable, "serve the log of %s: its %d copies do not agree on a leader within %v", store, len(l.peers), agreeTime)
			}
		}
	}
	return l, access(all[:], s), nil
}

// holdCopies holds the copies that lie in a store, without that with the index but, and returns an error for each that it could
// not hold. It locks them in order, so that of several processes one gets all. It claims them in
// parallel, because each claim of a dead machine takes its term.
func holdCopies(ctx context.Context, store string, s *secret, wait time.Duration, log *slog.Logger, but int) (held [Copies]*hold, without []error) {
	var errs [Copies]error
	locking, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	for k := range held {
		if k == but {
			continue
		}
		dir := CopyDir(store, k)
		if _, errs[k] = os.Stat(dir); errs[k] != nil {
			continue
		}
		var id copyID
		if id, errs[k] = s.identity(store, k); errs[k] == nil {
			held[k], errs[k] = lockCopy(locking, dir, id, true)
		}
	}
	var all sync.WaitGroup
	for k, h := range held {
		if h == nil {
			continue
		}
		all.Go(func() {
			if err := h.take(ctx, true, log); err != nil {
				held[k], errs[k] = nil, errors.Join(err, h.release())
			}
		})
	}
	all.Wait()
	for _, err := range errs {
		if err != nil {
			without = append(without, err)
		}
	}
	return held, without
}

// Close ends the servers.
func (l *Local) Close() {
	for _, p := range l.peers {
		p.Close()
	}
	l.peers = nil
}
