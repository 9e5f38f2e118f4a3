package data_test

import (
	"context"
	"errors"
	"path/filepath"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/object/objecttest"
	"github.com/ckptstore/ckptstore/tensor"
)

// decider is a log with one decision: the first wins.
type decider struct {
	mu    sync.Mutex
	taken checkpoint.Digest
}

func (d *decider) commit(_ context.Context, manifest checkpoint.Digest) (checkpoint.Decision, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.taken != (checkpoint.Digest{}) {
		return checkpoint.Decision{}, errors.New("the log has a decision")
	}
	d.taken = manifest
	return decision, nil
}

// TestTwoCoordinators lets two coordinators save and commit the same checkpoint in one bucket at
// the same time, with different bytes. At most one commits, and what is read is all its own.
func TestTwoCoordinators(t *testing.T) {
	outcomes := map[int]int{}
	for range 200 {
		bucket := objecttest.NewBucket()
		var log decider
		var sides [2]*model
		var receipts [2]checkpoint.Receipt
		var errs [2]error
		var both sync.WaitGroup
		for i := range sides {
			m := newModel()
			m.full(0, "w", tensor.Float32, 3000)
			m.full(1, "v", tensor.Float32, 2000)
			m.value("step", 1, 9, false)
			for _, of := range m.tensors {
				of[0] = byte(i)
			}
			sides[i] = m
			root := data.OpenBackend(bucket, vfs.NewMem())
			root.OfStore("store-1")
			both.Go(func() {
				var written map[int]data.Written
				if written, errs[i] = m.write(t.Context(), root); errs[i] == nil {
					receipts[i], errs[i] = root.Writer(ref).Finish(t.Context(), m.manifest(written), log.commit)
				}
			})
		}
		both.Wait()
		root := data.OpenBackend(bucket, vfs.NewMem())
		root.OfStore("store-1")
		committed := 0
		for i, m := range sides {
			if errs[i] != nil {
				continue
			}
			committed++
			if report := verify(t, root, receipts[i].Manifest); !report.Clean() || receipts[i].Manifest != log.taken {
				t.Errorf("the committed checkpoint: %+v", report)
			}
			m.check(t, root.Reader(ref), m.wantAll())
		}
		list, err := listed(t, root)
		if committed > 1 || err != nil || len(list) != committed {
			t.Fatalf("%d commits, %d receipts: %v, %v, %v", committed, len(list), errs[0], errs[1], err)
		}
		outcomes[committed]++
	}
	t.Logf("commits: %v", outcomes)
	if outcomes[1] == 0 {
		t.Error("no coordinator ever committed")
	}
}

// TestThawedWriter lets a process that was taken for dead give its files their names after another
// process has written and committed the same checkpoint in its place, in a directory and in a
// bucket. No byte of the checkpoint changes.
func TestThawedWriter(t *testing.T) {
	mem := memory(t)
	bucket := objecttest.NewBucket()
	for name, open := range map[string]func() *data.Root{
		"directory": func() *data.Root { return open(t, mem) },
		"bucket": func() *data.Root {
			root := data.OpenBackend(bucket, vfs.NewMem())
			root.OfStore("store-1")
			return root
		},
	} {
		t.Run(name, func(t *testing.T) {
			m, other := newModel(), newModel()
			for i, m := range []*model{m, other} {
				m.full(0, "w", tensor.Float32, 3000)
				m.tensors["w"][0] = byte(i)
			}
			frozen := open().Writer(ref)
			if err := frozen.SetUp(t.Context(), true); err != nil {
				t.Fatal(err)
			}
			var receipt checkpoint.Receipt
			src := source(func(i int) ([]byte, error) {
				if receipt.Name == "" { // the writer has looked at the directory, and now reads its items
					receipt = m.save(t, open())
				}
				return other.source(0).Item(i)
			})
			if _, err := frozen.WriteData(t.Context(), 0, other.layout.Items(0), src); err == nil {
				t.Error("the late write succeeded")
			}
			root := open()
			if report := verify(t, root, receipt.Manifest); !report.Clean() {
				t.Errorf("%+v", report)
			}
			m.check(t, root.Reader(ref), m.wantAll())
		})
	}
}

// TestThawedBeforeIndex lets a process that was taken for dead see the data file of the process that writes in its
// place, before that has its index. The other commits while the first examines its items, so the file is none
// to remove. If its bytes are those of the first, the write is done.
func TestThawedBeforeIndex(t *testing.T) {
	for name, c := range map[string]struct {
		first byte // of the late writer's items; the other has 0
		want  error
	}{"other bytes": {1, data.ErrSealed}, "the same bytes": {0, nil}} {
		t.Run(name, func(t *testing.T) {
			mem := memory(t)
			m, other := newModel(), newModel()
			for i, m := range []*model{m, other} {
				m.full(0, "w", tensor.Float32, data.MinReuse)
				m.tensors["w"][0] = byte(i) * c.first
			}
			root := open(t, mem)
			written, err := m.write(t.Context(), root)
			if err != nil {
				t.Fatal(err)
			}
			index := filepath.Join(root.Dir(), ref.String(), checkpoint.IndexFile(0))
			if err := mem.Rename(index, "index"); err != nil {
				t.Fatal(err)
			}
			var receipt checkpoint.Receipt
			src := source(func(i int) ([]byte, error) {
				if receipt.Name == "" { // the writer has looked at the directory, and now digests its items
					if err := mem.Rename("index", index); err != nil {
						t.Fatal(err)
					}
					if receipt, err = root.Writer(ref).Finish(t.Context(), m.manifest(written), commit); err != nil {
						t.Fatal(err)
					}
				}
				return other.source(0).Item(i)
			})
			frozen := open(t, mem).Writer(ref).Reusing(nil)
			late, err := frozen.WriteData(t.Context(), 0, other.layout.Items(0), src)
			if !errors.Is(err, c.want) || err == nil && late.Index != written[0].Index {
				t.Errorf("the late write: %+v, %v, want %v", late, err, c.want)
			}
			if report := verify(t, open(t, mem), receipt.Manifest); !report.Clean() {
				t.Errorf("%+v", report)
			}
			m.check(t, open(t, mem).Reader(ref), m.wantAll())
		})
	}
}

// TestLeftoverWithoutIndex writes a rank whose data file an earlier process left in a bucket
// without its index. The same bytes are taken as they are; others stay, unless that process is known
// to be dead.
func TestLeftoverWithoutIndex(t *testing.T) {
	m, other := newModel(), newModel()
	for i, m := range []*model{m, other} {
		m.full(0, "w", tensor.Float32, 3000)
		m.tensors["w"][0] = byte(i)
	}
	bucket := objecttest.Count(objecttest.NewBucket())
	write := func(m *model, alone bool) error {
		root := data.OpenBackend(bucket, vfs.NewMem())
		root.OfStore("store-1")
		w := root.Writer(ref)
		if alone {
			w.Alone()
		}
		if err := w.SetUp(t.Context(), true); err != nil {
			return err
		}
		_, err := w.WriteData(t.Context(), 0, m.layout.Items(0), m.source(0))
		return err
	}
	for _, c := range []struct {
		of    *model
		alone bool
		puts  int
		want  error
	}{{m, false, 2, nil}, {m, false, 2, nil}, {other, false, 1, data.ErrOtherWriter}, {other, true, 3, nil}} {
		bucket.Since()
		if err := write(c.of, c.alone); !errors.Is(err, c.want) || bucket.Since().Put != c.puts {
			t.Errorf("alone %v: %v", c.alone, err)
		}
		if err := bucket.Remove(t.Context(), ref.String()+"/"+checkpoint.IndexFile(0)); err != nil {
			t.Fatal(err)
		}
	}
}
