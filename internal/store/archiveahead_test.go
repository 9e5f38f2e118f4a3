package store

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/ckptstore/ckptstore/internal/archive"
)

// sealedAhead makes a store whose stream is sealed in part, but not cut.
func sealedAhead(t *testing.T, events int) (dir string) {
	t.Helper()
	dir = made(t)
	s := open(t, dir)
	more(t, s, events)
	s.opts.cutting = &often
	own := s.owner.ownership()
	c := often
	c.events = 1 << 30
	if _, err := own.sealSome(t.Context(), s, c); err != nil {
		t.Fatal(err)
	}
	shut(t, s)
	return dir
}

func more(t *testing.T, s *Store, n int) {
	t.Helper()
	for i := range n {
		f, err := metrics(NewID(), "run", i+1)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Log.Append(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
}

func segmentsOf(t *testing.T, dir, pattern string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(archiveDir(dir), pattern))
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// TestSealedOfAnotherHistory: the log is restored from an older copy and continues
// differently. The segments of the other history are set aside, and none of their events
// gets into the log.
func TestSealedOfAnotherHistory(t *testing.T) {
	t.Parallel()
	for name, then := range map[string]int{"a shorter log": 5, "a longer log": 90} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := sealedAhead(t, 20)
			old := filepath.Join(t.TempDir(), "jetstream")
			if err := os.CopyFS(old, os.DirFS(filepath.Join(dir, "log", "jetstream"))); err != nil {
				t.Fatal(err)
			}
			s := open(t, dir)
			more(t, s, 50)
			c := often
			c.events = 1 << 30
			if _, err := s.owner.ownership().sealSome(t.Context(), s, c); err != nil {
				t.Fatal(err)
			}
			shut(t, s)
			for _, path := range []string{"log/jetstream", "end.json", "read.json", "views"} {
				if err := os.RemoveAll(filepath.Join(dir, path)); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.Rename(old, filepath.Join(dir, "log", "jetstream")); err != nil {
				t.Fatal(err)
			}
			s = open(t, dir)
			more(t, s, then)
			want, rows := wholeLog(t, s.Log), digest(t, s)
			shut(t, s)
			cut(t, dir)
			s = open(t, dir)
			sameEvents(t, wholeLog(t, s.Log), want)
			if got := digest(t, s); got != rows {
				t.Error("the rows differ")
			}
			if len(segmentsOf(t, dir, "*.aside-1")) == 0 {
				t.Error("nothing was set aside")
			}
		})
	}
}

// TestDamagedAhead: a segment that was sealed ahead is damaged before the cut. The stream
// still has its events, and they are sealed again.
func TestDamagedAhead(t *testing.T) {
	t.Parallel()
	dir := sealedAhead(t, 60)
	s := open(t, dir)
	want := wholeLog(t, s.Log)
	shut(t, s)
	segment := segmentsOf(t, dir, "*.seg")[1]
	text := []byte(read(t, segment))
	text[len(text)/2] ^= 1
	write(t, segment, string(text))
	cut(t, dir)
	s = open(t, dir)
	sameEvents(t, wholeLog(t, s.Log), want)
	out, err := s.VerifyLog(t.Context(), nil)
	if err != nil || len(out.Findings) > 0 {
		t.Errorf("%+v, %v", out, err)
	}
	if sealed := sealedOf(t, s.Log); sealed < uint64(len(want)) {
		t.Errorf("%d of %d events are sealed", sealed, len(want))
	}
}

// TestLargeEventsAreSealedAhead: with large events a segment is full by its bytes.
func TestLargeEventsAreSealedAhead(t *testing.T) {
	t.Parallel()
	s := open(t, made(t))
	more(t, s, 60)
	c := cutting{events: 1 << 30, bytes: 1 << 40, limits: archive.Limits{Messages: 1 << 20, Bytes: 4 << 10}}
	if _, err := s.owner.ownership().sealSome(t.Context(), s, c); err != nil {
		t.Fatal(err)
	}
	if n := len(segmentsOf(t, s.Location, "*.seg")); n < 2 {
		t.Errorf("%d segments", n)
	}
}
