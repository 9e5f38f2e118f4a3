package main

import (
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/bytesize"
)

// bar is a line with bytes, rate and time left, drawn on a terminal when
// something takes more than two seconds.
type bar struct {
	to    io.Writer // nil: not drawn
	what  string
	total int64
	began time.Time

	mu    sync.Mutex
	drawn time.Time
	ended bool
}

func (c *console) progress(what string, total int64) *bar {
	b := &bar{what: what, total: total, began: time.Now()}
	if onTerminal(c.screen) && !c.quiet {
		b.to = c.screen
	}
	return b
}

func (b *bar) set(bytes int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	spent := now.Sub(b.began)
	if b.to == nil || spent < 2*time.Second || now.Sub(b.drawn) < 100*time.Millisecond || bytes == 0 {
		return
	}
	b.drawn = now
	rate := float64(bytes) / spent.Seconds()
	if b.total == 0 { // it is not known
		fmt.Fprintf(b.to, "\r\x1b[K%s  %s  %s/s", b.what, bytesize.Text(bytes), bytesize.Text(int64(rate)))
		return
	}
	left := time.Duration(float64(b.total-bytes)/rate) * time.Second
	fmt.Fprintf(b.to, "\r\x1b[K%s  %s of %s  %s/s  %v left", b.what, bytesize.Text(bytes), bytesize.Text(b.total), bytesize.Text(int64(rate)), max(0, left))
}

// setOf is set where the sum becomes known on the way.
func (b *bar) setOf(bytes, total int64) {
	b.mu.Lock()
	b.total = total
	b.mu.Unlock()
	b.set(bytes)
}

func (b *bar) done() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.ended && !b.drawn.IsZero() {
		fmt.Fprint(b.to, "\r\x1b[K")
	}
	b.ended = true
}

// warn says something on stderr that is no error.
func (c *console) warn(format string, values ...any) {
	if !c.quiet {
		fmt.Fprintf(c.err, c.name+": "+format+"\n", values...)
	}
}
