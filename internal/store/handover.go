package store

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/events/jetlog"
)

// How often a process tries to own a store that has no owner. One that had to
// give it up soon after it took it waits longer each time.
const (
	ownEvery  = 50 * time.Millisecond
	ownSeldom = 2 * time.Second
	ownSoon   = 10 * time.Second
	// cutSeldom is how long after a failure it tries again to cut the live stream.
	cutSeldom = time.Hour
)

// watch takes the store over when its owner goes, and gives it up when this
// process owns it and can do its work no more. Then the store has no owner until
// there is room, or whatever it was is over; whoever waits for one takes it.
// Appenders meanwhile retry until their deadlines.
func (o *owner) watch() {
	defer close(o.done)
	pause := ownEvery
	for {
		select {
		case <-o.life.Done():
			return
		case <-o.lost:
		case own := <-o.cut:
			if o.cutTail(own) {
				continue
			}
		case own := <-o.broke:
			if time.Since(own.since) < ownSoon {
				pause = min(2*pause, ownSeldom)
			} else {
				pause = ownEvery
			}
			o.giveUp(own)
			if !sleep(o.life, pause) {
				return
			}
		}
		if !o.find() {
			return
		}
	}
}

// find returns when the store has an owner. It gives up when there can be none,
// and with the life of o.
func (o *owner) find() bool {
	said := false
	for {
		took, err := o.tryOwn(o.life)
		if err == nil && !took {
			var conn net.Conn
			if conn, err = o.dialOwner(o.life); err == nil {
				_ = conn.Close()
			}
		}
		o.explain(err)
		if err == nil {
			return true // the log reconnects by itself
		}
		if errors.Is(err, ErrDamaged) || errors.Is(err, ErrForeign) {
			// Each try starts a server on it. Appends end at their deadlines.
			o.store.opts.Logger.Error("the store cannot be taken over from its last owner", "error", err)
			return false
		}
		if errors.Is(err, syscall.ENOSPC) && !said {
			said = true
			o.store.opts.Logger.Error("the store has no owner until there is room", "error", err)
		}
		o.store.opts.Logger.Debug("the store has no owner that answers", "error", err)
		if !sleep(o.life, ownEvery) {
			return false
		}
	}
}

// giveUp gives the store up while this process goes on.
func (o *owner) giveUp(own *ownership) {
	o.mu.Lock()
	mine := o.own == own
	if mine {
		o.own, o.why = nil, own.why
	}
	o.mu.Unlock()
	if !mine {
		return
	}
	o.store.opts.Logger.Error("the store is given up, to be owned again as soon as that is possible", "error", own.why)
	if err := own.close(); err != nil {
		o.store.opts.Logger.Warn("the store was not given up in order", "error", err)
	}
}

// cutTail ends the work of an ownership, cuts the live stream of its log, and begins
// again, all under the one lock. Appenders and those who ask meanwhile retry. It
// reports false when this process does not own the store any more.
func (o *owner) cutTail(own *ownership) bool {
	o.taking.Lock()
	defer o.taking.Unlock()
	o.mu.Lock()
	mine := o.own == own
	if mine {
		o.own = nil
	}
	o.mu.Unlock()
	if !mine {
		return true // it was given up meanwhile
	}
	log := o.store.opts.Logger
	begun := time.Now()
	lock, err := own.leave()
	if err != nil {
		log.Warn("the store was not given up in order", "error", err)
	}
	if lock == nil {
		return false
	}
	stop, err := o.store.lend(o.life, o.dir) // what the cut makes
	if err != nil {
		log.Warn("the store is not owned after it was given up to cut its log", "error", errors.Join(err, unlock(lock)))
		return false
	}
	defer stop()
	if err := cutTail(o.life, o.store, o.dir, nil); err != nil {
		log.Warn("the log is not cut; the live stream goes on", "error", err)
		o.cutAgain = time.Now().Add(cutSeldom)
	}
	next, err := succeed(o.life, o.store, o.dir, lock)
	if err != nil {
		log.Warn("the store is not owned after its log was cut", "error", errors.Join(err, unlock(lock)))
		return false
	}
	o.mu.Lock()
	o.own, o.why = next, nil
	o.mu.Unlock()
	log.Info("log cut", "seconds", time.Since(begun).Seconds())
	return true
}

// explain notes why the store has no owner.
func (o *owner) explain(why error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.why = why
}

// down is why the store has no owner, or cannot be written; nil when nothing is
// known to be wrong.
func (o *owner) down() error {
	o.mu.Lock()
	why := o.why
	o.mu.Unlock()
	if full := o.store.space.check(keepToOwn); full != nil && !errors.Is(why, syscall.ENOSPC) {
		why = errors.Join(why, full)
	}
	return why
}

// watch tells the owner when this ownership is of no use any more: nothing can
// be appended.
func (w *ownership) watch(ctx context.Context, s *Store) {
	err := w.server.Watch(ctx)
	if ctx.Err() != nil {
		return
	}
	w.why = fmt.Errorf("own the store %s: %w", w.dir, err)
	if errors.Is(err, jetlog.ErrBroken) {
		if full := s.space.check(keepToOwn); full != nil {
			w.why = fmt.Errorf("%w: %w", w.why, full)
		}
	}
	select {
	case s.owner.broke <- w:
	case <-ctx.Done(): // it is being given up already
	}
}
