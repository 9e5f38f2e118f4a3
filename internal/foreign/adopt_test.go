package foreign

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// adoptedScene is a checkpoint of PyTorch in a directory of its own, adopted.
type adoptedScene struct {
	dir    string
	root   *data.Root
	ref    checkpoint.Ref
	digest checkpoint.Digest
}

func adopt(t *testing.T, from fixture) *adoptedScene {
	t.Helper()
	s := &adoptedScene{dir: filepath.Join(t.TempDir(), "saved"), ref: checkpoint.Ref{Run: "run", Trial: "main", Checkpoint: "step-1.a1"}}
	if err := os.CopyFS(s.dir, os.DirFS(from.dir)); err != nil {
		t.Fatal(err)
	}
	var err error
	if s.root, err = data.Open(vfs.Default, filepath.Join(t.TempDir(), "data")); err != nil {
		t.Fatal(err)
	}
	s.root.OfStore("s")
	f := openForeign(t, s.dir)
	w := s.root.Writer(s.ref)
	if err := w.SetUp(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	m := f.Manifest()
	m.Store, m.Run, m.Trial, m.Checkpoint, m.Attempt = "s", "run", "main", s.ref.Checkpoint, 1
	var locals []checkpoint.Local
	for _, r := range m.Ranks {
		locals = append(locals, checkpoint.Local{Rank: r.Rank, Items: f.Items(r.Rank)})
	}
	// As a save plans it, which may leave out what is empty.
	made, err := planner.Global(locals)
	if err != nil {
		t.Fatal(err)
	}
	m.Layout = made.Layout
	for i, r := range m.Ranks {
		written, err := w.AdoptData(t.Context(), r.Rank, m.Layout.Items(r.Rank), f)
		if err != nil {
			t.Fatal(err)
		}
		m.Ranks[i].Index = written.Index
	}
	receipt, err := w.Finish(t.Context(), m, func(_ context.Context, d checkpoint.Digest) (checkpoint.Decision, error) {
		s.digest = d
		return checkpoint.Decision{Sequence: 7, Event: "e", Time: time.Unix(1, 0)}, nil
	})
	if err != nil || receipt.Manifest != s.digest {
		t.Fatal(err)
	}
	return s
}

func (s *adoptedScene) file() string { return filepath.Join(s.dir, "__0_0.distcp") }

// read reads everything again.
func (s *adoptedScene) read(t *testing.T) (map[string][]byte, error) {
	t.Helper()
	r := s.root.Reader(s.ref)
	m, err := r.ReadMetadata(t.Context())
	if err != nil {
		return nil, err
	}
	return contents(t.Context(), r, m)
}

func (s *adoptedScene) learn(t *testing.T, recorded map[string]checkpoint.Digest) data.Report {
	t.Helper()
	report, err := s.root.Learn(t.Context(), s.ref, s.digest, data.LearnOptions{Recorded: recorded})
	if err != nil {
		t.Fatal(err)
	}
	return report
}

// rewrite changes a file and gives it back its time, as a fault of the disk
// would.
func rewrite(t *testing.T, name string, change func([]byte) []byte) {
	t.Helper()
	info, err := os.Stat(name)
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, change(data), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(name, info.ModTime(), info.ModTime()); err != nil {
		t.Fatal(err)
	}
}

func TestAdopted(t *testing.T) {
	for name, f := range fixtures(t) {
		t.Run(name, func(t *testing.T) {
			s := adopt(t, f)
			told := 0
			s.root.OnUnverified(func(checkpoint.Ref) { told++ })
			f.check(t, s.root.Reader(s.ref))
			f.check(t, s.root.Reader(s.ref))
			if told != 1 {
				t.Errorf("told %d times that the bytes are not verified", told)
			}
			ranks, err := s.root.Unlearned(t.Context(), s.ref)
			if err != nil || len(ranks) == 0 {
				t.Errorf("unlearned %v, %v", ranks, err)
			}
			first := s.learn(t, nil)
			if !first.Clean() || len(first.Sums) != len(ranks) || first.Unknown > 0 {
				t.Errorf("learned %+v", first)
			}
			if left, err := s.root.Unlearned(t.Context(), s.ref); err != nil || len(left) > 0 {
				t.Errorf("still unlearned %v, %v", left, err)
			}
			again := s.learn(t, nil)
			for i := range again.Sums {
				if again.Sums[i].New || again.Sums[i].Digest != first.Sums[i].Digest {
					t.Errorf("learned %+v, then %+v", first.Sums[i], again.Sums[i])
				}
			}
			f.check(t, s.root.Reader(s.ref))
			if err := s.root.RemoveCommitted(t.Context(), s.ref); err != nil {
				t.Fatal(err)
			}
			f.check(t, openForeign(t, s.dir))
		})
	}
}

// nested is a fixture of this repository.
func nested(t *testing.T) fixture {
	t.Helper()
	dir, err := filepath.Abs(filepath.Join("..", "format", "dcp", "testdata", "torch-2.14", "single_nested"))
	if err != nil {
		t.Fatal(err)
	}
	return fixture{dir: dir}
}

func TestAdoptedFileThatChanges(t *testing.T) {
	for name, change := range map[string]func(t *testing.T, name string) error{
		"touched":   func(_ *testing.T, name string) error { return os.Chtimes(name, time.Unix(9, 0), time.Unix(9, 0)) },
		"truncated": func(_ *testing.T, name string) error { return os.Truncate(name, 10) },
		"longer":    func(_ *testing.T, name string) error { return os.Truncate(name, 1<<20) },
		"removed":   func(_ *testing.T, name string) error { return os.Remove(name) },
		"a truncation in disguise": func(t *testing.T, name string) error {
			rewrite(t, name, func(b []byte) []byte { return b[:len(b)-1] })
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := adopt(t, nested(t))
			if err := change(t, s.file()); err != nil {
				t.Fatal(err)
			}
			_, err := s.read(t)
			var changed *data.ChangedError
			if !errors.As(err, &changed) || changed.File != s.file() || !strings.Contains(err.Error(), "import it again") {
				t.Errorf("reading gives %v", err)
			}
			report := s.learn(t, nil)
			if report.Clean() || len(report.Sums) > 0 {
				t.Errorf("learned %+v", report)
			}
		})
	}
}

func TestAdoptedFlip(t *testing.T) {
	chunks := places(t, nested(t).dir)
	i := slices.IndexFunc(chunks, func(c data.Place) bool { return !c.Item.Value && c.Item.Bytes > 0 })
	middle := func(b []byte) []byte { b[chunks[i].Offset+1] ^= 4; return b }
	t.Run("before it is learned", func(t *testing.T) {
		s := adopt(t, nested(t))
		rewrite(t, s.file(), middle)
		report := s.learn(t, nil)
		if report.Clean() || len(report.Sums) > 0 {
			t.Errorf("learned %+v", report)
		}
	})
	t.Run("after it is learned", func(t *testing.T) {
		s := adopt(t, nested(t))
		s.learn(t, nil)
		rewrite(t, s.file(), middle)
		var corrupt *data.CorruptError
		if _, err := s.read(t); !errors.As(err, &corrupt) || corrupt.File != s.file() {
			t.Errorf("reading gives %v", err)
		}
		if report := s.learn(t, nil); report.Clean() {
			t.Error("verify finds nothing")
		}
	})
	t.Run("when the sums are gone and the log has them", func(t *testing.T) {
		s := adopt(t, nested(t))
		sums := s.learn(t, nil).Sums[0]
		path := filepath.Join(s.root.Dir(), s.ref.String(), sums.Name)
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		recorded := map[string]checkpoint.Digest{sums.Name: checkpoint.Sum([]byte("others"))}
		if report := s.learn(t, recorded); report.Clean() || len(report.Sums) > 0 {
			t.Errorf("learned %+v", report)
		}
		recorded[sums.Name] = sums.Digest
		if report := s.learn(t, recorded); !report.Clean() || report.Sums[0].Digest != sums.Digest {
			t.Errorf("learned %+v", report)
		}
	})
	t.Run("of the sums", func(t *testing.T) {
		s := adopt(t, nested(t))
		path := filepath.Join(s.root.Dir(), s.ref.String(), s.learn(t, nil).Sums[0].Name)
		rewrite(t, path, func(b []byte) []byte { b[50] ^= 1; return b })
		var corrupt *data.CorruptError
		if _, err := s.read(t); !errors.As(err, &corrupt) || corrupt.File != path {
			t.Errorf("reading gives %v", err)
		}
		if report := s.learn(t, nil); report.Clean() {
			t.Error("verify finds nothing")
		}
	})
}
