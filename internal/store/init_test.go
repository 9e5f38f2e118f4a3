package store

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/google/uuid"
)

func TestInit(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "a", "b")
	id, err := Init(t.Context(), dir, "")
	if err != nil {
		t.Fatal(err)
	}
	if err := uuid.Validate(id); err != nil {
		t.Error(err)
	}
	before := snapshot(t, dir)
	if _, err := Init(t.Context(), dir, ""); err != nil {
		wrong(t, err, ErrExists, dir)
	} else {
		t.Error("it was made twice")
	}
	if !maps.Equal(before, snapshot(t, dir)) {
		t.Error("the second init changed the store")
	}
	s := open(t, dir)
	if s.ID != id || s.Location != dir || !s.Owns() {
		t.Errorf("opened %s at %s, owned: %v", s.ID, s.Location, s.Owns())
	}
	if last, err := s.Log.Last(t.Context()); err != nil || last != 1 {
		t.Errorf("its log has %d events, %v", last, err)
	}
	// The result is the same while a process has it open.
	_, err = Init(t.Context(), dir, "")
	wrong(t, err, ErrExists)

	file := filepath.Join(t.TempDir(), "file")
	write(t, file, "text")
	if _, err := Init(t.Context(), file, ""); err == nil {
		t.Error("a store was made in a file")
	}
}

// TestInitRefuses: existing files may belong to a user, and stay as they are.
func TestInitRefuses(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		spoil  func(t *testing.T, dir string) // dir is a store with a log of some events
		is     error
		says   string
		mislay bool // store.json
	}{
		{name: "a lost store.json", mislay: true, is: ErrDamaged, says: "store.json"},
		{name: "a lost store.json and no views", mislay: true, is: ErrDamaged, says: "log", spoil: func(t *testing.T, dir string) {
			remove(t, dir, "views", "data", "blobs")
		}},
		{name: "a log whose server sees none", mislay: true, is: ErrDamaged, says: "log", spoil: func(t *testing.T, dir string) {
			remove(t, dir, "views", "data", "blobs", "log/jetstream/ckpt/streams/CKPT/meta.inf")
		}},
		{name: "checkpoints", mislay: true, is: ErrDamaged, says: "data", spoil: func(t *testing.T, dir string) {
			remove(t, dir, "views", "log")
			write(t, filepath.Join(dir, "data", "run", "main", "step-1.a1", "COMMIT.json"), "{}")
		}},
		{name: "blobs", mislay: true, is: ErrDamaged, says: "blobs", spoil: func(t *testing.T, dir string) {
			remove(t, dir, "views", "log")
			write(t, filepath.Join(dir, "blobs", "ab", "abcd"), "blob")
		}},
		{name: "views of a log of one event", mislay: true, is: ErrDamaged, says: "views", spoil: func(t *testing.T, dir string) {
			remove(t, dir, "log")
			if err := os.Mkdir(filepath.Join(dir, "log"), 0o700); err != nil {
				t.Fatal(err)
			}
		}},
		{name: "a damaged store.json", is: ErrExists, says: "not valid JSON", spoil: func(t *testing.T, dir string) {
			write(t, filepath.Join(dir, "store.json"), "{")
		}},
		{name: "foreign files", mislay: true, says: "thesis.tex", spoil: func(t *testing.T, dir string) {
			remove(t, dir, "views", "log", "data", "blobs", "LOCK")
			write(t, filepath.Join(dir, "thesis.tex"), "text")
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			dir := made(t)
			s := open(t, dir)
			must(t, s, "run", begun("step-1"), begun("step-2"))
			shut(t, s)
			if c.mislay {
				remove(t, dir, "store.json")
			}
			if c.spoil != nil {
				c.spoil(t, dir)
			}
			before := snapshot(t, dir)
			id, err := Init(t.Context(), dir, "")
			if err == nil {
				t.Fatalf("%s was made", id)
			}
			wrong(t, err, c.is, dir, c.says)
			for path, text := range snapshot(t, dir) {
				old, was := before[path]
				if !was && filepath.Base(path) != lockName || was && old != text {
					t.Errorf("%s changed", path)
				}
				delete(before, path)
			}
			if len(before) > 0 {
				t.Errorf("it removed %d files", len(before))
			}
			if _, found := snapshot(t, dir)[filepath.Join(dir, lockName)]; found && c.name == "foreign files" {
				t.Error("it left a file in a foreign directory")
			}
		})
	}
}

func remove(t *testing.T, dir string, names ...string) {
	t.Helper()
	for _, name := range names {
		if err := os.RemoveAll(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
}

// TestInitAgain starts from the leftovers of an init interrupted at each of its steps.
func TestInitAgain(t *testing.T) {
	t.Parallel()
	ready := made(t) // the finished store
	const stream = "log/jetstream/ckpt/streams/CKPT"
	block := read(t, filepath.Join(ready, stream, "msgs/1.blk"))
	type step struct {
		name string
		do   func(t *testing.T, dir string)
	}
	copied := func(names ...string) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			for _, name := range names {
				write(t, filepath.Join(dir, name), read(t, filepath.Join(ready, name)))
			}
		}
	}
	made := func(name string) func(t *testing.T, dir string) {
		return func(t *testing.T, dir string) {
			if err := os.MkdirAll(filepath.Join(dir, name), 0o700); err != nil {
				t.Fatal(err)
			}
		}
	}
	steps := []step{
		{"nothing", func(*testing.T, string) {}},
		{"the directory", made(".")},
		{"the lock", copied(lockName)},
		{"the log's directory", made("log")},
		{"a server without a stream", func(t *testing.T, dir string) {
			server, err := jetlog.StartServer(t.Context(), jetlog.ServerOptions{Dir: filepath.Join(dir, "log")})
			if err != nil {
				t.Fatal(err)
			}
			server.Shutdown()
		}},
		{"the stream's directory", made(stream + "/msgs")},
		{"the stream without its sum", copied(stream + "/meta.inf")},
		{"the stream", copied(stream + "/meta.sum")},
		{"an empty block", func(t *testing.T, dir string) { write(t, filepath.Join(dir, stream, "msgs/1.blk"), "") }},
		{"half an event", func(t *testing.T, dir string) {
			write(t, filepath.Join(dir, stream, "msgs/1.blk"), block[:len(block)/2])
		}},
		{"the event", copied(stream + "/msgs/1.blk")},
		{"the log", copied(stream + "/msgs/index.db")},
		{"data", made("data")},
		{"blobs", made("blobs")},
		{"half of store.json", func(t *testing.T, dir string) { write(t, filepath.Join(dir, durable.TempPrefix+"123"), "{") }},
	}
	for i, last := range steps {
		t.Run(last.name, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "store")
			for _, s := range steps[:i+1] {
				s.do(t, dir)
			}
			id, err := Init(t.Context(), dir, "")
			if err != nil {
				t.Fatal(err)
			}
			s := open(t, dir)
			must(t, s, "run", begun("step-1"))
			if s.ID != id {
				t.Errorf("made %s, opened %s", id, s.ID)
			}
		})
	}
}

// TestInitKilled kills real processes, later each time.
func TestInitKilled(t *testing.T) {
	t.Parallel()
	exists := 0
	for i := range 8 {
		dir := filepath.Join(t.TempDir(), fmt.Sprint(i))
		p := start(t, "actor")
		p.try(request{Do: "warm up"})
		p.tell(request{Do: "init", Location: dir})
		select {
		case <-p.replies: // it finished first
		case <-time.After(time.Duration(i) * 8 * time.Millisecond):
		}
		p.kill()
		_, err := Init(t.Context(), dir, "")
		if err != nil && !errors.Is(err, ErrExists) {
			t.Fatalf("killed after %d ms: %v", 8*i, err)
		}
		if err != nil {
			exists++
		}
		s := open(t, dir)
		must(t, s, "run", begun("step-1"))
		shut(t, s)
	}
	if exists == 8 {
		t.Error("every init was done before it was killed")
	}
}

// TestVacantDuringInit asks while stores are made and opened: a new store is never taken for
// foreign files or for a damaged store.
func TestVacantDuringInit(t *testing.T) {
	t.Parallel()
	for i := range 10 {
		dir := filepath.Join(t.TempDir(), fmt.Sprint(i))
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		made := make(chan error, 1)
		go func() {
			_, err := Init(t.Context(), dir, "")
			made <- err
		}()
		for done := false; !done; {
			select {
			case err := <-made:
				if err != nil {
					t.Fatal(err)
				}
				done = true
			default:
			}
			if err := vacant(dir); err != nil && !errors.Is(err, ErrExists) {
				t.Fatal(err)
			}
		}
	}
}

// TestCutLogLimit checks the limit against real logs: with one event each file is below it, and
// the smallest second event is above it.
func TestCutLogLimit(t *testing.T) {
	t.Parallel()
	dir := made(t)
	log := filepath.Join(dir, "log")
	if size, err := largestFile(log); err != nil || size > maxCutLog {
		t.Errorf("a log with one event has a file of %d bytes, %v", size, err)
	}
	s := open(t, dir)
	must(t, s, "r", events.TrialCreated{})
	shut(t, s)
	size, err := largestFile(filepath.Join(log, "jetstream/ckpt/streams/CKPT/msgs"))
	if err != nil || size <= maxCutLog {
		t.Errorf("a log with two events has %d bytes, %v", size, err)
	}
	remove(t, dir, "views", "data", "blobs", "store.json")
	_, err = Init(t.Context(), dir, "")
	wrong(t, err, ErrDamaged, dir)
}
