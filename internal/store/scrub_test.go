package store

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// spoken collects the output of a logger.
type spoken struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *spoken) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *spoken) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// TestScrub reads the log in the background, records the time, and reports damage: here a blob, and
// then an event.
func TestScrub(t *testing.T) {
	t.Parallel()
	dir := made(t)
	var said spoken
	s, err := Open(t.Context(), Options{Location: dir, Logger: slog.New(slog.NewTextHandler(&said, nil))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shut(t, s) })
	blob, err := s.Blobs.Put(t.Context(), make([]byte, events.MaxInline+1))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		say(t, s, "run", events.GlobalPlan{Attempt: 1, Checkpoint: "x", Layout: blob})
	}
	status := func() FullRead {
		r, _, err := s.LastFullRead()
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	b := startScrubber(s, time.Millisecond, time.Millisecond)
	eventually(t, "a first reading", func() bool { return status().Sequence == 3 })
	path := filepath.Join(s.Location, "blobs", blob.Digest[:2], blob.Digest)
	if err := os.Rename(path, path+".away"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a finding", func() bool { return status().Damage != nil })
	first := status()
	if f := first.Damage.Findings; len(f) != 1 || f[0].Sequence != 2 || f[0].Until != 3 || !strings.Contains(f[0].Problem, blob.Digest) || first.Sequence != 3 {
		t.Errorf("found %+v", first)
	}
	eventually(t, "an error", func() bool {
		return strings.Contains(said.String(), "level=ERROR") && strings.Contains(said.String(), "the log is damaged") && strings.Contains(said.String(), "events 2 to 3")
	})
	if err := os.Rename(path+".away", path); err != nil {
		t.Fatal(err)
	}
	eventually(t, "no finding any more", func() bool { return status().Damage == nil })
	b.stop()
	if status().At.Before(first.At) {
		t.Errorf("read on %s, then on %s", first.At, status().At)
	}
}

// TestScrubGivesWay: a reading takes as long as its rate demands, and ends when it is stopped.
func TestScrubGivesWay(t *testing.T) {
	t.Parallel()
	s := open(t, made(t))
	for i := range 40 {
		say(t, s, "run", events.WriteFailed{Attempt: 1, Checkpoint: "x", Rank: i, Error: strings.Repeat("x", 100<<10)})
	}
	p := stepped{pacer: pacer{rate: 8 << 20}}
	begin := time.Now()
	out, err := s.readLog(t.Context(), p.pace, p.pace)
	if took := time.Since(begin); err != nil || len(out.Findings) > 0 || took < 400*time.Millisecond {
		t.Errorf("read %+v within %s, %v", out, took, err)
	}
	b := startScrubber(s, time.Millisecond, time.Hour)
	begin = time.Now()
	b.stop()
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("it took %s to stop", took)
	}
}
