package retry

import (
	"context"
	"errors"
	"sync"
	"syscall"
	"time"
)

// RoomPause is the pause between retries of a call for which the log has no room.
const RoomPause = time.Second

// lastRoom bounds how long an ending job waits for room, in total. The log still
// takes decisions: saves that cannot be finished are aborted by one.
const lastRoom = 10 * time.Second

// WaitForRoom makes the job's calls wait for room. It is called before the first of them.
func (c *Calls) WaitForRoom() { c.roomy = true }

// UntilRoom repeats a call while the disk has no room for it, if the job's calls wait for room. It stops when ctx
// ends, or lastRoom after the job was asked to end.
func (c *Calls) UntilRoom(ctx context.Context, call func() error) error {
	err := call()
	if c == nil || !c.roomy || !errors.Is(err, syscall.ENOSPC) {
		return err
	}
	select {
	case <-c.noRoom:
		return err
	default:
	}
	if c.room.begin() {
		c.Log.Warn("log has no room; retrying", "error", err)
	}
	defer func() {
		if last, d := c.room.end(); last && !errors.Is(err, syscall.ENOSPC) {
			c.Log.Info("log has room again", "after", d.Round(time.Millisecond))
		}
	}()
	timer := time.NewTimer(RoomPause)
	defer timer.Stop()
	for errors.Is(err, syscall.ENOSPC) {
		select {
		case <-timer.C:
			timer.Reset(RoomPause)
		case <-c.noRoom:
			return err
		case <-ctx.Done():
			return err
		}
		err = call()
	}
	return err
}

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
