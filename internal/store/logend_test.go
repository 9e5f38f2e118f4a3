package store

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/ckptstore/ckptstore/events"
)

// TestEndIsNoted: an owner records the log's end soon after it moved, and when it ends, including
// events that other processes appended through it.
func TestEndIsNoted(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	end := func() logEnd {
		e, err := readEnd(dir)
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	say(t, s, "run", events.WriteFailed{Attempt: 1, Checkpoint: "x", Error: "test"})
	eventually(t, "the end of a log that is owned", func() bool { return end().Sequence == 2 })
	beside := actors(t, dir, 1)[0]
	beside.do(request{Do: "append", Run: "run", Name: "e", Count: 3})
	last, err := s.Log.Last(t.Context())
	if err != nil || last < 5 {
		t.Fatal(last, err)
	}
	shut(t, s)
	event := end()
	if event.Sequence < last || event.Store != s.ID {
		t.Errorf("noted %+v, the log ended at %d", event, last)
	}
	beside.end()
}

// TestOtherEnd: the recorded end is another event, belongs to another store, or cannot be read.
func TestOtherEnd(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	say(t, s, "run", events.WriteFailed{Attempt: 1, Checkpoint: "x", Error: "test"})
	shut(t, s)
	path := filepath.Join(dir, endName)
	text := read(t, path)
	for _, c := range []struct {
		text string
		is   error
		says string
	}{
		{`{"store":"` + s.ID + `","sequence":2,"event":"other"}`, ErrDamaged, "rolled back: event 2 is "},
		{`{"store":"` + s.ID + `","sequence":3,"event":"other"}`, ErrDamaged, "rolled back: it ends at event 2"},
		{`{"store":"other","sequence":2,"event":"other"}`, ErrForeign, "store other"},
		{text[:len(text)/2], ErrDamaged, "the recorded end of the log cannot be read"},
	} {
		write(t, path, c.text)
		refused(t, Options{Location: dir}, c.is, c.says, "delete", endName)
	}
	remove(t, dir, endName)
	shut(t, open(t, dir))
	if _, err := os.Stat(path); err != nil {
		t.Errorf("it is not noted again: %v", err)
	}
}

// TestKnownDamage: a store with a damaged log has no owner until a reading of the log has no
// findings.
func TestKnownDamage(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	blob, err := s.Blobs.Put(t.Context(), make([]byte, events.MaxInline+1))
	if err != nil {
		t.Fatal(err)
	}
	say(t, s, "run", events.GlobalPlan{Attempt: 1, Checkpoint: "x", Layout: blob})
	path := filepath.Join(dir, "blobs", blob.Digest[:2], blob.Digest)
	// A missing blob is a finding, but closes no store: any client can name one.
	away(t, path, func() {
		if out, err := s.VerifyLog(t.Context(), nil); err != nil || len(out.Findings) != 1 || !out.Findings[0].Aside {
			t.Errorf("%+v, %v", out, err)
		}
		shut(t, s)
		s = open(t, dir)
	})
	if err := noteReadLog(dir, ReadLog{Last: 2, Findings: []LogFinding{{Sequence: 2, Until: 2, Problem: "it cannot be read"}}}); err != nil {
		t.Fatal(err)
	}
	// A client of the owner continues: it may be the process that ends the others.
	shut(t, open(t, dir))
	if _, _, err := VerifyKnownDamage(t.Context(), Options{Location: dir}, nil); err == nil {
		t.Error("a log is read although it has an owner")
	}
	shut(t, s)
	refused(t, Options{Location: dir}, ErrKnownDamage, "event 2", "restore", "recover", "verify --log", "ls --offline")
	refused(t, Options{Location: dir}, ErrDamaged)
	_, err = RebuildViews(t.Context(), Options{Location: dir})
	wrong(t, err, ErrKnownDamage)
	refused(t, Options{Location: dir}, ErrKnownDamage)
	id, out, err := VerifyKnownDamage(t.Context(), Options{Location: dir}, nil)
	if err != nil || id != s.ID || len(out.Findings) != 0 || out.Last != 2 {
		t.Errorf("%s, %+v, %v", id, out, err)
	}
	shut(t, open(t, dir))
}

// TestFilesUnderServer: a reading reports log files that were deleted or truncated under a running
// server.
func TestFilesUnderServer(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(t *testing.T, dir string){
		"the log deleted": func(t *testing.T, dir string) { remove(t, dir, "log") },
		"a block deleted": func(t *testing.T, dir string) { remove(t, "", blocksOf(t, dir)[0]) },
		"a block replaced": func(t *testing.T, dir string) {
			path := blocksOf(t, dir)[0]
			text := read(t, path)
			remove(t, "", path)
			write(t, path, text)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := made(t)
			s := open(t, dir)
			say(t, s, "run", events.WriteFailed{Attempt: 1, Checkpoint: "x", Error: "test"})
			if out, err := s.VerifyLog(t.Context(), nil); err != nil || len(out.Findings) != 0 {
				t.Errorf("%+v, %v", out, err)
			}
			spoil(t, dir)
			out, err := s.VerifyLog(t.Context(), nil)
			if err != nil || len(out.Findings) == 0 {
				t.Errorf("%+v, %v", out, err)
			}
			_ = s.Close()
		})
	}
}
