package retry

import (
	"sync"
	"time"
)

// Silence returns the total time in which the job's log did not answer or had no
// room.
func (c *Calls) Silence() time.Duration {
	if c == nil {
		return 0
	}
	return c.quiet.silence() + c.room.waited()
}

// silenceAfter is how long a waiting call may stay unanswered before the log
// counts as silent.
const silenceAfter = 5 * time.Second

// silenceMeter adds up the time in which the log did not answer. Deadlines of a
// job are extended by it.
type silenceMeter struct {
	mu    sync.Mutex
	calls int           // calls that wait
	since time.Time     // time of the last answer, or start of the longest waiting call
	total time.Duration // of past silences
}

func (m *silenceMeter) begin() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.calls++; m.calls == 1 {
		m.since = time.Now()
	}
}

func (m *silenceMeter) answered() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.total = m.lost()
	m.since = time.Now()
}

func (m *silenceMeter) end() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.calls == 1 {
		m.total = m.lost()
	}
	m.calls--
}

// lost returns the length of the current silence. The caller holds the lock.
func (m *silenceMeter) lost() time.Duration {
	if m.calls > 0 {
		if d := time.Since(m.since); d > silenceAfter {
			return m.total + d
		}
	}
	return m.total
}

func (m *silenceMeter) silence() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.lost()
}
