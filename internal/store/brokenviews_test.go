package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store/views"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// TestViewsDirectoryFails breaks the file system of the views in every way, each in its own
// process: a failed database keeps its goroutines. See [breakViews].
func TestViewsDirectoryFails(t *testing.T) {
	t.Parallel()
	for _, how := range []string{"ENOSPC", "EIO", "EROFS", "tables", "tmpfs"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			viewsFail(t, how)
		})
	}
}

// TestViewsDirectoryDoesNotAnswer takes long, until the directory counts as failed: a subtest
// would start after most other tests, and all would wait for it.
func TestViewsDirectoryDoesNotAnswer(t *testing.T) {
	t.Parallel()
	viewsFail(t, "silent")
}

func viewsFail(t *testing.T, how string) {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// In a name space of its own every user may mount a disk.
	cmd := exec.CommandContext(t.Context(), "unshare", "-rm", exe)
	cmd.Env = append(os.Environ(), roleEnv+"=views", "CKPTSTORE_TEST_DIR="+t.TempDir(), "CKPTSTORE_TEST_HOW="+how)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// lines is a log that tests search.
type lines struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write implements io.Writer.
func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lines) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), text)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// brokenFS is a file system that can be broken.
type brokenFS struct {
	broken atomic.Bool
	fs     vfs.FS
	set    func(broken bool) error
}

func (v *brokenFS) breaks(broken bool) error {
	v.broken.Store(broken)
	if v.set == nil {
		return nil
	}
	return v.set(broken)
}

// viewsOf makes the file system of a store's views.
func viewsOf(how, dir string) (*brokenFS, error) {
	v := &brokenFS{}
	cause := map[string]error{"ENOSPC": syscall.ENOSPC, "EIO": syscall.EIO, "EROFS": syscall.EROFS, "tables": syscall.EIO}[how]
	never := make(chan struct{})
	v.fs = errorfs.Wrap(vfs.Default, errorfs.InjectorFunc(func(op errorfs.Op) error {
		switch {
		case !v.broken.Load() || op.Kind.ReadOrWrite() != errorfs.OpIsWrite:
			return nil
		case how == "silent":
			<-never
		case how == "tables" && !strings.HasSuffix(op.Path, ".sst"):
			return nil
		}
		return cause
	}))
	if how != "tmpfs" {
		return v, nil
	}
	v.fs = nil
	at := filepath.Join(dir, "views")
	if err := os.MkdirAll(at, 0o700); err != nil {
		return nil, err
	}
	fill := filepath.Join(at, "zeros")
	v.set = func(broken bool) error {
		if !broken {
			return os.Remove(fill)
		}
		return fillTo(fill, at, 0)
	}
	return v, unix.Mount("tmpfs", at, "tmpfs", 0, "size=256m,mode=0700")
}

// breakViews runs as another process. It breaks the file system of the views, once while the store
// is open and once from the start. The store continues, answers what is in the log, in this
// process and in others, and closes. When the file system works again, the views are on disk again.
func breakViews(ctx context.Context) (err error) {
	dir, how := filepath.Join(os.Getenv("CKPTSTORE_TEST_DIR"), "store"), os.Getenv("CKPTSTORE_TEST_HOW")
	ctx, cancel := context.WithTimeout(ctx, 8*limit)
	defer cancel()
	if _, err := Init(ctx, dir, ""); err != nil {
		return err
	}
	v, err := viewsOf(how, dir)
	if err != nil {
		return err
	}
	said := &lines{}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w\n%s", err, said)
		}
	}()
	o := Options{Location: dir, views: views.Options{FS: v.fs, Retry: 100 * time.Millisecond}, Logger: slog.New(slog.NewTextHandler(said, nil))}
	s, err := Open(ctx, o)
	if err != nil {
		return err
	}
	other, err := Open(ctx, Options{Location: dir})
	if err != nil {
		return err
	}
	const inMemory, onDisk = "views kept in memory", "views kept on disk again"
	n := 0
	until := func(what string, times int) error {
		for said.count(what) < times {
			n++
			// A busy machine needs this much time to read and fold rows.
			if !sleep(ctx, 10*time.Millisecond) {
				return fmt.Errorf("until %s: %w", what, ctx.Err())
			}
			f, err := events.NewFact(Stamp("test"), events.Scope{Run: "run", Trial: trialName, Actor: events.Rank(0)},
				events.Metrics{Attempt: 1, Iteration: n, Step: int64(n), Metrics: map[string]any{"x": strings.Repeat("x", 100<<10)}})
			if err == nil {
				_, err = s.Log.Append(ctx, f)
			}
			if err != nil {
				return fmt.Errorf("until %s: %w", what, err)
			}
		}
		return nil
	}
	right := func(when string) error {
		if _, err := decide(ctx, s, "run", begun(fmt.Sprint("step-", n, len(when)))); err != nil {
			return fmt.Errorf("%s: %w", when, err)
		}
		want, err := replayDigest(ctx, s)
		if err != nil {
			return fmt.Errorf("%s: %w", when, err)
		}
		for _, in := range []*Store{s, other} {
			got, err := query.Ask(ctx, in.Views(), query.Digest, query.Params{})
			if err != nil || got != want {
				return fmt.Errorf("%s, the views have digest %s and the log %s: %w", when, got, want, err)
			}
		}
		if !s.Owns() || other.Owns() {
			return fmt.Errorf("%s: the store has another owner", when)
		}
		return nil
	}
	if err := right("at first"); err != nil {
		return err
	}
	if err := v.breaks(true); err != nil {
		return err
	}
	if how == "silent" {
		return closesSoon(s, other)
	}
	if err := until(inMemory, 1); err != nil {
		return err
	}
	if err := right("in memory"); err != nil {
		return err
	}
	failed := filepath.Join(dir, "views.failed") // by which the next owner waits less long
	if !exists(failed) {
		return errors.New("the next owner does not learn of the failure")
	}
	for _, text := range []string{filepath.Join(dir, "views"), "next=", "free space there"} {
		if said.count(text) == 0 {
			return fmt.Errorf("the warning does not contain %q", text)
		}
	}
	if err := v.breaks(false); err != nil {
		return err
	}
	if err := until(onDisk, 1); err != nil {
		return err
	}
	if err := right("on disk again"); err != nil {
		return err
	}
	if exists(failed) {
		return errors.New("the next owner learns of a failure, and the views work again")
	}
	// The next owner finds them broken from the start, and the owner after it intact.
	if err := v.breaks(true); err != nil {
		return err
	}
	if err := until(inMemory, 2); err != nil {
		return err
	}
	if err := closesSoon(other, s); err != nil {
		return err
	}
	warned := said.count(inMemory)
	if s, err = Open(ctx, o); err != nil {
		return err
	}
	if other, err = Open(ctx, Options{Location: dir}); err != nil {
		return err
	}
	// The open may not need every table.
	if how != "tables" && said.count(inMemory) == warned {
		return errors.New("opened with a broken directory, it logs nothing")
	}
	if err := right("opened in memory"); err != nil {
		return err
	}
	if err := v.breaks(false); err != nil {
		return err
	}
	return errors.Join(closesSoon(other, s), reopened(ctx, dir))
}

// reopened opens a store without an owner whose directory works.
func reopened(ctx context.Context, dir string) error {
	said := &lines{}
	s, err := Open(ctx, Options{Location: dir, Logger: slog.New(slog.NewTextHandler(said, nil))})
	if err != nil {
		return err
	}
	want, err := replayDigest(ctx, s)
	if err != nil {
		return err
	}
	if got, err := query.Ask(ctx, s.Views(), query.Digest, query.Params{}); err != nil || got != want || said.String() != "" {
		return fmt.Errorf("with a whole directory, the views have digest %s and the log %s, and it logs %s: %w", got, want, said, err)
	}
	if exists(filepath.Join(dir, "views.failed")) {
		return errors.New("after an owner with a whole directory, the next learns of a failure")
	}
	return s.Close()
}

// closesSoon closes stores whose views may be stuck.
func closesSoon(stores ...*Store) error {
	closed := make(chan error, 1)
	go func() {
		var errs []error
		for _, s := range stores {
			errs = append(errs, s.Close())
		}
		closed <- errors.Join(errs...)
	}()
	select {
	case err := <-closed:
		return err
	case <-time.After(2 * limit):
		return errors.New("the store does not close")
	}
}

// replayDigest is the digest of the rows that follow from the log.
func replayDigest(ctx context.Context, s *Store) (string, error) {
	rows, err := viewdb.Replay(ctx, s.Log, 0)
	if err != nil {
		return "", err
	}
	sum, err := projections.Digest(rows)
	return fmt.Sprintf("%x", sum), err
}
