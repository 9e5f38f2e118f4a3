package viewdb_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// failingEnv is set in the process of a test whose database fails: the database keeps
// its goroutines, which must not leak into other tests.
const failingEnv = "CKPTSTORE_TEST_FAILING_VIEWS"

// apart runs the calling test in a separate process, next to other tests. It returns false in
// the process that only waits for it.
func apart(t *testing.T) bool {
	t.Helper()
	t.Parallel()
	if os.Getenv(failingEnv) != "" {
		return true
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.timeout=5m")
	cmd.Env = append(os.Environ(), failingEnv+"=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	return false
}

// TestDeletedInUse deletes the directory of an open view and continues folding: the
// process survives, and waiters and readers get an error.
func TestDeletedInUse(t *testing.T) {
	if !apart(t) {
		return
	}
	dir := filepath.Join(t.TempDir(), "views")
	db, err := viewdb.Open(dir, viewdb.Options{Store: storeID})
	if err != nil {
		t.Fatal(err)
	}
	src := newLog(story()...)
	stopped := make(chan error, 1)
	go func() { stopped <- db.Follow(t.Context(), src) }()
	await(t, db, 6)
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	// More than the database keeps in memory, so that it needs new files.
	at := uint64(6)
	for range 48 {
		at++
		src.append(event(at, lane, events.Metrics{Attempt: 1, Step: int64(at), Metrics: map[string]any{"x": strings.Repeat("y", 1<<20)}}))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	failed := func(what string, err error) {
		t.Helper()
		if !errors.Is(err, viewdb.ErrFailed) || !strings.Contains(err.Error(), "what they held is in the log") {
			t.Errorf("%s: %v", what, err)
		}
	}
	failed("wait", db.Wait(ctx, at+1))
	failed("follow", <-stopped)
	failed("view", db.View(func(projections.Reader) error { return nil }))
	failed("catch up", db.CatchUp(t.Context(), src))
	failed("close", db.Close())
	if err := db.Close(); err != nil {
		t.Errorf("closed again: %v", err)
	}
	// Its directory can be opened again at once, in this process.
	again, err := viewdb.Open(dir, viewdb.Options{Store: storeID})
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(again.CatchUp(t.Context(), src), again.Close()); err != nil || again.Cursor() != at {
		t.Errorf("opened again: at event %d, %v", again.Cursor(), err)
	}
}

// faulty is a file system that fails or stops answering on command.
type faulty struct {
	vfs.FS
	fail  atomic.Pointer[func(errorfs.Op) error]
	calls atomic.Int64 // made while it fails
}

func newFaulty(inner vfs.FS) *faulty {
	f := &faulty{}
	f.FS = errorfs.Wrap(inner, errorfs.InjectorFunc(func(op errorfs.Op) error {
		fail := f.fail.Load()
		if fail == nil {
			return nil
		}
		f.calls.Add(1)
		return (*fail)(op)
	}))
	return f
}

func (f *faulty) breaks(how func(errorfs.Op) error) { f.fail.Store(&how) }

// writes fails operations that change the disk.
func writes(err error) func(errorfs.Op) error {
	return func(op errorfs.Op) error {
		if op.Kind.ReadOrWrite() == errorfs.OpIsWrite && op.Kind != errorfs.OpRemove {
			return err
		}
		return nil
	}
}

// tables fails only the tables: an open database finds it in the background.
func tables(err error) func(errorfs.Op) error {
	return func(op errorfs.Op) error {
		if op.Kind.ReadOrWrite() == errorfs.OpIsWrite && strings.HasSuffix(op.Path, ".sst") {
			return err
		}
		return nil
	}
}

// within fails the test if do does not return promptly.
func within(t *testing.T, what string, do func() error) error {
	t.Helper()
	ended := make(chan error, 1)
	go func() { ended <- do() }()
	select {
	case err := <-ended:
		return err
	case <-time.After(60 * time.Second):
		t.Fatalf("%s did not return", what)
		return nil
	}
}

func wantFailed(t *testing.T, what string, err, cause error) {
	t.Helper()
	if !errors.Is(err, viewdb.ErrFailed) || !strings.Contains(err.Error(), cause.Error()) {
		t.Errorf("%s: %v, want that the views failed: %v", what, err, cause)
	}
}

// big appends events that fill the write-ahead log, so that its rows move to a table
// when the view is next opened.
func big(src *fakeLog, n int) uint64 {
	at, _ := src.Last(context.Background())
	for range n {
		at++
		src.append(event(at, lane, events.Metrics{Attempt: 1, Iteration: int(at), Step: int64(at), Metrics: map[string]any{"x": strings.Repeat("y", 1<<20)}}))
	}
	return at
}

// Pebble retries a flush in the background forever, and its opening waits for that.
// Here it fails, the database makes no further call, and another can be opened in its
// place when the file system has recovered.
func TestFileSystemFailsWhileOpening(t *testing.T) {
	if !apart(t) {
		return
	}
	for _, cause := range []error{syscall.ENOSPC, syscall.EIO, syscall.EROFS} {
		for name, how := range map[string]func(error) func(errorfs.Op) error{"writes": writes, "tables": tables} {
			t.Run(fmt.Sprintf("%s, %v", name, cause), func(t *testing.T) {
				t.Parallel()
				mem := vfs.NewCrashableMem()
				src := newLog(story()...)
				db, err := viewdb.Open("views", viewdb.Options{FS: mem, Store: storeID})
				if err != nil {
					t.Fatal(err)
				}
				at := big(src, 3)
				if err := db.CatchUp(t.Context(), src); err != nil {
					t.Fatal(err)
				}
				fs := newFaulty(mem.CrashClone(vfs.CrashCloneCfg{})) // its rows are only in the write-ahead log
				shut(t, db)
				fs.breaks(how(cause))
				err = within(t, name+" open", func() error {
					_, err := viewdb.Open("views", viewdb.Options{FS: fs, Store: storeID})
					return err
				})
				wantFailed(t, name, err, cause)
				if calls := fs.calls.Load(); calls > 1000 {
					t.Errorf("%s, %v: %d calls of a file system that fails", name, cause, calls)
				}
				fs.fail.Store(nil)
				again, err := viewdb.Open("views", viewdb.Options{FS: fs, Store: storeID})
				if err != nil {
					t.Fatal(err)
				}
				if again.Cursor() != at {
					t.Errorf("%s, %v: opened again at event %d, want %d", name, cause, again.Cursor(), at)
				}
				shut(t, again)
			})
		}
	}
}

// A file system that fails under an open view ends all operations on the view.
func TestFileSystemFailsInUse(t *testing.T) {
	if !apart(t) {
		return
	}
	for _, cause := range []error{syscall.ENOSPC, syscall.EIO} {
		for name, how := range map[string]func(error) func(errorfs.Op) error{"writes": writes, "tables": tables} {
			t.Run(fmt.Sprintf("%s, %v", name, cause), func(t *testing.T) {
				t.Parallel()
				fs := newFaulty(vfs.NewMem())
				src := newLog(story()...)
				db, err := viewdb.Open("views", viewdb.Options{FS: fs, Store: storeID})
				if err != nil {
					t.Fatal(err)
				}
				stopped := make(chan error, 1)
				go func() { stopped <- db.Follow(context.Background(), src) }()
				await(t, db, 6)
				fs.breaks(how(cause))
				last := big(src, 48)
				wantFailed(t, name+" follow", within(t, "follow", func() error { return <-stopped }), cause)
				wantFailed(t, name+" wait", db.Wait(t.Context(), last+1), cause)
				wantFailed(t, name+" view", db.View(func(projections.Reader) error { return nil }), cause)
				wantFailed(t, name+" close", within(t, "close", db.Close), cause)
				calls := fs.calls.Load()
				fs.fail.Store(nil)
				again, err := viewdb.Open("views", viewdb.Options{FS: fs, Store: storeID})
				if err != nil {
					t.Fatalf("%s, %v, after %d calls: %v", name, cause, calls, err)
				}
				if err := again.CatchUp(t.Context(), src); err != nil || again.Cursor() != last {
					t.Errorf("opened again: at event %d, %v", again.Cursor(), err)
				}
				shut(t, again)
			})
		}
	}
}

// A file system that does not answer ends operations on the view within its patience,
// and ends the opening with the caller's context.
func TestFileSystemDoesNotAnswer(t *testing.T) {
	if !apart(t) {
		return
	}
	never := make(chan struct{})
	silent := func(op errorfs.Op) error {
		if op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
			<-never
		}
		return nil
	}
	t.Run("while it opens", func(t *testing.T) {
		t.Parallel()
		fs := newFaulty(vfs.NewMem())
		fs.breaks(silent)
		err := within(t, "open", func() error {
			_, err := viewdb.Open("views", viewdb.Options{FS: fs, Store: storeID, Patience: 100 * time.Millisecond})
			return err
		})
		wantFailed(t, "open", err, errors.New("did not return within 100ms"))
	})
	t.Run("while it opens, and the caller gives up", func(t *testing.T) {
		t.Parallel()
		fs := newFaulty(vfs.NewMem())
		fs.breaks(silent)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(50*time.Millisecond, cancel)
		err := within(t, "open", func() error {
			_, err := viewdb.OpenContext(ctx, "views", viewdb.Options{FS: fs, Store: storeID})
			return err
		})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("opened with a context that ended: %v", err)
		}
	})
	t.Run("in use", func(t *testing.T) {
		t.Parallel()
		fs := newFaulty(vfs.NewMem())
		db, err := viewdb.Open("views", viewdb.Options{FS: fs, Store: storeID, Patience: 100 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		src := newLog(story()...)
		stopped := make(chan error, 1)
		go func() { stopped <- db.Follow(context.Background(), src) }()
		await(t, db, 6)
		fs.breaks(silent)
		big(src, 1)
		wantFailed(t, "follow", within(t, "follow", func() error { return <-stopped }), errors.New("did not return within 100ms"))
		if err := within(t, "close", db.Close); !errors.Is(err, viewdb.ErrFailed) {
			t.Errorf("closed: %v", err)
		}
	})
}
