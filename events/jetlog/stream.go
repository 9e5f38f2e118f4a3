package jetlog

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/nats-io/nats.go/jetstream"
)

// Info is the state of the log when it was requested.
type Info struct {
	First    uint64    // sequence of the first event; 1, or 0 in an empty log
	Sealed   uint64    // sequence of the last event in the archive; 0 without one
	Last     uint64    // sequence of the last event
	Bytes    uint64    // on disk, before compression
	Replicas int       // servers that keep a copy
	Created  time.Time // of the stream, by the server's clock
	Asked    time.Time // time of this state, by the server's clock
}

// Create creates the stream and appends created, which must be store.created, as its
// first event; both are durable on return. Call it only on a store's first boot, before
// any process can have written: on a log that exists but does not open, it would
// destroy the remains. Create finishes a first boot that was cut, and does nothing when
// repeated with the same store. For the log of another store it returns [ErrForeign].
func (l *Log) Create(ctx context.Context, created events.Decision) error {
	if created.Kind != (events.StoreCreated{}).Kind() {
		return fmt.Errorf("create the log: the first event must be store.created, not %s", created.Kind)
	}
	want, err := storeCreated(created.Event)
	if err != nil {
		return fmt.Errorf("create the log: %w", err)
	}
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	creates := subjects(events.Subject(created.Scope, created.Kind), apiCreate+Stream)
	err = l.retry(concerning(ctx, creates), func(ctx context.Context) error { return l.createOnce(ctx, created, want) })
	if err != nil {
		return fmt.Errorf("create the log of store %s at %s: %w", want.Store, l.opts.where(), err)
	}
	return nil
}

func (l *Log) createOnce(ctx context.Context, created events.Decision, want events.StoreCreated) error {
	info, err := l.streamInfo(ctx)
	if errors.Is(err, ErrNoLog) {
		if err = l.createStream(ctx); err != nil {
			return err
		}
		info, err = l.streamInfo(ctx)
	}
	if err != nil {
		return err
	}
	if wrong := guards(info.Config); len(wrong) > 0 {
		return unsafeStream(info.Config.Name, wrong)
	}
	if info.State.LastSeq == 0 {
		_, err = l.publish(ctx, message(created.Event), jetstream.WithExpectLastSequence(0))
		if err != nil && !hasCode(err, codeWrongLast, codeWrongLastPending) {
			return err
		}
	}
	_, got, err := l.first(ctx)
	if err != nil {
		return err
	}
	if got.Store != want.Store {
		return fmt.Errorf("%w: it belongs to store %s; choose another server or directory", ErrForeign, got.Store)
	}
	return l.adopt(info, want.Store)
}

// peerPatience is how long a cluster may seem to have too few servers: a server that is busy, or
// has just been started, counts as missing for a moment. Without it a log could get one copy
// in a cluster of three servers.
type peerPatience struct{ until time.Time }

const (
	peerWait  = 3 * time.Second
	peerPause = 100 * time.Millisecond
)

func newPeerPatience() peerPatience { return peerPatience{time.Now().Add(peerWait)} }

// again reports whether the request that ended with err should be made again.
func (p peerPatience) again(err error) bool {
	return hasCode(err, codeNoPeers) && time.Now().Before(p.until)
}

func (l *Log) createStream(ctx context.Context) error {
	want := []int{l.opts.Replicas}
	if l.opts.Replicas == 0 {
		want = []int{1}
		if l.nc.ConnectedClusterName() != "" {
			want = []int{3, 1}
		}
	}
	patience := newPeerPatience()
	for {
		_, err := l.js.CreateStream(ctx, streamConfig(want[0]))
		if patience.again(err) {
			<-time.After(peerPause)
			continue
		}
		few := hasCode(err, codeNoPeers, codeNotClustered, codeInsufficient)
		if few && len(want) > 1 {
			want = want[1:]
			continue
		}
		if few {
			return fmt.Errorf("%w: the server cannot keep %d copies of the log: start as many servers of one cluster, or ask for fewer: %w", ErrReplicas, want[0], err)
		}
		return err
	}
}

// Open checks that the log exists, is complete and safely configured, and returns its
// store.created event and its state. It never creates anything. It returns [ErrNoLog],
// [ErrUnsafe], [ErrGap], or an error about a first event that is not store.created at
// sequence 1. From then on, every method returns [ErrForeign] for a stream that was
// recreated.
func (l *Log) Open(ctx context.Context) (events.StoreCreated, Info, error) {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	var store events.StoreCreated
	var state Info
	err := l.retry(ctx, func(ctx context.Context) error {
		info, err := l.streamInfo(ctx)
		if err != nil {
			return err
		}
		if wrong := guards(info.Config); len(wrong) > 0 {
			return unsafeStream(info.Config.Name, wrong)
		}
		sealed, of, err := sealedOf(info.Config)
		if err != nil {
			return err
		}
		if info.State.LastSeq == 0 && sealed.Last == 0 {
			return fmt.Errorf("%w: the stream %s is empty, its first boot was cut; run 'ckptstore init' again", ErrNoLog, Stream)
		}
		if err := whole(info); err != nil {
			return err
		}
		if sealed.Last > 0 {
			// The first event is in the archive.
			if err := l.adopt(info, of); err != nil {
				return err
			}
		}
		event, created, err := l.first(ctx)
		if err != nil {
			return err
		}
		if event.Kind != created.Kind() {
			return fmt.Errorf("%w: event 1 is %s, not store.created", ErrForeign, event.Kind)
		}
		store, state = created, infoOf(info)
		return l.adopt(info, created.Store)
	})
	if err != nil {
		return events.StoreCreated{}, Info{}, fmt.Errorf("open the log at %s: %w", l.opts.where(), err)
	}
	return store, state, nil
}

// Last returns the sequence of the last event in the log.
func (l *Log) Last(ctx context.Context) (uint64, error) {
	info, err := l.Info(ctx)
	return info.Last, err
}

// Info returns the current state of the log. It returns [ErrGap] for an incomplete log, and for a log that ends
// before an event that this process has seen.
func (l *Log) Info(ctx context.Context) (Info, error) {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	var state Info
	err := l.retry(ctx, func(ctx context.Context) error {
		info, err := l.ours(ctx)
		if err != nil {
			return err
		}
		state = infoOf(info)
		if err := whole(info); err != nil {
			return err
		}
		return l.rolledBack(info)
	})
	if err != nil {
		return Info{}, fmt.Errorf("state of the log at %s: %w", l.opts.where(), err)
	}
	return state, nil
}

func infoOf(s *jetstream.StreamInfo) Info {
	first, sealed := s.State.FirstSeq, uint64(0)
	if link, _, err := sealedOf(s.Config); err == nil && link.Last > 0 {
		first, sealed = 1, link.Last
	}
	return Info{
		First: first, Sealed: sealed, Last: s.State.LastSeq, Bytes: s.State.Bytes,
		Replicas: s.Config.Replicas, Created: s.Created, Asked: s.TimeStamp,
	}
}

// whole returns an error if the server itself reports losses.
func whole(info *jetstream.StreamInfo) error {
	s := info.State
	sealed, _, err := sealedOf(info.Config)
	if err != nil {
		return err
	}
	switch {
	case s.Lost != nil:
		return fmt.Errorf("%w: the server lost %d events (%d bytes) to a damaged block; %s", ErrGap, len(s.Lost.Msgs), s.Lost.Bytes, restore)
	case s.LastSeq < sealed.Last:
		return fmt.Errorf("%w: stream %s ends at event %d, and events up to %d are sealed; %s", ErrGap, info.Config.Name, s.LastSeq, sealed.Last, restore)
	case s.LastSeq > sealed.Last && s.FirstSeq != sealed.Last+1:
		return fmt.Errorf("%w: stream %s begins at event %d, want %d; %s", ErrGap, info.Config.Name, s.FirstSeq, sealed.Last+1, restore)
	case s.NumDeleted > 0 || s.Msgs != s.LastSeq-sealed.Last:
		return fmt.Errorf("%w: %d of %d events are deleted; %s", ErrGap, s.LastSeq-sealed.Last-s.Msgs, s.LastSeq, restore)
	}
	return nil
}

// streamInfo asks once. It returns [ErrNoLog] if there is no stream.
func (l *Log) streamInfo(ctx context.Context) (*jetstream.StreamInfo, error) {
	info, err := l.tailInfo(ctx)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, fmt.Errorf("%w: the server shows no stream %s: either it was never made, or the server runs on another directory, with another account or with another encryption key; nothing was created or changed", ErrNoLog, Stream)
	}
	if err != nil {
		return nil, fmt.Errorf("stream %s: %w", l.stream(), err)
	}
	return info, nil
}

// ours is streamInfo for an opened log: the stream must be the same.
func (l *Log) ours(ctx context.Context) (*jetstream.StreamInfo, error) {
	l.mu.Lock()
	epoch, created, store := l.epoch, l.tail.created, l.store
	l.mu.Unlock()
	info, err := l.streamInfo(ctx)
	if err != nil {
		return nil, err
	}
	if !created.IsZero() && !info.Created.Equal(created) {
		if l.continues(info) {
			return info, l.adopt(info, store)
		}
		return nil, fmt.Errorf("%w: the stream %s was recreated at %s; connect to the server that has this store",
			ErrForeign, info.Config.Name, info.Created.Format(time.RFC3339))
	}
	if err := l.upToDate(info); err != nil {
		return nil, err
	}
	l.mu.Lock()
	l.checked = max(l.checked, epoch)
	l.mu.Unlock()
	return info, nil
}

// behindPatience is how long the servers of a replicated log may have fewer events than this
// process has seen before that counts as a loss. It is less than [DefaultAppend], so that a
// call reports the loss and not its deadline.
const behindPatience = 10 * time.Second

// saw notes that the log has an event.
func (l *Log) saw(sequence uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen = max(l.seen, sequence)
}

// upToDate returns a transient error for the answer of a server that has not all events
// which this process has seen. In a cluster, two servers may believe to be the leader for a
// while, and a new one does not have all events at once. A log of one copy has no such
// server: what it lacks is lost.
func (l *Log) upToDate(info *jetstream.StreamInfo) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	last, now := info.State.LastSeq, time.Now()
	before := l.stale
	l.stale = now
	switch {
	case info.Config.Replicas <= 1 || last >= l.seen:
		l.seen, l.behind = max(l.seen, last), time.Time{}
		return nil
	case l.behind.IsZero() || now.Sub(before) > l.patience: // or nothing was asked since an earlier one
		l.behind = now
	case now.Sub(l.behind) > l.patience:
		return nil
	}
	return fmt.Errorf("%w: the server that answered has events up to %d, and the log has event %d", errAgain, last, l.seen)
}

// rolledBack returns an error if a log of several copies has stayed behind what this process has seen: see upToDate.
func (l *Log) rolledBack(info *jetstream.StreamInfo) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if last := info.State.LastSeq; info.Config.Replicas > 1 && last < l.seen {
		return fmt.Errorf("%w: it ends at event %d, but event %d was in it: it was rolled back; %s", ErrGap, last, l.seen, restore)
	}
	return nil
}

// replicated reports whether the log has several copies, as far as it is known.
func (l *Log) replicated() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.tail.replicas > 1
}

// known checks, once per connection, that the server behind it has our stream, so that
// a retry never writes into another store's log.
func (l *Log) known(ctx context.Context) error {
	l.mu.Lock()
	known := l.checked == l.epoch || l.tail.created.IsZero()
	l.mu.Unlock()
	if known {
		return nil
	}
	_, err := l.ours(ctx)
	return err
}

func (l *Log) first(ctx context.Context) (events.Event, events.StoreCreated, error) {
	m, err := l.get(ctx, msgGet{Seq: 1})
	if errors.Is(err, errNoMessage) {
		return events.Event{}, events.StoreCreated{}, fmt.Errorf("%w: event 1 cannot be read", ErrGap)
	}
	if err != nil {
		return events.Event{}, events.StoreCreated{}, err
	}
	if m.Kind != (events.StoreCreated{}).Kind() {
		return m.Event, events.StoreCreated{}, nil
	}
	created, err := storeCreated(m.Event)
	return m.Event, created, err
}

func storeCreated(e events.Event) (events.StoreCreated, error) {
	body, err := e.Body()
	if err != nil {
		return events.StoreCreated{}, err
	}
	created, ok := body.(*events.StoreCreated)
	if !ok {
		return events.StoreCreated{}, fmt.Errorf("event %s is not store.created", e.Kind)
	}
	return *created, nil
}
