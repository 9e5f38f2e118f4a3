package data_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// hooked is a filesystem in which something happens once: when the first upload
// is created, before the first write to it or its first sync, or before the first
// link.
type hooked struct {
	vfs.FS
	create, write, sync, link func(path string) // nil: nothing
	once                      sync.Once
	opened                    atomic.Int64 // files that were opened for reading
}

func (h *hooked) happen(what func(string), path string) {
	if what != nil {
		h.once.Do(func() { what(path) })
	}
}

func (h *hooked) Open(name string, o ...vfs.OpenOption) (vfs.File, error) {
	h.opened.Add(1)
	return h.FS.Open(name, o...)
}

func (h *hooked) OpenReadWrite(name string, c vfs.DiskWriteCategory, o ...vfs.OpenOption) (vfs.File, error) {
	f, err := h.FS.OpenReadWrite(name, c, o...)
	if err != nil || !strings.HasSuffix(name, object.Partial) {
		return f, err
	}
	h.happen(h.create, name)
	return hookedFile{f, h, name}, nil
}

func (h *hooked) Link(from, to string) error {
	h.happen(h.link, to)
	return h.FS.Link(from, to)
}

type hookedFile struct {
	vfs.File
	of   *hooked
	path string
}

func (f hookedFile) WriteAt(p []byte, off int64) (int, error) {
	f.of.happen(f.of.write, f.path)
	return f.File.WriteAt(p, off)
}

func (f hookedFile) Sync() error {
	f.of.happen(f.of.sync, f.path)
	return f.File.Sync()
}

// TestRepairDuringSave: a save links the damaged file while a repair writes the
// new one, or gives it its names; it has the new one too in the end. A file in
// memory has no ID to tell it by.
func TestRepairDuringSave(t *testing.T) {
	for _, kind := range []string{"disk", "memory"} {
		for _, moment := range []string{"write", "link"} {
			t.Run(kind+" "+moment, func(t *testing.T) {
				var fs vfs.FS = vfs.Default
				root := onDisk(t)
				if kind == "memory" {
					fs = memory(t)
					root = open(t, fs)
				}
				s := shared(t, fs, root)
				flip(t, fs, s.path(root, 0, 0), 4096+70000) // not in the first block, which a save compares
				damaged, all, elsewhere := s.damaged(t, root), s.targets(), s.past[2]
				h := &hooked{FS: fs}
				save := func(string) {
					s.past = s.past[:2]
					if c := s.save(t, "step-3"); len(links(c, 0)) == 0 {
						t.Errorf("the save links nothing: %v", c.written[0].Files)
					}
					s.past = append(s.past, elsewhere)
				}
				if moment == "write" {
					h.write = save
				} else {
					h.link = save
				}
				repairing, err := data.Open(h, root.Dir())
				if err != nil {
					t.Fatal(err)
				}
				done, err := repairing.Repair(t.Context(), damaged, all)
				if err != nil || len(done.Left) != 0 || len(done.Files) != 1 {
					t.Fatalf("%+v, %v", done, err)
				}
				linked := filepath.Join(root.Dir(), s.past[2].ref.String(), links(s.past[2], 0)[0])
				if !slices.Contains(done.Files[0].Links, linked) {
					t.Errorf("repaired too are %v, want %s among them", done.Files[0].Links, linked)
				}
				if found := s.damagedNow(t, root); len(found) != 0 {
					t.Errorf("afterwards: %v", found)
				}
				if kind == "memory" {
					return
				}
				a, err := os.Stat(s.path(root, 0, 0))
				b, err2 := os.Stat(linked)
				if err != nil || err2 != nil || !os.SameFile(a, b) {
					t.Errorf("the save has another file: %v, %v", err, err2)
				}
			})
		}
	}
}

// damagedNow are the checkpoints in which a verification finds something.
func (s *series) damagedNow(t testing.TB, root *data.Root) (all []string) {
	t.Helper()
	for ref, found := range s.found(t, root) {
		all = append(all, fmt.Sprint(ref, found))
	}
	return all
}

// fickle has the right bytes when it is first asked, and others from then on.
type fickle struct {
	right []byte
	asked int
}

func (f *fickle) Chunk(context.Context, checkpoint.Item, checkpoint.Digest) ([]byte, string, error) {
	f.asked++
	if f.asked == 1 {
		return f.right, "slot", nil
	}
	other := slices.Clone(f.right)
	other[len(other)/2] ^= 1
	return other, "slot", nil
}

// TestRepairSourceChanges: bytes that change between the look at them and the
// copy are not given the name of the damaged file.
func TestRepairSourceChanges(t *testing.T) {
	root := onDisk(t)
	s := newSeries(t, vfs.Default, 1, 1<<20, 5000)
	s.root = root
	s.save(t, "step-1")
	path := s.path(root, 0, 0)
	flip(t, vfs.Default, path, 4096)
	before, err := os.ReadFile(path)
	must(t, err)
	source := &fickle{right: s.now["layers.0.r0"]}
	done, err := root.Repair(t.Context(), s.damaged(t, root), s.targets(), source)
	if err == nil || !strings.Contains(err.Error(), "have changed while they were copied; run the command again") || len(done.Files) != 0 {
		t.Errorf("%+v, %v", done, err)
	}
	after, err := os.ReadFile(path)
	must(t, err)
	if source.asked != 2 || string(before) != string(after) {
		t.Errorf("after %d questions the damaged file is another", source.asked)
	}
	names, err := os.ReadDir(filepath.Dir(path))
	must(t, err)
	for _, name := range names {
		if strings.HasSuffix(name.Name(), object.Partial) {
			t.Errorf("left is %s", name.Name())
		}
	}
}

// TestRepairDonorChanges is the same with a file that loses a bit meanwhile.
func TestRepairDonorChanges(t *testing.T) {
	root := onDisk(t)
	s := shared(t, vfs.Default, root)
	flip(t, vfs.Default, s.path(root, 0, 0), 4096+9)
	damaged, before := s.damaged(t, root), s.found(t, root)
	h := &hooked{FS: vfs.Default, create: func(string) { flip(t, vfs.Default, s.path(root, 2, 0), 4096+100) }}
	repairing, err := data.Open(h, root.Dir())
	if err != nil {
		t.Fatal(err)
	}
	done, err := repairing.Repair(t.Context(), damaged, s.targets())
	if err == nil || !strings.Contains(err.Error(), "have changed while they were copied") || len(done.Files) != 0 {
		t.Errorf("%+v, %v", done, err)
	}
	after := s.found(t, root)
	for ref, found := range before {
		if !slices.Equal(after[ref], found) {
			t.Errorf("%s has %v, and had %v", ref, after[ref], found)
		}
	}
}

// TestRepairReadsAgain: a disk that has other bytes than were written is found
// out, and other checkpoints keep what they have.
func TestRepairReadsAgain(t *testing.T) {
	root := onDisk(t)
	s := shared(t, vfs.Default, root)
	flip(t, vfs.Default, s.path(root, 0, 0), 4096+100)
	second := s.past[1]
	before, err := os.Stat(s.path(root, 1, 1))
	must(t, err)
	// The third chunk was whole, and is copied from the damaged file.
	h := &hooked{FS: vfs.Default, sync: func(path string) { flip(t, vfs.Default, path, 4096+2<<20) }}
	repairing, err := data.Open(h, root.Dir())
	must(t, err)
	first := map[checkpoint.Ref][]string{s.past[0].ref: s.damaged(t, root)[s.past[0].ref]}
	done, err := repairing.Repair(t.Context(), first, s.targets())
	if err != nil || len(done.Files) != 0 || len(done.Left) != 1 || !strings.Contains(done.Left[0].Reason, "reads back with other bytes than were written; check the disk") {
		t.Fatalf("%+v, %v", done, err)
	}
	if now, err := os.Stat(s.path(root, 1, 1)); err != nil || !os.SameFile(before, now) {
		t.Errorf("%s was given the file: %v", second.ref, err)
	}
	if done, err = root.Repair(t.Context(), s.damaged(t, root), s.targets()); err != nil || len(done.Left) != 0 {
		t.Fatalf("%+v, %v", done, err)
	}
	if found := s.damagedNow(t, root); len(found) != 0 {
		t.Errorf("afterwards: %v", found)
	}
}

// TestRepairOpensFewFiles: with twice as many damaged checkpoints, twice as many
// files are opened, also where damaged chunks are the same in all of them.
func TestRepairOpensFewFiles(t *testing.T) {
	opened := map[int]int64{}
	for _, n := range []int{10, 40} {
		h := &hooked{FS: memory(t)}
		s := newSeries(t, h, 1, 1000, 1000)
		for i := range n {
			s.change("layers.0.r0", 0, uint64(i+1))
			s.past = s.past[:i]
			s.save(t, fmt.Sprintf("step-%d", i))
		}
		for i := range n {
			flip(t, h, s.path(s.root, i, 0), 4096+10)
			flip(t, h, s.path(s.root, i, 0), 4096+1010)
		}
		damaged := s.damaged(t, s.root)
		h.opened.Store(0)
		done, err := s.root.Repair(t.Context(), damaged, s.targets())
		if err != nil || len(damaged) != n || len(done.Left) != 2*n {
			t.Fatalf("%d are damaged, %d chunks are left, %v", len(damaged), len(done.Left), err)
		}
		opened[n] = h.opened.Load()
	}
	t.Logf("opened, by checkpoints: %v", opened)
	if opened[40] > 4*opened[10] || opened[40] > 10*40 {
		t.Errorf("opened were, by checkpoints, %v files", opened)
	}
}
