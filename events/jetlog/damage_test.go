package jetlog

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// A stream that the server abandoned is reported at once, and a cancelled start ends.
func TestServerDoesNotRecover(t *testing.T) {
	dir := t.TempDir()
	s := startServer(t, dir)
	l := connectTo(t, Options{Dial: dial(s)})
	if err := l.Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatal(err)
	}
	l.Close()
	s.Shutdown()
	metas, err := filepath.Glob(filepath.Join(dir, "jetstream", "*", "streams", Stream, "meta.inf"))
	if err != nil || len(metas) != 1 {
		t.Fatal(metas, err)
	}
	if err := os.WriteFile(metas[0], []byte("garbage"), 0o600); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	s, err = StartServer(context.WithoutCancel(t.Context()), ServerOptions{Dir: dir})
	if err == nil {
		s.Shutdown()
	}
	if !errors.Is(err, ErrUnrecovered) || time.Since(begin) > 10*time.Second {
		t.Errorf("%v after %s", err, time.Since(begin))
	}
}

func TestAt(t *testing.T) {
	l, _ := newLog(t)
	facts := factsOf(t, 5)
	seqs, err := l.Append(t.Context(), facts...)
	if err != nil {
		t.Fatal(err)
	}
	for i, f := range facts {
		if got, err := l.At(t.Context(), seqs[i]); err != nil || got.ID != f.ID || got.Sequence != seqs[i] {
			t.Errorf("at %d: %s, %v", seqs[i], got.ID, err)
		}
	}
	if _, err := l.At(t.Context(), seqs[4]+1); !errors.Is(err, ErrEnd) {
		t.Errorf("past the end: %v", err)
	}
}
