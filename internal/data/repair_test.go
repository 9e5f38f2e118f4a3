package data_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
)

// targets are the checkpoints of a series.
func (s *series) targets() (all []data.Target) {
	for _, c := range s.past {
		all = append(all, data.Target{Ref: c.ref, Manifest: c.receipt.Manifest})
	}
	return all
}

// damaged are the files in which a verification finds something.
func (s *series) damaged(t testing.TB, root *data.Root) map[checkpoint.Ref][]string {
	t.Helper()
	found := map[checkpoint.Ref][]string{}
	for _, c := range s.past {
		report, err := root.Verify(t.Context(), c.ref, c.receipt.Manifest, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range report.Findings {
			found[c.ref] = append(found[c.ref], f.File)
		}
	}
	return found
}

// found returns the findings of a verification in each, as text.
func (s *series) found(t testing.TB, root *data.Root) map[checkpoint.Ref][]string {
	t.Helper()
	found := map[checkpoint.Ref][]string{}
	for _, c := range s.past {
		report, err := root.Verify(t.Context(), c.ref, c.receipt.Manifest, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range report.Findings {
			found[c.ref] = append(found[c.ref], f.String())
		}
	}
	return found
}

// flip changes a byte of a file where it is, for all of its names.
func flip(t testing.TB, fs vfs.FS, path string, at int64) {
	t.Helper()
	f, err := fs.OpenReadWrite(path, vfs.WriteCategoryUnspecified)
	if err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 1)
	_, err = f.ReadAt(b, at)
	if err == nil {
		_, err = f.WriteAt([]byte{b[0] ^ 0x10}, at)
	}
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
}

// shared is a series of two checkpoints that have a file together, and a third
// in another run, saved without knowing of them, that has the same bytes.
func shared(t testing.TB, fs vfs.FS, root *data.Root) *series {
	t.Helper()
	s := newSeries(t, fs, 1, 1<<20+70, 2<<20)
	s.root = root
	s.save(t, "step-1")
	s.change("layers.2.r0", 0, 1)
	if c := s.save(t, "step-2"); len(links(c, 0)) != 1 {
		t.Fatalf("files %v", c.written[0].Files)
	}
	past := s.past
	s.past = nil
	s.save(t, "elsewhere")
	s.past = append(past, s.past...)
	return s
}

func (s *series) path(root *data.Root, i, file int) string {
	return filepath.Join(root.Dir(), s.past[i].ref.String(), s.past[i].written[0].Files[file].Name)
}

// TestTogether: of two checkpoints that share a file its bytes are read once,
// and damage of it is found in both, by the name that it has in each.
func TestTogether(t *testing.T) {
	root := onDisk(t)
	s := shared(t, vfs.Default, root)
	for _, broken := range []bool{false, true} {
		if broken {
			flip(t, vfs.Default, s.path(root, 0, 0), 4096+100)
		}
		together := root.NewTogether()
		reports := make([]data.Report, 2)
		if err := together.Each(t.Context(), 2, func(ctx context.Context, i int) (err error) {
			reports[i], err = root.VerifyWith(ctx, s.past[i].ref, s.past[i].receipt.Manifest, data.VerifyOptions{Together: together})
			return err
		}); err != nil {
			t.Fatal(err)
		}
		bytes, read := reports[0].Bytes+reports[1].Bytes, reports[0].Read+reports[1].Read
		if want := int64(3<<20 + 70 + 1000 + 1000); bytes-read != 3<<20+70 || read != want {
			t.Errorf("%d of %d bytes were read, want %d", read, bytes, want)
		}
		for i, name := range []string{"r00000.safetensors", links(s.past[1], 0)[0]} {
			found := reports[i].Findings
			if broken != (len(found) == 1 && found[0].File == name && found[0].FQN != "" && found[0].Block == 0) {
				t.Errorf("in checkpoint %d: %v", i, found)
			}
		}
	}
}

// TestQuick finds what is wrong with files, and reads no chunk.
func TestQuick(t *testing.T) {
	m := small()
	fs := memory(t)
	root := open(t, fs)
	receipt := m.save(t, root)
	raw := content(t, fs, "r00000.safetensors")
	quick := func() data.Report {
		t.Helper()
		report, err := root.VerifyWith(t.Context(), ref, receipt.Manifest, data.VerifyOptions{Quick: true})
		if err != nil || report.Bytes != 0 || report.Chunks != 0 {
			t.Fatalf("%+v, %v", report, err)
		}
		return report
	}
	broken := slices.Clone(raw)
	broken[len(broken)-1] ^= 1
	put(t, fs, "r00000.safetensors", broken)
	if found := quick().Findings; len(found) != 0 {
		t.Errorf("it reads tensors: %v", found)
	}
	put(t, fs, "r00000.safetensors", raw[:len(raw)-1])
	if found := quick().Findings; len(found) != 1 || found[0].Kind != data.Truncated {
		t.Errorf("cut off: %v", found)
	}
	if err := fs.Remove(pathOf("r00001.idx")); err != nil {
		t.Fatal(err)
	}
	if found := quick().Findings; len(found) != 2 || found[1].Kind != data.Missing {
		t.Errorf("without an index: %v", found)
	}
}

// TestRepair damages a file that two checkpoints share, in each part of it, and
// repairs it from a file with the same bytes; both names stay links to one file.
func TestRepair(t *testing.T) {
	root := onDisk(t)
	s := shared(t, vfs.Default, root)
	first, second := s.path(root, 0, 0), s.path(root, 1, 1)
	whole, err := os.ReadFile(first)
	if err != nil {
		t.Fatal(err)
	}
	for name, hurt := range map[string]func(){
		"a chunk":   func() { flip(t, vfs.Default, first, 4096+2<<20) },
		"both":      func() { flip(t, vfs.Default, first, 4096+5); flip(t, vfs.Default, second, int64(len(whole))-2000) },
		"header":    func() { flip(t, vfs.Default, second, 20) },
		"cut off":   func() { must(t, os.Truncate(first, 4096+1<<20)) },
		"too long":  func() { must(t, os.Truncate(first, int64(len(whole))+9)) },
		"all gone":  func() { must(t, errors.Join(os.Remove(first), os.Remove(second))) },
		"one gone":  func() { must(t, os.Remove(second)) },
		"first one": func() { must(t, os.Remove(first)) },
		"all zero":  func() { must(t, os.Truncate(first, 0)); must(t, os.Truncate(first, int64(len(whole)))) },
	} {
		hurt()
		damaged := s.damaged(t, root)
		if len(damaged) == 0 {
			t.Fatalf("%s: nothing is found", name)
		}
		done, err := root.Repair(t.Context(), damaged, s.targets())
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		// Of the third, smaller tensor only this file has the bytes.
		lost := slices.ContainsFunc(done.Left, func(u data.Unrepaired) bool { return u.FQN != "layers.2.r0" })
		if lost {
			t.Errorf("%s: left are %v", name, done.Left)
		}
		if len(done.Left) > 0 {
			if !strings.Contains(done.Left[0].Reason, "resume from another") {
				t.Errorf("%s: %v", name, done.Left)
			}
			must(t, errors.Join(os.RemoveAll(first), os.RemoveAll(second)))
			must(t, os.WriteFile(first, whole, 0o600))
			must(t, os.Link(first, second))
			continue
		}
		for i := range s.past {
			s.past[i].whole(t, root)
		}
		a, err := os.Stat(first)
		b, err2 := os.Stat(second)
		now, err3 := os.ReadFile(first)
		if err := errors.Join(err, err2, err3); err != nil || !os.SameFile(a, b) || !bytes.Equal(now, whole) {
			t.Errorf("%s: the names are not of one file with the bytes of before: %v", name, err)
		}
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// TestRepairWithoutOrigin repairs what is linked in when the checkpoint that
// wrote it is gone, except its header, which no other file has.
func TestRepairWithoutOrigin(t *testing.T) {
	root := onDisk(t)
	s := shared(t, vfs.Default, root)
	s.remove(t, 0)
	path := s.path(root, 0, 1)
	flip(t, vfs.Default, path, 4096+7)
	done, err := root.Repair(t.Context(), s.damaged(t, root), s.targets())
	if err != nil || len(done.Files) != 1 || len(done.Left) != 0 {
		t.Fatalf("%+v, %v", done, err)
	}
	s.past[0].whole(t, root)
	flip(t, vfs.Default, path, 3)
	done, err = root.Repair(t.Context(), s.damaged(t, root), s.targets())
	if err != nil || len(done.Files) != 0 || len(done.Left) != 1 || !strings.Contains(done.Left[0].Reason, "header is damaged") {
		t.Errorf("%+v, %v", done, err)
	}
}

// slots are sealed staging slots.
type slots map[checkpoint.Digest][]byte

func (s slots) Chunk(_ context.Context, _ checkpoint.Item, digest checkpoint.Digest) ([]byte, string, error) {
	return s[digest], "slot", nil
}

// TestRepairFromSlot takes what no file has from shared memory, and nothing that
// has another digest.
func TestRepairFromSlot(t *testing.T) {
	root := onDisk(t)
	s := newSeries(t, vfs.Default, 1, 1<<20, 5000)
	s.root = root
	s.save(t, "step-1")
	flip(t, vfs.Default, s.path(root, 0, 0), 4096)
	have := slots{}
	done, err := root.Repair(t.Context(), s.damaged(t, root), s.targets(), have)
	if err != nil || len(done.Files) != 0 || len(done.Left) != 1 || done.Left[0].FQN != "layers.0.r0" {
		t.Fatalf("%+v, %v", done, err)
	}
	right := s.now["layers.0.r0"]
	have[checkpoint.Sum(right)] = append(slices.Clone(right[1:]), 0)
	if done, err = root.Repair(t.Context(), s.damaged(t, root), s.targets(), have); err != nil || len(done.Files) != 0 {
		t.Fatalf("other bytes are taken: %+v, %v", done, err)
	}
	have[checkpoint.Sum(right)] = right
	if done, err = root.Repair(t.Context(), s.damaged(t, root), s.targets(), have); err != nil || len(done.Files) != 1 || done.Files[0].Chunks[0].From != "slot" {
		t.Fatalf("%+v, %v", done, err)
	}
	s.past[0].whole(t, root)
	// Damage without a copy has another reason.
	must(t, os.Truncate(filepath.Join(root.Dir(), s.past[0].ref.String(), "r00000.idx"), 3))
	if done, err = root.Repair(t.Context(), s.damaged(t, root), s.targets(), have); err != nil || len(done.Left) != 1 || !strings.Contains(done.Left[0].Reason, "backup") {
		t.Errorf("%+v, %v", done, err)
	}
}

// TestCrashInRepair crashes a repair at every write operation until none is
// left: no checkpoint has more damage than before, and the same call completes the
// repair.
func TestCrashInRepair(t *testing.T) {
	for k, done := 1, false; !done; k++ {
		fs := memory(t)
		s := shared(t, fs, open(t, fs))
		flip(t, fs, s.path(s.root, 0, 0), 4096+9)
		files, before := s.damaged(t, s.root), s.found(t, s.root)
		if len(before) != 2 {
			t.Fatalf("damaged are %v", before)
		}
		flush(t, fs, s)
		var crashed []snapshot
		injected, _ := faulty(fs, k, true, errorfs.ErrInjected, func() { crashed = snapshots(fs, k) })
		if _, err := open(t, injected).Repair(t.Context(), files, s.targets()); err == nil {
			crashed, done = snapshots(fs, k), true
		} else if len(crashed) == 0 {
			t.Fatal(err)
		}
		// A killed process leaves what it did; a clone never lacks a name that
		// was taken away.
		crashed = append(crashed, snapshot{fmt.Sprintf("op %d, killed", k), fs})
		for _, c := range crashed {
			t.Run(c.name, func(t *testing.T) {
				root := open(t, c.fs)
				after := s.found(t, root)
				for ref, found := range after {
					if !slices.Equal(found, before[ref]) { // a file that is gone is worse too
						t.Errorf("%s has %v, and had %v", ref, found, before[ref])
					}
				}
				if done && len(after) > 0 {
					t.Errorf("Repair returned, and left %v", after)
				}
				if _, err := root.Repair(t.Context(), s.damaged(t, root), s.targets()); err != nil {
					t.Fatal(err)
				}
				if left := s.damaged(t, root); len(left) > 0 {
					t.Errorf("left are %v", left)
				}
			})
		}
		if done && k < 6 {
			t.Errorf("a repair has only %d write operations", k)
		}
	}
}

// flush makes the damage durable, as a disk does that has lost a bit.
func flush(t testing.TB, fs vfs.FS, s *series) {
	t.Helper()
	f, err := fs.OpenReadWrite(s.path(s.root, 0, 0), vfs.WriteCategoryUnspecified)
	if err == nil {
		err = errors.Join(f.Sync(), f.Close())
	}
	if err != nil {
		t.Fatal(fmt.Errorf("flush: %w", err))
	}
}
