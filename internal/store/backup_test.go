package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store/collection"
	"github.com/ckptstore/ckptstore/planner/retention"
	"github.com/ckptstore/ckptstore/projections"
)

// backedUpTo makes a backup and fails the test on an error.
func backedUpTo(t *testing.T, s *Store, dir string, o BackupOptions) Backed {
	t.Helper()
	out, err := s.Backup(t.Context(), dir, o)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func restored(t *testing.T, backup string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "restored")
	out, err := Restore(t.Context(), RestoreOptions{Backup: backup, Location: dir, Deep: true})
	if err != nil {
		t.Fatal(err)
	}
	if len(out.Incomplete) > 0 {
		t.Errorf("restored with %v", out.Incomplete)
	}
	return dir
}

// listedCommitted returns the committed checkpoints of all runs, by RUN@ID.
func listedCommitted(t *testing.T, s *Store) map[string]projections.Checkpoint {
	t.Helper()
	all := map[string]projections.Checkpoint{}
	for _, r := range ask(t, s, query.Runs, query.Params{}) {
		for _, c := range ask(t, s, query.Checkpoints, query.Params{Run: r.Name, All: true}) {
			if c.State == projections.Committed {
				all[c.Run+"@"+c.ID] = c
			}
		}
	}
	return all
}

// wholeCopy opens a copy, checks its log and every byte of every checkpoint that it lists,
// and returns the list.
func wholeCopy(t *testing.T, dir string) map[string]projections.Checkpoint {
	t.Helper()
	s := open(t, dir)
	all := listedCommitted(t, s)
	var list []projections.Checkpoint
	for _, c := range all {
		list = append(list, c)
	}
	reports, err := s.VerifyAll(t.Context(), list, VerifyOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i, r := range reports {
		if !r.Clean() || r.Chunks == 0 {
			t.Errorf("%s@%s in %s: %d chunks, %v", list[i].Run, list[i].ID, dir, r.Chunks, r.Findings)
		}
	}
	found, err := s.VerifyLog(t.Context(), nil)
	if err != nil || len(found.Findings) > 0 {
		t.Errorf("log of %s: %v, %v", dir, found.Findings, err)
	}
	shut(t, s)
	return all
}

// furnished makes a store with runs, a cut log, cursors, a blob, workers' output, a deleted
// checkpoint, one without a receipt, and files with two names.
func furnished(t *testing.T) (dir string, s *Store) {
	t.Helper()
	dir = made(t)
	s = open(t, dir)
	a := committed(t, s, "one", 1)
	b := committed(t, s, "one", 2)
	if err := os.Link(filepath.Join(a, "r00000.safetensors"), filepath.Join(b, "step-1-0123456789abcdef.link")); err != nil {
		t.Fatal(err)
	}
	committed(t, s, "two/with ünicode", 1)
	committed(t, s, "gone", 1)
	committed(t, s, "gone", 2)
	if _, _, err := s.Tag(t.Context(), "one@step-1", "first"); err != nil {
		t.Fatal(err)
	}
	policy, err := retention.Parse("last=1")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Collect(t.Context(), collection.Options{Runs: []string{"gone"}, Policy: policy, Apply: true}); err != nil {
		t.Fatal(err)
	}
	written(t, s, "one", 3) // never committed
	if _, err := s.Blobs.Put(t.Context(), []byte(strings.Repeat("blob", events.MaxInline))); err != nil {
		t.Fatal(err)
	}
	for i := range 40 {
		f, err := metrics(fmt.Sprint("m", i), "one", i+1)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Log.Append(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	c, err := s.Log.Cursor(t.Context(), "alerts")
	if err == nil {
		err = c.Move(t.Context(), 7)
	}
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "logs", "one", "job", "r0.log"), "worker output")
	shut(t, s)
	cut(t, dir)
	s = open(t, dir)
	for i := range 20 {
		say(t, s, "one", events.Metrics{Attempt: 1, Iteration: 50 + i, Step: int64(i), Metrics: map[string]any{"loss": 0.1}})
	}
	if err := os.Remove(filepath.Join(committed(t, s, "late", 1), checkpoint.ReceiptFile)); err != nil {
		t.Fatal(err)
	}
	return dir, s
}

// TestBackup: a backup contains the whole store and is read-only; a restored one continues.
func TestBackup(t *testing.T) {
	t.Parallel()
	for _, link := range []bool{false, true} {
		t.Run(fmt.Sprint("link ", link), func(t *testing.T) {
			t.Parallel()
			dir, s := furnished(t)
			want, events0, digest0 := listedCommitted(t, s), wholeLog(t, s.Log), digest(t, s)
			to := filepath.Join(t.TempDir(), "a", "backup")
			told := int64(0)
			out := backedUpTo(t, s, to, BackupOptions{Link: link, Progress: func(done, total int64) {
				if done < told || total < done {
					t.Errorf("progress %d of %d after %d", done, total, told)
				}
				told = done
			}})
			if out.Checkpoints != len(want) || out.Checkpoints != 5 || len(out.Incomplete) > 0 || out.Sequence != uint64(len(events0)) || told == 0 {
				t.Errorf("%+v; want %d checkpoints; told of %d bytes", out, len(want), told)
			}
			// Files with two names are one file.
			if link {
				sameFiles(t, filepath.Join(dir, "data/one/main/step-1.a1/r00000.safetensors"), filepath.Join(to, "data/one/main/step-1.a1/r00000.safetensors"))
			}
			sameFiles(t, filepath.Join(to, "data/one/main/step-1.a1/r00000.safetensors"), filepath.Join(to, "data/one/main/step-2.a1/step-1-0123456789abcdef.link"))
			for _, own := range []string{"log", "blobs"} {
				oneName(t, filepath.Join(to, own))
			}

			// The store continues; the backup stays as it was.
			committed(t, s, "one", 9)
			rest := restored(t, to)
			for _, copy := range []string{to, rest} {
				got := open(t, copy)
				sameEvents(t, wholeLog(t, got.Log), events0)
				if d := digest(t, got); d != digest0 {
					t.Errorf("%s: views have the digest %s, want %s", copy, d, digest0)
				}
				c, err := got.Log.Cursor(t.Context(), "alerts")
				if err != nil || c.Sequence() != 7 {
					t.Errorf("%s: cursor at %d, %v", copy, c.Sequence(), err)
				}
				if read(t, filepath.Join(copy, "logs/one/job/r0.log")) != "worker output" {
					t.Errorf("%s: the workers' output differs", copy)
				}
				shut(t, got)
				if all := wholeCopy(t, copy); !maps.EqualFunc(all, want, func(a, b projections.Checkpoint) bool { return a.Manifest == b.Manifest }) {
					t.Errorf("%s lists %v, want %v", copy, all, want)
				}
			}
			readOnlyBackup(t, to)
			again := open(t, rest)
			committed(t, again, "one", 3000)
			if _, _, err := again.Tag(t.Context(), "one@step-2", "restored"); err != nil {
				t.Error(err)
			}
			// Both are open on one machine, under one identity.
			if again.ID != s.ID || again.Runtime == s.Runtime {
				t.Errorf("identity %s in %s, and %s in %s", again.ID, again.Runtime, s.ID, s.Runtime)
			}
			committed(t, s, "one", 3001)
		})
	}
}

// readOnlyBackup checks that operations that write to a backup are refused.
func readOnlyBackup(t *testing.T, dir string) {
	t.Helper()
	s := open(t, dir)
	_, _, err := s.Tag(t.Context(), "one@step-2", "no")
	wrong(t, err, ErrBackup, "ckptstore restore "+dir)
	f, ferr := metrics("no", "one", 1)
	if ferr != nil {
		t.Fatal(ferr)
	}
	_, err = s.Log.Append(t.Context(), f)
	wrong(t, err, ErrBackup)
	_, _, err = s.HoldRun(t.Context(), "one", NewID())
	wrong(t, err, ErrBackup)
	_, err = s.Backup(t.Context(), dir+"2", BackupOptions{})
	wrong(t, err, ErrBackup)
	shut(t, s)
}

func sameFiles(t *testing.T, a, b string) {
	t.Helper()
	x, err1 := os.Stat(a)
	y, err2 := os.Stat(b)
	if err := errors.Join(err1, err2); err != nil || !os.SameFile(x, y) {
		t.Errorf("%s and %s are two files: %v", a, b, err)
	}
}

// TestBackupRefused: directories that are refused for a backup or a restore.
func TestBackupRefused(t *testing.T) {
	t.Parallel()
	dir, s := furnished(t)
	for name, c := range map[string]struct {
		to   string
		is   error
		part string
	}{
		"inside":     {filepath.Join(dir, "backup"), ErrLocation, "overlap"},
		"itself":     {dir, ErrLocation, "overlap"},
		"above":      {filepath.Dir(dir), ErrLocation, "overlap"},
		"not empty":  {t.TempDir(), ErrNotEmpty, "a.txt"},
		"a store":    {made(t), ErrExists, "has a store"},
		"not a file": {filepath.Join(t.TempDir(), "file"), ErrNotEmpty, "is a file"},
	} {
		switch name {
		case "not empty":
			write(t, filepath.Join(c.to, "a.txt"), "mine")
		case "not a file":
			write(t, c.to, "mine")
		}
		_, err := s.Backup(t.Context(), c.to, BackupOptions{})
		t.Run(name, func(t *testing.T) { wrong(t, err, c.is, c.part) })
	}
	to := filepath.Join(t.TempDir(), "backup")
	backedUpTo(t, s, to, BackupOptions{})
	_, err := s.Backup(t.Context(), to, BackupOptions{})
	wrong(t, err, ErrExists, "choose another directory")
	for name, c := range map[string]struct {
		from, to string
		is       error
		part     string
	}{
		"a store":     {dir, filepath.Join(t.TempDir(), "x"), ErrLocation, "ckptstore backup DIR"},
		"nothing":     {t.TempDir(), filepath.Join(t.TempDir(), "x"), ErrNoStore, "no backup"},
		"inside":      {to, filepath.Join(to, "x"), ErrLocation, "overlap"},
		"not empty":   {to, dir, ErrExists, "has a store"},
		"from a URL":  {"nats://127.0.0.1:1", filepath.Join(t.TempDir(), "x"), ErrLocation, "is a server"},
		"into itself": {to, to, ErrLocation, "overlap"},
	} {
		_, err := Restore(t.Context(), RestoreOptions{Backup: c.from, Location: c.to})
		t.Run("restore "+name, func(t *testing.T) { wrong(t, err, c.is, c.part) })
	}
	held := open(t, to)
	_, err = Restore(t.Context(), RestoreOptions{Backup: to, Location: filepath.Join(t.TempDir(), "x")})
	wrong(t, err, ErrLocked, "end it first")
	shut(t, held)
	// Restore detects a backup that has lost a file.
	for _, name := range []string{"data/one/main/step-2.a1/r00000.safetensors", "data/one/main/step-2.a1", "end.json", "blobs"} {
		broken := filepath.Join(t.TempDir(), "broken")
		if err := errors.Join(os.CopyFS(broken, os.DirFS(to)), os.RemoveAll(filepath.Join(broken, name))); err != nil {
			t.Fatal(err)
		}
		out, err := Restore(t.Context(), RestoreOptions{Backup: broken, Location: filepath.Join(t.TempDir(), "x")})
		if err == nil && len(out.Incomplete) == 0 && name != "blobs" {
			t.Errorf("without %s it is restored as complete", name)
		}
	}
	flipped := filepath.Join(t.TempDir(), "flipped")
	if err := os.CopyFS(flipped, os.DirFS(to)); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(flipped, "data/one/main/step-2.a1/r00000.safetensors")
	text := []byte(read(t, file))
	text[len(text)-1] ^= 1
	write(t, file, string(text))
	out, err := Restore(t.Context(), RestoreOptions{Backup: flipped, Location: filepath.Join(t.TempDir(), "x"), Deep: true})
	if err != nil || len(out.Incomplete) != 1 || out.Incomplete[0].Checkpoint != "one@step-2.a1" {
		t.Errorf("a flipped bit: %+v, %v", out.Incomplete, err)
	}
}

// TestBackupOfDamage: checkpoints that are incomplete in the store are reported, and
// everything else is backed up.
func TestBackupOfDamage(t *testing.T) {
	t.Parallel()
	dir, s := furnished(t)
	if err := errors.Join(os.RemoveAll(filepath.Join(dir, "data/two%2Fwith%20%C3%BCnicode/main/step-1.a1")), os.Remove(filepath.Join(dir, "data/one/main/step-1.a1/r00000.idx"))); err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(t.TempDir(), "backup")
	out := backedUpTo(t, s, to, BackupOptions{})
	if len(out.Incomplete) != 2 || out.Incomplete[0].Checkpoint != "one@step-1.a1" || out.Incomplete[1].Checkpoint != "two/with ünicode@step-1.a1" {
		t.Errorf("%+v", out.Incomplete)
	}
	if got, err := Restore(t.Context(), RestoreOptions{Backup: to, Location: filepath.Join(t.TempDir(), "x")}); err != nil || len(got.Incomplete) != 1 {
		t.Errorf("%+v, %v", got, err)
	}
}

var errStopped = errors.New("cut here")

// TestBackupCut interrupts a backup before each of its steps. No command takes the result for
// a store, and the same call finishes it, even if the store has continued and checkpoints
// were deleted.
func TestBackupCut(t *testing.T) {
	t.Parallel()
	for n, more := 1, true; more; n++ {
		_, s := furnished(t)
		to := filepath.Join(t.TempDir(), "backup")
		left := n
		_, err := s.Backup(t.Context(), to, BackupOptions{step: func(string) error {
			if left--; left == 0 {
				return errStopped
			}
			return nil
		}})
		if more = errors.Is(err, errStopped); err != nil && !more {
			t.Fatal(err)
		}
		if more {
			refused(t, Options{Location: to}, ErrNoStore, "run the same `ckptstore backup` again")
			_, err := OpenData(to)
			wrong(t, err, ErrNoStore, "run the same")
			_, err = Restore(t.Context(), RestoreOptions{Backup: to, Location: filepath.Join(t.TempDir(), "x")})
			wrong(t, err, ErrNoStore, "run the same")
			_, err = Recover(t.Context(), RecoverOptions{Location: to})
			wrong(t, err, ErrBackup, "--from")
			// A backup of another store does not finish it.
			_, err = open(t, made(t)).Backup(t.Context(), to, BackupOptions{})
			wrong(t, err, ErrExists, "unfinished")
			policy, err := retention.Parse("last=1")
			if err != nil {
				t.Fatal(err)
			}
			committed(t, s, "one", 7)
			if _, err := s.Collect(t.Context(), collection.Options{Runs: []string{"one"}, Policy: policy, Apply: true}); err != nil {
				t.Fatal(err)
			}
			out := backedUpTo(t, s, to, BackupOptions{})
			if n > 4 && out.Kept == 0 {
				t.Errorf("cut at step %d: nothing was kept: %+v", n, out)
			}
			if all := listedCommitted(t, s); out.Checkpoints != len(all) {
				t.Errorf("cut at step %d: %d directories of %d checkpoints", n, out.Checkpoints, len(all))
			}
		}
		want := listedCommitted(t, s)
		if got := wholeCopy(t, to); !maps.EqualFunc(got, want, func(a, b projections.Checkpoint) bool { return a.Manifest == b.Manifest }) {
			t.Errorf("cut at step %d: it lists %v, want %v", n, got, want)
		}
	}
}

// TestRestoreCut does the same with a restore.
func TestRestoreCut(t *testing.T) {
	t.Parallel()
	_, s := furnished(t)
	backup := filepath.Join(t.TempDir(), "backup")
	backedUpTo(t, s, backup, BackupOptions{})
	want := listedCommitted(t, s)
	for n, more := 1, true; more; n++ {
		to := filepath.Join(t.TempDir(), "store")
		left := n
		_, err := Restore(t.Context(), RestoreOptions{Backup: backup, Location: to, step: func(string) error {
			if left--; left == 0 {
				return errStopped
			}
			return nil
		}})
		if more = errors.Is(err, errStopped); err != nil && !more {
			t.Fatal(err)
		}
		if more {
			refused(t, Options{Location: to}, ErrNoStore, "run the same `ckptstore restore` again")
			if _, err := Restore(t.Context(), RestoreOptions{Backup: backup, Location: to}); err != nil {
				t.Fatal(err)
			}
		}
		if got := wholeCopy(t, to); !maps.EqualFunc(got, want, func(a, b projections.Checkpoint) bool { return a.Manifest == b.Manifest }) {
			t.Errorf("cut at step %d: it lists %v, want %v", n, got, want)
		}
		again := open(t, to)
		committed(t, again, "one", 3000)
	}
}

// TestBackupKilled kills a backup at each of its steps; the next one finishes.
func TestBackupKilled(t *testing.T) {
	t.Parallel()
	for n := 1; ; n++ {
		dir, s := furnished(t)
		want := listedCommitted(t, s)
		shut(t, s)
		to := filepath.Join(t.TempDir(), "backup")
		p := start(t, "backup", "CKPTSTORE_TEST_DIR="+dir, "CKPTSTORE_TEST_TO="+to, fmt.Sprint(dieEnv, "=", n))
		<-p.read
		killed := p.cmd.Wait() != nil
		if killed {
			if st, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || st.Signal() != syscall.SIGKILL {
				t.Fatalf("step %d: %v", n, p.cmd.ProcessState)
			}
			refused(t, Options{Location: to}, ErrNoStore, "run the same `ckptstore backup` again")
			again := open(t, dir)
			backedUpTo(t, again, to, BackupOptions{})
			shut(t, again)
		}
		if got := wholeCopy(t, to); !maps.EqualFunc(got, want, func(a, b projections.Checkpoint) bool { return a.Manifest == b.Manifest }) {
			t.Errorf("killed at step %d: it lists %v, want %v", n, got, want)
		}
		if !killed {
			return
		}
	}
}

// backupAndDie makes a backup and kills itself at a step.
func backupAndDie(ctx context.Context) error {
	n := 0
	if _, err := fmt.Sscan(os.Getenv(dieEnv), &n); err != nil {
		return err
	}
	s, err := Open(ctx, Options{Location: os.Getenv("CKPTSTORE_TEST_DIR")})
	if err != nil {
		return err
	}
	_, err = s.Backup(ctx, os.Getenv("CKPTSTORE_TEST_TO"), BackupOptions{step: func(string) error {
		if n--; n == 0 {
			return syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
		return nil
	}})
	return errors.Join(err, s.Close())
}

// oneName checks that no file below a directory shares its bytes with another.
func oneName(t *testing.T, dir string) {
	t.Helper()
	files := 0
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		if files++; info.Sys().(*syscall.Stat_t).Nlink != 1 {
			t.Errorf("%s is linked to another file", path)
		}
		return nil
	})
	if err != nil || files == 0 {
		t.Errorf("%d files in %s: %v", files, dir, err)
	}
}
