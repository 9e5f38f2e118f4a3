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

// ErrFailed is a view whose database could not go on, as when its directory
// was deleted under it, or its file system is full, returns errors or does not
// answer. What it held is in the log.
var ErrFailed = problem.New(problem.Unavailable, "views failed")

// failure is the end of a database that cannot go on. Four places report it:
//
//   - the [fence], when an operation of the file system fails in a way that a
//     retry does not cure, or does not return;
//   - Pebble's background work. Pebble would try a flush again for ever, and
//     its Open and Close wait for that flush without a deadline;
//   - Pebble's logger. Pebble counts on Fatalf not returning: it may hold its
//     locks there;
//   - [DB.Close], when a running call does not end.
//
// The goroutine that reports stays where it is, nobody touches the database
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

// after fails the database unless the result is called within limit.
func (f *failure) after(limit time.Duration, what string) (stop func() bool) {
	return time.AfterFunc(limit, func() { f.set(fmt.Sprintf("%s did not return within %v", what, limit)) }).Stop
}

// lasting is err, or does not return: after an error of an open database's
// write-ahead log there is nothing to go on with.
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

// leaveTime is how long one who is inside a failed database has to come out,
// so that what it shares with its caller is not written any more.
const leaveTime = time.Second

// guard runs do, which uses the database, and returns without it when the
// database fails.
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
			return why // which is what o.err came from
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
	// Pebble panics with an error where it cannot rotate its log.
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

// events gets Pebble's failures in the background. Each is the end: Pebble
// would repeat the work at once and for ever, at the cost of a processor and of
// a new file each time. Pebble may hold its locks here, so nobody gets any
// further in this database.
func (f *failure) events() *pebble.EventListener {
	return &pebble.EventListener{BackgroundError: func(err error) {
		f.set(err.Error())
		select {}
	}}
}

// quiet passes on what Pebble says, most of it for debugging.
type quiet struct {
	log  *slog.Logger
	fail *failure
}

var _ pebble.Logger = quiet{}

// Infof implements [pebble.Logger].
func (q quiet) Infof(format string, args ...any) { q.log.Debug(fmt.Sprintf(format, args...)) }

// Errorf implements [pebble.Logger].
func (q quiet) Errorf(format string, args ...any) {
	if q.fail.get() == nil { // after that, all it says is known
		q.log.Error(fmt.Sprintf(format, args...))
	}
}

// Fatalf implements [pebble.Logger] and does not return.
func (q quiet) Fatalf(format string, args ...any) {
	q.fail.set(fmt.Sprintf(format, args...))
	select {}
}
