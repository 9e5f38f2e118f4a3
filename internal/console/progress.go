package console

import (
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/bytesize"
)

// Bar is a progress line with bytes, rate and time left. It appears on a terminal
// when an operation takes more than two seconds.
type Bar struct {
	to    io.Writer // nil: not drawn
	what  string
	total int64
	began time.Time

	mu    sync.Mutex
	drawn time.Time
	ended bool
}

// Progress begins a bar for total bytes; 0 means that the total is unknown.
func (c *Console) Progress(what string, total int64) *Bar {
	b := &Bar{what: what, total: total, began: time.Now()}
	if OnTerminal(c.Screen) && !c.Quiet {
		b.to = c.Screen
	}
	return b
}

// Set updates the number of bytes done, and draws the bar.
func (b *Bar) Set(bytes int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	spent := now.Sub(b.began)
	if b.to == nil || spent < 2*time.Second || now.Sub(b.drawn) < 100*time.Millisecond || bytes == 0 {
		return
	}
	b.drawn = now
	rate := float64(bytes) / spent.Seconds()
	if b.total == 0 { // unknown
		fmt.Fprintf(b.to, "\r\x1b[K%s  %s  %s/s", b.what, bytesize.Text(bytes), bytesize.Text(int64(rate)))
		return
	}
	left := time.Duration(float64(b.total-bytes)/rate) * time.Second
	fmt.Fprintf(b.to, "\r\x1b[K%s  %s of %s  %s/s  %v left", b.what, bytesize.Text(bytes), bytesize.Text(b.total), bytesize.Text(int64(rate)), max(0, left))
}

// SetOf is Set with a total that becomes known while the operation runs.
func (b *Bar) SetOf(bytes, total int64) {
	b.mu.Lock()
	b.total = total
	b.mu.Unlock()
	b.Set(bytes)
}

// Shown reports whether the bar is drawn at all.
func (b *Bar) Shown() bool { return b.to != nil }

// Done removes the bar from the terminal.
func (b *Bar) Done() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.ended && !b.drawn.IsZero() {
		fmt.Fprint(b.to, "\r\x1b[K")
	}
	b.ended = true
}

// Warn prints a warning on stderr, unless the command is quiet.
func (c *Console) Warn(format string, values ...any) {
	if !c.Quiet {
		fmt.Fprintf(c.Err, c.Name+": "+format+"\n", values...)
	}
}
