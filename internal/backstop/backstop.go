// Package backstop ends a program that does not end when asked: a disk that does
// not answer can block any part of it, in places that no deadline of the program
// reaches.
package backstop

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"
)

// After exits the process with code when limit has passed, unless stop is called
// first. Before it exits, it writes to w what it waited for; w must not block for
// longer than a second.
func After(limit time.Duration, w io.Writer, program string, why string, code int) (stop func() bool) {
	return time.AfterFunc(limit, func() {
		written := make(chan struct{})
		go func() {
			defer close(written)
			fmt.Fprintf(w, "%s: %s, and did not end within %v: a disk or a server does not answer; exit without waiting for it\n", program, why, limit)
		}()
		select {
		case <-written:
		case <-time.After(time.Second):
		}
		os.Exit(code)
	}).Stop
}

// AfterDone is [After], counted from the end of ctx.
func AfterDone(ctx context.Context, limit time.Duration, w io.Writer, program string, code int) (stop func()) {
	ended := make(chan struct{})
	go func() {
		select {
		case <-ctx.Done():
		case <-ended:
			return
		}
		defer After(limit, w, program, fmt.Sprintf("told to end (%v)", context.Cause(ctx)), code)()
		<-ended
	}()
	return func() { close(ended) }
}
