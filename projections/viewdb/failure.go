package viewdb

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// ErrFailed reports a view whose database cannot continue, for example because its
// directory was deleted, or because its file system is full, returns errors or does not
// answer. The log still has everything that the view held.
var ErrFailed = problem.New(problem.Unavailable, "views failed")

// failure ends a database that cannot continue. Four places report it:
//
//   - the [fence], when an operation of the file system fails in a way that a
//     retry does not cure, or does not return;
//   - Pebble's background work. Pebble would retry a flush forever, and
//     its Open and Close wait for that flush without a deadline;
//   - Pebble's logger. Pebble counts on Fatalf not returning: it may hold its
//     locks there;
//   - [DB.Close], when a running call does not end.
//
// The goroutine that reports blocks forever, no other goroutine touches the database
// again, and its callers return without waiting for it.
type failure struct {
	once sync.Once
	done chan struct{} // closed when the database has failed
	err  error         // why; set before done is closed

	opened atomic.Bool // the database is open
}

func (f *failure) set(message string) {
	f.once.Do(func() {
		f.err = fmt.Errorf("%w: %s: what they held is in the log", ErrFailed, message)
		close(f.done)
	})
}

// after fails the database unless the returned function is called within limit.
func (f *failure) after(limit time.Duration, what string) (stop func() bool) {
	return time.AfterFunc(limit, func() { f.set(fmt.Sprintf("%s did not return within %v", what, limit)) }).Stop
}

// lasting returns err, or blocks forever: after an error of its write-ahead log an open
// database cannot continue.
func (f *failure) lasting(err error) error {
	if err != nil && f.opened.Load() {
		f.set(err.Error())
		select {}
	}
	return err
}

func (f *failure) get() error {
	select {
	case <-f.done:
		return f.err
	default:
		return nil
	}
}

// leaveTime is how long a goroutine inside a failed database has to leave, so that the
// memory it shares with its caller is no longer written.
const leaveTime = time.Second

// guard runs do, which uses the database. If the database fails, guard returns without
// waiting for do.
func (f *failure) guard(do func() error) error {
	if err := f.get(); err != nil {
		return err
	}
	type outcome struct {
		err      error
		finished bool
		panicked any
	}
	ended := make(chan outcome, 1)
	go func() {
		var o outcome
		defer func() {
			if !o.finished {
				o.panicked = recover()
			}
			ended <- o
		}()
		o.err = do()
		o.finished = true
	}()
	var o outcome
	select {
	case o = <-ended:
		if why := f.get(); why != nil && o.err != nil && o.finished {
			return why // the origin of o.err
		}
	case <-f.done:
		timer := time.NewTimer(leaveTime)
		defer timer.Stop()
		select {
		case <-ended:
		case <-timer.C:
		}
		return f.err
	}
	if o.finished {
		return o.err
	}
	// Pebble panics with an error if it cannot rotate its log.
	if err, ok := o.panicked.(error); ok && !errors.As(err, new(runtime.Error)) {
		f.set(err.Error())
		return f.err
	}
	if o.panicked != nil {
		panic(o.panicked)
	}
	runtime.Goexit() // as do has
	return nil
}

// events receives Pebble's background failures. Each is final: Pebble would repeat the
// work at once and forever, at the cost of a processor and of a new file each time.
// Pebble may hold its locks here, so all further calls of this database block.
func (f *failure) events() *pebble.EventListener {
	return &pebble.EventListener{BackgroundError: func(err error) {
		f.set(err.Error())
		select {}
	}}
}

// quiet passes on Pebble's messages, most of them for debugging.
type quiet struct {
	log  *slog.Logger
	fail *failure
}

var _ pebble.Logger = quiet{}

// Infof implements [pebble.Logger].
func (q quiet) Infof(format string, args ...any) { q.log.Debug(fmt.Sprintf(format, args...)) }

// Errorf implements [pebble.Logger].
func (q quiet) Errorf(format string, args ...any) {
	if q.fail.get() == nil { // after a failure its messages add nothing
		q.log.Error(fmt.Sprintf(format, args...))
	}
}

// Fatalf implements [pebble.Logger] and does not return.
func (q quiet) Fatalf(format string, args ...any) {
	q.fail.set(fmt.Sprintf(format, args...))
	select {}
}
