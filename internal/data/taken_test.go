package data_test

import (
	"context"
	"errors"
	"io"
	"maps"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// TestTaken puts a foreign file into the directory of a save: no step proceeds, and the file
// is neither changed nor removed.
func TestTaken(t *testing.T) {
	m := small()
	// saved is the directory of a checkpoint as its writer leaves it.
	saved := func(t *testing.T, store string, cut bool, change func(*checkpoint.Manifest)) map[string]string {
		t.Helper()
		fs := memory(t)
		root := open(t, fs)
		root.OfStore(store)
		written, err := m.write(t.Context(), root)
		if err != nil {
			t.Fatal(err)
		}
		manifest := m.manifest(written)
		manifest.Store = store
		change(&manifest)
		decide := commit
		if cut {
			decide = refuse
		}
		if _, err := root.Writer(ref).Finish(t.Context(), manifest, decide); (err != nil) != cut {
			t.Fatal(err)
		}
		return files(t, fs)
	}
	same := func(*checkpoint.Manifest) {}
	for _, c := range []struct {
		name    string
		there   func(t *testing.T) map[string]string
		what    string
		writes  bool // the same bytes may be written again
		sweeps  bool // it goes with an aborted save
		deletes bool // it goes with a deleted checkpoint
	}{
		{"another store's checkpoint", func(t *testing.T) map[string]string { return saved(t, "store-2", false, same) }, "receipt of checkpoint run/t0/step-100.a1 of store store-2", false, false, false},
		{"another store's manifest", func(t *testing.T) map[string]string { return saved(t, "store-2", true, same) }, "manifest of checkpoint run/t0/step-100.a1 of store store-2", false, false, false},
		{"another checkpoint of this store", func(t *testing.T) map[string]string {
			return saved(t, "store-1", false, func(p *checkpoint.Manifest) { p.Checkpoint = "step-90.a1" })
		}, "checkpoint run/t0/step-90.a1 of store store-1", false, false, false},
		{"a damaged receipt", func(t *testing.T) map[string]string {
			there := saved(t, "store-1", false, same)
			there[checkpoint.ReceiptFile] = "{"
			return there
		}, "a damaged receipt", false, false, false},
		{"a damaged manifest", func(t *testing.T) map[string]string {
			there := saved(t, "store-1", true, same)
			for name := range there {
				if strings.HasPrefix(name, "manifest-") {
					there[name] = there[name][1:]
				}
			}
			return there
		}, "a damaged manifest", false, false, false},
		{"this checkpoint, committed", func(t *testing.T) map[string]string { return saved(t, "store-1", false, same) }, "receipt of a committed checkpoint", true, false, true},
		{"this checkpoint, not committed", func(t *testing.T) map[string]string { return saved(t, "store-1", true, same) }, "", true, true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			there := c.there(t)
			scene := func() (*vfs.MemFS, *data.Root) {
				fs := memory(t)
				root := open(t, fs)
				if err := root.Writer(ref).SetUp(t.Context(), true); err != nil {
					t.Fatal(err)
				}
				for name, text := range there {
					lay(t, fs, name, text)
				}
				return fs, root
			}
			fs, root := scene()
			w := root.Writer(ref)
			_, written := w.WriteData(t.Context(), 0, m.layout.Items(0), m.source(0))
			asked := false
			manifest := m.manifest(nil)
			_, finished := w.Finish(t.Context(), manifest, func(_ context.Context, _ checkpoint.Digest) (checkpoint.Decision, error) {
				asked = true
				return decision, nil
			})
			for step, err := range map[string]error{"SetUp": w.SetUp(t.Context(), true), "WriteData": written, "Finish": finished} {
				var taken *data.TakenError
				if got := errors.As(err, &taken); got == c.writes || got && (!strings.Contains(err.Error(), c.what) || !strings.Contains(err.Error(), "move its directory away")) {
					t.Errorf("%s: %v", step, err)
				}
			}
			if asked {
				t.Error("the log was asked to commit")
			}
			if now := files(t, fs); !maps.Equal(now, there) {
				t.Errorf("writing made %v of %v", names(now), names(there))
			}
			for _, r := range []struct {
				name   string
				goes   bool
				remove func(*data.Root) error
			}{
				{"Remove", c.sweeps, func(root *data.Root) error { return root.Remove(t.Context(), ref) }},
				{"RemoveCommitted", c.deletes, func(root *data.Root) error { return root.RemoveCommitted(t.Context(), ref) }},
			} {
				fs, root := scene()
				err := r.remove(root)
				var taken *data.TakenError
				if errors.As(err, &taken) == r.goes || r.goes != (err == nil) {
					t.Errorf("%s: %v", r.name, err)
				}
				if now := files(t, fs); r.goes && len(now) > 0 || !r.goes && !maps.Equal(now, there) {
					t.Errorf("%s left %v of %v", r.name, names(now), names(there))
				}
			}
		})
	}
}

// files are those in the directory of ref, with their content.
func files(t *testing.T, fs vfs.FS) map[string]string {
	t.Helper()
	out := map[string]string{}
	list, err := fs.List("store/data/" + ref.String())
	if err != nil {
		return out
	}
	for _, name := range list {
		f, err := fs.Open("store/data/" + ref.String() + "/" + name)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(f)
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
		out[name] = string(text)
	}
	return out
}

func names(files map[string]string) (names []string) {
	for name := range files {
		names = append(names, name)
	}
	return names
}

// lay puts a file into the directory of ref.
func lay(t *testing.T, fs vfs.FS, name, text string) {
	t.Helper()
	f, err := fs.Create("store/data/"+ref.String()+"/"+name, vfs.WriteCategoryUnspecified)
	if err == nil {
		_, err = f.Write([]byte(text))
	}
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
}

// refuse is a log that takes no commit.
func refuse(context.Context, checkpoint.Digest) (checkpoint.Decision, error) {
	return checkpoint.Decision{}, errors.New("refused")
}
