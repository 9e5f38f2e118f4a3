package session

import (
	"context"
	"errors"
	"sync"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// roomEvery is the pause between retries of a call for which the log has no room.
const roomEvery = time.Second

// lastRoom bounds how long an ending job waits for room, in total. The log still
// takes decisions: saves that cannot be finished are aborted by one.
const lastRoom = 10 * time.Second

// roomMeter adds up the time in which calls waited for room. Other deadlines of a
// job are extended by it.
type roomMeter struct {
	mu    sync.Mutex
	calls int // calls that wait
	since time.Time
	total time.Duration
}

// begin reports whether this is the only waiting call.
func (m *roomMeter) begin() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.calls++; m.calls == 1 {
		m.since = time.Now()
	}
	return m.calls == 1
}

// end reports whether no call waits any more, and how long calls waited.
func (m *roomMeter) end() (bool, time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d := time.Since(m.since)
	if m.calls--; m.calls == 0 {
		m.total += d
	}
	return m.calls == 0, d
}

func (m *roomMeter) waited() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.calls > 0 {
		return m.total + time.Since(m.since)
	}
	return m.total
}

// forRoom repeats a call while the disk has no room for it. It stops when ctx
// ends, or lastRoom after the job was asked to end.
func (l *lastWords) forRoom(ctx context.Context, call func() error) error {
	err := call()
	if l == nil || !l.roomy || !errors.Is(err, syscall.ENOSPC) {
		return err
	}
	select {
	case <-l.noRoom:
		return err
	default:
	}
	if l.room.begin() {
		l.log.Warn("log has no room; retrying", "error", err)
	}
	defer func() {
		if last, d := l.room.end(); last && !errors.Is(err, syscall.ENOSPC) {
			l.log.Info("log has room again", "after", d.Round(time.Millisecond))
		}
	}()
	timer := time.NewTimer(roomEvery)
	defer timer.Stop()
	for errors.Is(err, syscall.ENOSPC) {
		select {
		case <-timer.C:
			timer.Reset(roomEvery)
		case <-l.noRoom:
			return err
		case <-ctx.Done():
			return err
		}
		err = call()
	}
	return err
}

// roomyBlobs are blobs whose writes wait for room.
type roomyBlobs struct {
	Blobs
	words *lastWords
}

var _ Blobs = roomyBlobs{}

// Put implements Blobs.
func (b roomyBlobs) Put(ctx context.Context, data []byte) (blob events.Blob, err error) {
	err = b.words.forRoom(ctx, func() error {
		blob, err = b.Blobs.Put(ctx, data)
		return err
	})
	return blob, err
}

// untilRoom makes all appends and queries of a job wait for room, except the
// immediate ones.
func (s Store) untilRoom() Store {
	s.words.roomy = true
	if s.Blobs != nil {
		s.Blobs = roomyBlobs{s.Blobs, s.words}
	}
	return s
}
