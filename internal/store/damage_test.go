package store

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/events"
)

// spacious makes a store whose log has a first, a middle and a short last block: more blocks
// make the tests slower and find nothing else. It has a checkpoint at its beginning and one at
// its end.
func spacious(t *testing.T) (dir string, last uint64) {
	t.Helper()
	dir = made(t)
	s := open(t, dir)
	must(t, s, "run", events.TrialCreated{}, events.GroupStarted{Attempt: 1, Job: "j", WorldSize: 1})
	committed(t, s, "run", 1)
	random := rand.NewChaCha8([32]byte{1})
	text := make([]byte, 300<<10)
	for i := range 30 {
		if _, err := random.Read(text); err != nil {
			t.Fatal(err)
		}
		f, err := events.NewFact(Stamp("test"), events.Scope{Run: "run", Trial: trialName, Actor: events.Rank(0)},
			events.Metrics{Attempt: 1, Iteration: i + 1, Step: int64(i), Metrics: map[string]any{"x": fmt.Sprintf("%x", text)}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Log.Append(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	committed(t, s, "run", 2)
	for i := range 20 { // after the last receipt
		say(t, s, "run", events.WriteFailed{Attempt: 1, Checkpoint: "x", Rank: i, Error: "test"})
	}
	last, err := s.Log.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	shut(t, s)
	if blocks := blocksOf(t, dir); len(blocks) < 3 {
		t.Fatalf("%d blocks", len(blocks))
	}
	return dir, last
}

// TestDamagedLog damages the files of a log in every known way, with and without its index and
// the views. Whatever command comes first, either the store does not open and reports damage, or
// reading the whole log finds the damage and names the event. No acknowledged sequence is
// assigned again, and the damaged file is kept.
func TestDamagedLog(t *testing.T) {
	t.Parallel()
	whole, last := spacious(t)
	for _, damage := range []struct {
		name string
		do   func(t *testing.T, blocks []string) (hit string)
	}{
		{"flip in a middle block", func(t *testing.T, blocks []string) string { return flip(t, blocks[len(blocks)/2], middle) }},
		{"flip in the last block", func(t *testing.T, blocks []string) string { return flip(t, blocks[len(blocks)-1], middle) }},
		{"flip near the end", func(t *testing.T, blocks []string) string { return flip(t, blocks[len(blocks)-1], 1500) }},
		{"flip at the end", func(t *testing.T, blocks []string) string { return flip(t, blocks[len(blocks)-1], 100) }},
		{"truncated tail", func(t *testing.T, blocks []string) string {
			path := blocks[len(blocks)-1]
			write(t, path, read(t, path)[:len(read(t, path))*2/3])
			return path
		}},
		{"middle block deleted", func(t *testing.T, blocks []string) string {
			remove(t, filepath.Dir(blocks[0]), filepath.Base(blocks[len(blocks)/2]))
			return ""
		}},
		{"last block deleted", func(t *testing.T, blocks []string) string {
			remove(t, filepath.Dir(blocks[0]), filepath.Base(blocks[len(blocks)-1]))
			return ""
		}},
	} {
		for _, index := range []bool{true, false} {
			for _, first := range firstCommands {
				for _, views := range []bool{true, false} {
					if index && !first.whole || !views && !first.bare {
						continue
					}
					t.Run(fmt.Sprintf("%s, index %v, views %v, first %s", damage.name, index, views, first.name), func(t *testing.T) {
						t.Parallel()
						dir := filepath.Join(t.TempDir(), "store")
						if err := os.CopyFS(dir, os.DirFS(whole)); err != nil {
							t.Fatal(err)
						}
						blocks := blocksInOrder(t, dir)
						hit := damage.do(t, blocks)
						was := ""
						if hit != "" {
							was = read(t, hit)
						}
						if !index {
							remove(t, filepath.Dir(blocks[0]), "index.db")
						}
						if !views {
							remove(t, dir, "views")
						}
						first.do(t, dir)
						holdDamaged(t, dir, last)
						if hit == "" {
							return
						}
						kept, err := filepath.Glob(filepath.Join(dir, damagedName, "*", filepath.Base(hit)))
						if err != nil {
							t.Fatal(err)
						}
						if !slices.ContainsFunc(append(kept, hit), func(path string) bool {
							text, err := os.ReadFile(path)
							return err == nil && strings.HasPrefix(string(text), was)
						}) {
							t.Error("the damaged file is not kept as it was")
						}
					})
				}
			}
		}
	}
}

// firstCommands are commands that a user may run first on a store with a damaged log. Those
// that fail must report the damage.
var firstCommands = []struct {
	name  string
	whole bool // also run with an index
	bare  bool // also run without views
	do    func(t *testing.T, dir string)
}{
	{"open", true, true, func(*testing.T, string) {}},
	{"views rebuild", false, true, func(t *testing.T, dir string) {
		path := filepath.Join(dir, "views")
		had, missing := os.Stat(path)
		if _, err := RebuildViews(t.Context(), Options{Location: dir}); err != nil {
			wrong(t, err, ErrDamaged)
			has, err := os.Stat(path)
			if missing == nil && (err != nil || !os.SameFile(had, has)) || missing != nil && err == nil {
				t.Error("the views were replaced")
			}
		}
	}},
	{"views verify", true, false, func(t *testing.T, dir string) {
		s, err := Open(t.Context(), Options{Location: dir})
		if err == nil {
			_, err = s.VerifyViews(t.Context())
			shut(t, s)
		}
		if err != nil {
			wrong(t, damage(err), ErrDamaged)
		}
	}},
}

// holdDamaged opens a store with a damaged log and checks the outcome.
func holdDamaged(t *testing.T, dir string, last uint64) {
	t.Helper()
	s, err := Open(t.Context(), Options{Location: dir})
	if err != nil {
		wrong(t, err, ErrDamaged)
		t.Logf("does not open: %.200v", err)
		return
	}
	defer shut(t, s)
	out, err := s.VerifyLog(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if len(out.Findings) == 0 || out.Last != last {
		t.Errorf("it opens, ends at event %d instead of %d, and the whole log is read without a finding", out.Last, last)
	}
	for _, f := range out.Findings {
		t.Logf("finds %.200s", f)
		if f.Sequence == 0 {
			t.Errorf("a finding names no event: %s", f)
		}
	}
	read, found, err := s.LastFullRead()
	if err != nil || !found || read.Sequence != 0 || read.Damage == nil || len(read.Damage.Findings) != len(out.Findings) {
		t.Errorf("the reading's record is %+v, %v, %v", read, found, err)
	}
	fact, err := metrics("another", "other", 1)
	if err != nil {
		t.Fatal(err)
	}
	if seq, err := s.Log.Append(t.Context(), fact); err == nil && seq[0] <= last {
		t.Errorf("sequence %d was given out twice", seq[0])
	}
}

// middle makes flip flip a bit in the middle of a file.
const middle = 0

// flip flips a bit of a file, before bytes from its end.
func flip(t *testing.T, path string, before int) string {
	t.Helper()
	data := []byte(read(t, path))
	at := len(data) - before
	if before == middle {
		at = len(data) / 2
	}
	data[at] ^= 1
	write(t, path, string(data))
	return path
}

// blocksInOrder returns the blocks of a log, the oldest first.
func blocksInOrder(t *testing.T, dir string) []string {
	t.Helper()
	blocks := blocksOf(t, dir)
	number := func(path string) (n int) {
		if _, err := fmt.Sscanf(filepath.Base(path), "%d.blk", &n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	slices.SortFunc(blocks, func(a, b string) int { return number(a) - number(b) })
	return blocks
}
