package logpeers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// Local is the servers of all copies that lie in a store, in one process. It exists for
// commands after the job: the trainers that were the log's peers have ended.
type Local struct{ peers []*Peer }

// agreeTime bounds the wait for a leader of local servers.
const agreeTime = 30 * time.Second

// Serve serves the copies that lie in a store on this machine's loopback address, if two of
// them are there and no other process serves them. ctx bounds the wait for a process that is
// ending.
func Serve(ctx context.Context, store string, log *slog.Logger) (_ *Local, _ Access, err error) {
	s, err := readSecret(store)
	if err != nil {
		return nil, Access{}, fmt.Errorf("serve the log of %s: %w", store, err)
	}
	var all [Copies]*card
	var held [Copies]*hold
	l := &Local{}
	defer func() {
		if err == nil {
			return
		}
		l.Close()
		for k, h := range held {
			if h != nil {
				err = errors.Join(err, h.release())
				held[k] = nil
			}
		}
	}()
	var without []error
	for k := range all {
		if _, err := os.Stat(CopyDir(store, k)); err != nil {
			without = append(without, err)
			continue
		}
		h, err := holdCopy(ctx, CopyDir(store, k), s.copy(k), true, log)
		if err != nil {
			without = append(without, err)
			continue
		}
		held[k] = h
		c, err := newCard("127.0.0.1")
		if err != nil {
			return nil, Access{}, fmt.Errorf("serve the log of %s: %w", store, err)
		}
		all[k] = &c
	}
	if Copies-len(without) < Copies/2+1 {
		return nil, Access{}, problem.Wrap(problem.Locked, fmt.Errorf("serve the log of %s: %d of its %d copies can be served here, want %d: run the command while the job runs, or where the copies are: %w",
			store, Copies-len(without), Copies, Copies/2+1, errors.Join(without...)))
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
	return l, access(all, s), nil
}

// Close ends the servers.
func (l *Local) Close() {
	for _, p := range l.peers {
		p.Close()
	}
	l.peers = nil
}
