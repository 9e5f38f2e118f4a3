package launch

import "time"

// Waits between attempts that end at once: a program that cannot run would
// otherwise fill the log with attempts.
const (
	firstBackoff = 100 * time.Millisecond
	maxBackoff   = 10 * time.Second
)

// backoff is how long to wait before the next attempt.
type backoff struct {
	enough time.Duration // an attempt that lived so long is no such failure
	next   time.Duration // zero: the first
}

// after is the wait after an attempt that lived a while, and committed a
// checkpoint or not.
func (b *backoff) after(lived time.Duration, committed bool) time.Duration {
	if committed || lived >= b.enough {
		b.next = 0
		return 0
	}
	b.next = max(firstBackoff, b.next)
	wait := b.next
	b.next = min(2*wait, maxBackoff)
	return wait
}
