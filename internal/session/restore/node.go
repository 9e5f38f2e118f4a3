package restore

import (
	"context"
	"errors"
	"maps"
	"slices"
)

// forward passes the requests of this node's ranks to the coordinator. The caller
// holds the lock.
func (l *Loader) forward(ld *load) {
	switch {
	case ld.over == nil && l.closed:
		l.endLoad(ld, &ConflictError{errOver})
	case ld.over != nil:
		l.endLoad(ld, ld.over)
	case ld.more != nil:
		ld.more()
	default:
		ld.more = func() {}
		l.running.Go(func() { l.coordinate(ld) })
	}
}

// endLoad ends a load that is not resolved, for all ranks including those that ask
// later. The caller holds the lock.
func (l *Loader) endLoad(ld *load, why error) {
	if ld.over == nil {
		ld.over = why
		close(ld.complete)
	}
	if len(ld.asked) == len(ld.local) {
		delete(l.loads, ld.of)
	}
}

// coordinate has the coordinator resolve a load, and then reads it.
func (l *Loader) coordinate(ld *load) {
	reply, err := l.resolve(ld)
	l.mu.Lock()
	if err == nil {
		err = reply.Failure.Err()
	}
	if l.closed {
		err = &ConflictError{errOver}
	}
	if err != nil || ld.over != nil {
		l.endLoad(ld, err)
		l.mu.Unlock()
		return
	}
	ld.n, ld.reply = reply.Load, reply
	var ctx context.Context
	ctx, ld.cancel = context.WithCancel(l.life)
	close(ld.complete)
	l.mu.Unlock()
	l.finish(ld, l.run(ctx, ld))
}

// resolve passes the requests so far to the coordinator, and again when another rank
// asks, until it replies. So the coordinator can name the ranks that it waits for.
func (l *Loader) resolve(ld *load) (ResolveReply, error) {
	for {
		ctx, more := context.WithCancel(l.life)
		l.mu.Lock()
		req := ResolveRequest{Key: l.key(ld.of, ld.ranks), Asks: ld.asks()}
		if len(req.Asks) == len(ld.local) {
			req.FQNs = slices.Sorted(maps.Keys(ld.fqns()))
		}
		over := ld.over
		ld.more = more
		l.mu.Unlock()
		if over != nil {
			more()
			return ResolveReply{}, over
		}
		reply, err := l.cfg.Coordinator.Resolve(ctx, req)
		again := ctx.Err() != nil && l.life.Err() == nil
		more()
		if err == nil || !again {
			return reply, err
		}
	}
}

// key returns the key of a load for other nodes, which is short for all ranks.
func (l *Loader) key(of loadOf, ranks []int) Key {
	if len(ranks) == l.cfg.World {
		ranks = nil
	}
	return Key{Participants: ranks, N: of.n}
}

// adopt opens the checkpoint that the coordinator has resolved.
func (l *Loader) adopt(ctx context.Context, reply ResolveReply) (at resolution, err error) {
	if reply.opened != nil {
		return *reply.opened, nil
	}
	at.ckpt, at.unread, at.verifies = reply.Checkpoint, reply.Unread, reply.Verifies
	if at.reader, err = l.cfg.open(ctx, at.ckpt); err == nil {
		at.manifest, err = at.reader.ReadMetadata(ctx)
	}
	if err == nil {
		err = at.reader.SetUp(ctx, at.manifest, false)
	}
	if err != nil {
		err = &ConflictError{err}
	}
	return at, err
}

// complete reports that this node has read its part of the load. It returns when the
// load is complete on all nodes.
func (r *restore) complete(ctx context.Context, got Report) error {
	if r.l.cfg.Coordinator == nil {
		return r.l.cfg.completed(ctx, r.n, r.ckpt.ID, r.unread, got)
	}
	failure, err := r.report(DoneRequest{Report: got})
	return errors.Join(failure, err)
}

// fail reports that the load has failed on this node, and so on all nodes. errs are
// the errors of its ranks, and others is that of all other ranks.
func (r *restore) fail(errs []error, others error) error {
	if r.l.cfg.Coordinator == nil {
		return r.l.cfg.failed(r.n, r.ckpt.ID, joined(errs))
	}
	if r.decided {
		return nil
	}
	// Its ranks have their own errors.
	_, err := r.report(DoneRequest{Failure: r.l.cfg.failure(others)})
	return err
}

// report reports the outcome of this node. failure is why the load has failed on all
// nodes.
func (r *restore) report(done DoneRequest) (failure, err error) {
	r.decided = true
	done.Key = r.key
	reply, err := r.l.cfg.Coordinator.Done(r.l.life, done)
	return reply.Failure.Err(), err
}
