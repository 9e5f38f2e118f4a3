package session

import (
	"context"
	"errors"
	"sync"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// roomEvery is how often a call is made again for which the log has no room.
const roomEvery = time.Second

// lastRoom bounds how long a job that was told to end waits for room in all. The
// log takes decisions all the same: what cannot be finished is aborted by one.
const lastRoom = 10 * time.Second

// roomMeter adds up the time in which a call waited for room. What else a job has
// to wait for has no less time because of it.
type roomMeter struct {
	mu    sync.Mutex
	calls int // that wait
	since time.Time
	total time.Duration
}

// begin reports whether no other call waits.
func (m *roomMeter) begin() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.calls++; m.calls == 1 {
		m.since = time.Now()
	}
	return m.calls == 1
}

// end reports whether no other call waits, and how long some did.
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

// forRoom makes a call, and makes it again as long as the disk has no room for
// it, ctx has not ended, and the job was not told to end lastRoom ago.
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
		l.log.Warn("the log has no room; the job goes on and waits for it", "error", err)
	}
	defer func() {
		if last, d := l.room.end(); last && !errors.Is(err, syscall.ENOSPC) {
			l.log.Info("the log has room again", "after", d.Round(time.Millisecond))
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

// roomyBlobs are blobs that wait for room.
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

// untilRoom makes all that a job says and asks wait for room, but what is said
// at once.
func (s Store) untilRoom() Store {
	s.words.roomy = true
	if s.Blobs != nil {
		s.Blobs = roomyBlobs{s.Blobs, s.words}
	}
	return s
}
