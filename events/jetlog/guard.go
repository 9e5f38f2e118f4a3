package jetlog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/front"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// guard explains streams, lanes and entries to a front. It has a separate connection
// with the rights of the owner.
type guard struct {
	l       *Log
	owner   front.Principal // for entries that the owner itself has written
	pending sync.WaitGroup  // consumers being forgotten
}

var _ front.Log = (*guard)(nil)

// stand creates the front, once.
func (s *Server) stand(ctx context.Context) (*front.Front, error) {
	s.standing.Lock()
	defer s.standing.Unlock()
	s.mu.Lock()
	f, stopped := s.front, s.stopped
	s.mu.Unlock()
	if f != nil {
		return f, nil
	}
	if stopped {
		return nil, ErrClosed
	}
	o := s.OwnerOptions()
	o.Archive, o.Logger = s.o.Archive, s.o.Logger
	log, err := Connect(ctx, o)
	if err != nil {
		return nil, err
	}
	g := &guard{l: log, owner: front.OfUser(uint32(os.Geteuid()))} //nolint:gosec // of this process
	if _, _, err := log.Open(ctx); err != nil {
		g.close()
		return nil, err
	}
	f, err = front.New(front.Options{
		Dial: func() (net.Conn, error) { return s.Dial() }, Log: g, Buckets: []string{Leases, Cursors, Witnesses},
		Asks: []string{servedSubject}, Admit: s.o.Admit, Deciding: s.o.Deciding, Signed: s.o.Signed.by(log), Limits: s.o.Bounds, Logger: s.o.Logger,
	})
	if err != nil {
		g.close()
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		f.Close()
		g.close()
		return nil, ErrClosed
	}
	s.front, s.guard = f, g
	return f, nil
}

// signedFunc is [ServerOptions].Signed.
type signedFunc func(ctx context.Context, l *Log, e events.Event, after uint64) error

// by returns the function for a front, which reads the log by l. It is nil if f is.
func (f signedFunc) by(l *Log) func(ctx context.Context, e events.Event, after uint64) error {
	if f == nil {
		return nil
	}
	return func(ctx context.Context, e events.Event, after uint64) error {
		err := f(ctx, l, e, after)
		if slices.Contains(problem.Kinds(err), problem.Denied) {
			return front.Refuse(front.CodeDenied, "%v", err)
		}
		return err
	}
}

// close leaves the consumers of clients that have just ended to the server. The server
// ends too, or drops them by itself; waiting here would delay the next owner.
func (g *guard) close() {
	g.l.Close()
	g.pending.Wait()
}

// Tail implements [front.Log].
func (g *guard) Tail(stream string) bool { return IsTail(stream) }

// Head implements [front.Log].
func (g *guard) Head(ctx context.Context, lane string) (uint64, error) {
	if g.l.sealed().Last == 0 {
		return 0, nil
	}
	a, err := g.l.archived(ctx)
	if err != nil {
		return 0, err
	}
	return a.Head(lane)
}

// Forget implements [front.Log].
func (g *guard) Forget(stream, consumer string) {
	g.pending.Go(func() {
		ctx, cancel := context.WithTimeout(g.l.ctx, g.l.opts.Timeout)
		defer cancel()
		// The server drops an unused consumer by itself; this is only sooner.
		_ = g.l.js.DeleteConsumer(ctx, stream, consumer)
	})
}

const (
	longLease  = time.Hour // the longest term: the holder may be dead
	longHolder = 4 << 10   // bytes of the holder's description
	longToken  = 128
)

// CursorLease returns the name of the lease under which a cursor is moved.
func CursorLease(cursor string) string { return "cursor." + cursor }

const runLease = "run."

// RunLease returns the name of the lease of a run.
func RunLease(run string) string { return runLease + run }

// Holding implements [front.Log].
func (g *guard) Holding(ctx context.Context, run string, who front.Whose) (front.Holding, error) {
	held, err := g.entry(ctx, Leases, bucketKey(RunLease(run)))
	switch {
	case hasCode(err, codeNoStream):
		return front.Free, nil // no run has ever been leased
	case err != nil:
		return front.Free, fmt.Errorf("who has the lease of run %q: %w", run, err)
	case held.m.Seq == 0 || held.removed:
		return front.Free, nil
	case g.free(who, held) != nil:
		return front.Theirs, nil
	case held.whose.Session == who.Session || who.Principal.Personal && who.Principal.Name == held.whose.Principal:
		return front.Mine, nil
	}
	return front.Free, nil
}

// Check implements [front.Log].
func (g *guard) Check(ctx context.Context, w front.Write) (front.Stamp, error) {
	mine := front.Stamp{Session: w.Session, Principal: w.Principal.Name}
	name, err := events.DecodeName(strings.ReplaceAll(w.Key, "=", "%"))
	if err != nil || bucketKey(name) != w.Key || name == "" {
		return mine, front.Refuse(front.CodeEntry, "key %q of bucket %s is not the name of an entry", w.Key, w.Bucket)
	}
	now, err := g.entry(ctx, w.Bucket, w.Key)
	if err != nil {
		return mine, err
	}
	if now.m.Seq != w.After {
		return mine, front.WrongLast(now.m.Seq)
	}
	switch w.Bucket {
	case Leases:
		if run, ok := strings.CutPrefix(name, runLease); ok && !w.Grant.Run(run) {
			return mine, front.Refuse(front.CodeDenied, "the owner of the store does not let clients take the lease of run %q", run)
		}
		if same, err := g.lease(w, now); err != nil || same {
			return now.stamp(mine, same), err
		}
	case Cursors:
		return mine, g.cursor(ctx, w, name)
	case Witnesses:
		var v witnessValue
		if !w.Remove {
			err = named(json.Unmarshal(w.Data, &v), w.Key, v.Name)
		}
		if err != nil {
			return mine, front.Refuse(front.CodeEntry, "the witness of cursor %q: %v", name, err)
		}
		return mine, g.witness(ctx, w, name)
	default:
		return mine, front.Refuse(front.CodeEntry, "there is no bucket %s", w.Bucket)
	}
	return mine, nil
}

// entryNow is the current state of an entry; its sequence is 0 without one.
type entryNow struct {
	m       stored
	removed bool
	whose   front.Stamp
}

// stamp returns the stamp for a write. A write that changes nothing keeps the entry's
// owner.
func (e entryNow) stamp(mine front.Stamp, same bool) front.Stamp {
	if same {
		return e.whose
	}
	return mine
}

func (g *guard) entry(ctx context.Context, bucket, key string) (e entryNow, err error) {
	e.m, err = g.l.getStored(ctx, "KV_"+bucket, msgGet{LastFor: "$KV." + bucket + "." + key})
	if errors.Is(err, errNoMessage) {
		return entryNow{}, nil
	}
	if err != nil {
		return e, err
	}
	h, err := e.m.header()
	if err != nil {
		return e, front.Refuse(front.CodeEntry, "entry %s of bucket %s is damaged: %v", key, bucket, err)
	}
	e.removed = h.Get("KV-Operation") != ""
	e.whose = front.Stamp{Session: h.Get(front.HeaderSession), Principal: h.Get(events.HeaderActor)}
	return e, nil
}

// lease checks a write to a lease. It reports whether the write renews the current
// lease, which does not harm the holder.
func (g *guard) lease(w front.Write, now entryNow) (same bool, err error) {
	if !w.Remove {
		var v leaseValue
		if err := json.Unmarshal(w.Data, &v); err != nil {
			return false, front.Refuse(front.CodeEntry, "the value of a lease: %v", err)
		}
		if v.Token == "" || len(v.Token) > longToken || len(v.Holder) > longHolder || v.TermMS <= 0 || v.term() > longLease || v.term() <= 0 {
			return false, front.Refuse(front.CodeEntry, "a lease needs a token, a holder of at most %d bytes, and a term of at most %v", longHolder, longLease)
		}
		if now.m.Seq != 0 && !now.removed && string(w.Data) == string(now.m.Data) && now.whose.Session != w.Session {
			return true, nil
		}
	}
	return false, g.free(w.Whose, now)
}

// free refuses a lease that another session holds and whose term has not passed.
func (g *guard) free(w front.Whose, now entryNow) error {
	if now.m.Seq == 0 || now.removed || now.whose.Session == w.Session {
		return nil
	}
	whose := now.whose.Principal
	if now.whose.Session == "" && whose == "" {
		whose = g.owner.Name // the owner wrote it without a front
	}
	if w.Principal.Personal && w.Principal.Name == whose {
		return nil
	}
	if s := now.whose.Session; s != "" && !w.Lives(s) {
		return nil // its client has ended
	}
	var v leaseValue
	if err := json.Unmarshal(now.m.Data, &v); err != nil {
		return nil // no live holder
	}
	if left := v.term() - time.Since(now.m.Time); left > 0 {
		return front.Refuse(front.CodeHeld, "another session has the lease for %v more, unless it renews it", left.Round(time.Millisecond))
	}
	return nil
}

// witness checks a write to the witness of a cursor. A witness is written after its
// cursor.
func (g *guard) witness(ctx context.Context, w front.Write, name string) error {
	if !w.Remove {
		at, err := g.entry(ctx, Cursors, w.Key)
		if err != nil {
			return err
		}
		if at.m.Seq == 0 || at.removed {
			return front.Refuse(front.CodeEntry, "cursor %q has no witness before it is moved", name)
		}
	}
	return g.followed(ctx, w, name)
}

// cursor checks a write to a cursor. Only its session may move the cursor of a live
// subscriber. Its witness must be removed before it.
func (g *guard) cursor(ctx context.Context, w front.Write, name string) error {
	if w.Remove {
		known, err := g.entry(ctx, Witnesses, w.Key)
		if err != nil && !hasCode(err, codeNoStream) {
			return err
		}
		if known.m.Seq != 0 && !known.removed {
			return front.Refuse(front.CodeEntry, "cursor %q has a witness, which is removed first", name)
		}
	} else {
		var v cursorValue
		err := json.Unmarshal(w.Data, &v)
		if err := named(err, w.Key, v.Name); err != nil || len(v.Token) > longToken {
			return front.Refuse(front.CodeEntry, "the value of cursor %q: %v", name, err)
		}
		s, err := g.l.js.Stream(ctx, g.l.stream())
		if err != nil {
			return err
		}
		if last := s.CachedInfo().State.LastSeq; v.Sequence > last {
			return front.Refuse(front.CodeEntry, "cursor %q cannot stand at event %d: the log ends at %d", name, v.Sequence, last)
		}
	}
	return g.followed(ctx, w, name)
}

// followed refuses a cursor that a subscriber of another session follows.
func (g *guard) followed(ctx context.Context, w front.Write, name string) error {
	held, err := g.entry(ctx, Leases, bucketKey(CursorLease(name)))
	if hasCode(err, codeNoStream) {
		return nil // no lease has ever been taken
	}
	if err != nil {
		return fmt.Errorf("who follows cursor %q: %w", name, err)
	}
	return g.free(w.Whose, held)
}
