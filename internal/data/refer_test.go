package data_test

import (
	"bytes"
	"context"
	"errors"
	"path"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/objecttest"
)

// weighing is a bucket that counts the bytes of uploads.
type weighing struct {
	*objecttest.Bucket
	bytes atomic.Int64
}

func (w *weighing) Create(ctx context.Context, name string, size int64, mode object.Mode) (object.Upload, error) {
	w.bytes.Add(size)
	return w.Bucket.Create(ctx, name, size, mode)
}

// inBucket is a series in a bucket.
func inBucket(t *testing.T, ranks int, sizes ...int64) (*series, *weighing) {
	s := newSeries(t, memory(t), ranks, sizes...)
	b := &weighing{Bucket: objecttest.NewBucket()}
	s.root = data.OpenBackend(b, vfs.NewMem())
	s.root.OfStore("store-1")
	return s, b
}

// froms returns the files of a rank that lie in other checkpoints.
func froms(c saved, rank int) (from []checkpoint.File) {
	for _, f := range c.written[rank].Files {
		if f.From != (checkpoint.Ref{}) {
			from = append(from, f)
		}
	}
	return from
}

// TestRefer saves again what changed by a tenth, and then what did not change: each
// checkpoint names the objects where they were written first.
func TestRefer(t *testing.T) {
	s, b := inBucket(t, 2, slices.Repeat([]int64{mib}, 10)...)
	first := s.save(t, "first")
	all := b.bytes.Swap(0)
	s.change("layers.0.r0", 0, 1)
	s.change("layers.7.r1", 0, 1)
	second := s.save(t, "second")
	if more := b.bytes.Swap(0); 100*more > 11*all {
		t.Errorf("%d bytes of %d were written again", more, all)
	}
	third := s.save(t, "third")
	if more := b.bytes.Load(); 100*more > all {
		t.Errorf("%d bytes of %d were written although nothing changed", more, all)
	}
	for rank := range 2 {
		if from := froms(second, rank); len(from) != 1 || from[0].From != first.ref || from[0].Name != checkpoint.DataFile(rank) {
			t.Errorf("the second checkpoint names %+v", from)
		}
		from := froms(third, rank)
		if len(from) != 2 || !slices.ContainsFunc(from, func(f checkpoint.File) bool { return f.From == first.ref }) ||
			!slices.ContainsFunc(from, func(f checkpoint.File) bool { return f.From == second.ref }) {
			t.Errorf("the third checkpoint names %+v", from)
		}
	}
	for _, c := range s.past {
		c.whole(t, s.root)
	}
	reader := s.root.Reader(third.ref)
	if err := reader.SetUp(t.Context(), third.m, true); err != nil {
		t.Fatal(err)
	}
	if named, err := reader.Named(t.Context()); err != nil || !slices.Equal(named[0], froms(third, 0)) || !slices.Equal(named[1], froms(third, 1)) {
		t.Errorf("it names %+v, %v", named, err)
	}
	for _, x := range [][2]saved{{first, second}, {second, third}} {
		if err := s.root.RemoveExcept(t.Context(), x[0].ref, checkpoint.HoldsData); err != nil {
			t.Fatal(err)
		}
	}
	third.whole(t, s.root)
	// A copy holds the bytes themselves.
	to := open(t, memory(t))
	if _, err := s.root.CopyTo(t.Context(), third.ref, third.receipt.Manifest, to, nil); err != nil {
		t.Fatal(err)
	}
	if got, err := third.load(t.Context(), to); err != nil || !bytes.Equal(got["layers.0.r0"], third.bytes["layers.0.r0"]) {
		t.Errorf("the copy: %v", err)
	}
}

// TestReferHalf writes chunks again of whose file less than half is used.
func TestReferHalf(t *testing.T) {
	s, _ := inBucket(t, 1, mib, mib, mib)
	s.save(t, "first")
	s.change("layers.0.r0", 0, 1)
	s.change("layers.1.r0", 0, 1)
	c := s.save(t, "second")
	if w, r := c.bytesOf(); w != 3*mib+1000 || r != 0 || len(s.told) > 0 {
		t.Errorf("%d bytes written, %d reused, told %v", w, r, s.told)
	}
	c.whole(t, s.root)
}

// TestReferDamaged verifies a checkpoint whose object in another is gone, cut or changed: the
// finding names the other. Repair then writes the object again where it lies.
func TestReferDamaged(t *testing.T) {
	name := checkpoint.DataFile(0)
	for kind, damage := range map[data.Kind]func(old []byte) []byte{
		data.Missing:   func([]byte) []byte { return nil },
		data.Truncated: func(old []byte) []byte { return old[:len(old)-mib/2] },
		data.Corrupt: func(old []byte) []byte {
			changed := slices.Clone(old)
			changed[len(changed)/2] ^= 1
			return changed
		},
	} {
		s, b := inBucket(t, 1, mib, mib)
		first := s.save(t, "first")
		second := s.save(t, "second")
		lies := first.ref.String() + "/" + name
		old, err := b.Get(t.Context(), lies, 1<<30)
		if err != nil {
			t.Fatal(err)
		}
		if err := b.Remove(t.Context(), lies); err != nil {
			t.Fatal(err)
		}
		if now := damage(old); now != nil {
			store(t, b, lies, now)
		}
		report, err := s.root.Verify(t.Context(), second.ref, second.receipt.Manifest, nil)
		if err != nil || report.Clean() || report.Findings[0].Kind != kind || report.Findings[0].File != lies {
			t.Errorf("%s: found %v, %v", kind, report.Findings, err)
		}
		if err := s.root.Reader(second.ref).SetUp(t.Context(), second.m, true); err != nil {
			t.Fatal(err)
		}
		if _, err := second.load(t.Context(), s.root); err == nil || !strings.Contains(err.Error(), lies) {
			t.Errorf("%s: loaded with %v", kind, err)
		}
		if kind != data.Corrupt {
			if _, err := s.root.Writer(second.ref).Finish(t.Context(), second.m, commit); err == nil || !strings.Contains(err.Error(), lies) {
				t.Errorf("%s: committed again with %v", kind, err)
			}
		}
		all := []data.Target{{Ref: first.ref, Manifest: first.receipt.Manifest}, {Ref: second.ref, Manifest: second.receipt.Manifest}}
		bytesOf := chunkSource(s.now)
		done, err := s.root.Repair(t.Context(), map[checkpoint.Ref][]string{second.ref: {lies}}, all, bytesOf)
		if err != nil || len(done.Files) != 1 || done.Files[0].Ref != first.ref || len(done.Left) > 0 {
			t.Errorf("%s: repaired %+v, %v", kind, done, err)
		}
		second.whole(t, s.root)
	}
}

// chunkSource has the bytes of tensors by their digest.
type chunkSource map[string][]byte

func (c chunkSource) Chunk(_ context.Context, _ checkpoint.Item, digest checkpoint.Digest) ([]byte, string, error) {
	for fqn, b := range c {
		if checkpoint.Sum(b) == digest {
			return b, fqn, nil
		}
	}
	return nil, "", nil
}

// store puts an object into a bucket.
func store(t *testing.T, b object.Backend, name string, bytes []byte) {
	t.Helper()
	u, err := b.Create(t.Context(), name, int64(len(bytes)), object.Replace)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := u.WriteAt(bytes, 0); err != nil {
		t.Fatal(err)
	}
	if err := u.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// keeping is a bucket with old versions of files that have no name any more.
type keeping struct {
	*objecttest.Bucket
	old     map[string]int64 // sizes of the versions
	locked  string           // a file that cannot be removed
	shows   func()           // another client makes it visible again meanwhile
	removed []string
	hidden  []string
}

func (k *keeping) ListAll(ctx context.Context, dir string) ([]object.Entry, error) {
	entries, err := k.Bucket.List(ctx, dir)
	for name, size := range k.old {
		rest, below := strings.CutPrefix(name, dir+"/")
		if sub, _, deep := strings.Cut(rest, "/"); below && deep {
			entries = append(entries, object.Entry{Name: sub, Info: &object.Info{Dir: true}})
		} else if below {
			entries = append(entries, object.Entry{Name: rest, Info: &object.Info{Size: size}})
		}
	}
	return entries, err
}

func (k *keeping) Remove(ctx context.Context, names ...string) error {
	k.removed = append(k.removed, names...)
	if i := slices.Index(names, k.locked); i >= 0 {
		err := k.Bucket.Remove(ctx, slices.Delete(slices.Clone(names), i, i+1)...)
		if k.shows != nil {
			k.shows()
		}
		return errors.Join(err, k.Locked(ctx, k.locked))
	}
	return k.Bucket.Remove(ctx, names...)
}

func (k *keeping) Hide(ctx context.Context, names ...string) error {
	k.hidden = append(k.hidden, names...)
	return k.Bucket.Remove(ctx, names...)
}

func (k *keeping) Locked(_ context.Context, names ...string) error {
	if slices.Contains(names, k.locked) {
		return &object.LockedError{Versions: 1, Bytes: 10, Hold: true}
	}
	return nil
}

func (k *keeping) Unfreed(context.Context) (why, err error) { return nil, nil }

func (k *keeping) Refresh() {}

// TestRemoveOldVersions removes a checkpoint with an old version without a name in its bucket,
// and whose receipt is locked: both are tried, and the receipt loses its name.
func TestRemoveOldVersions(t *testing.T) {
	s, b := inBucket(t, 1, mib)
	c := s.save(t, "first")
	dir := path.Join(c.ref.Run, c.ref.Trial, c.ref.Checkpoint)
	receipt := path.Join(dir, checkpoint.ReceiptFile)
	gone := path.Join(c.ref.Run, c.ref.Trial, "gone")
	k := &keeping{Bucket: b.Bucket, old: map[string]int64{dir + "/old": 20, gone + "/old": 1}, locked: receipt}
	root := data.OpenBackend(k, vfs.NewMem())
	root.OfStore("store-1")
	dirs, err := root.Directories(t.Context(), checkpoint.Ref{Run: c.ref.Run, Trial: c.ref.Trial})
	if err != nil || !dirs["gone"] || !dirs[c.ref.Checkpoint] {
		t.Errorf("directories are %v, %v", dirs, err)
	}
	named, err := root.Bytes(t.Context(), c.ref, nil)
	if err != nil {
		t.Fatal(err)
	}
	if bytes, held, err := root.Frees(t.Context(), c.ref, nil, true); err != nil || bytes != named+20-10 || held == nil {
		t.Errorf("frees %d of %d, %v, %v", bytes, named, held, err)
	}
	var held *object.LockedError
	if err := root.RemoveCommitted(t.Context(), c.ref); !errors.As(err, &held) || held.Bytes != 10 {
		t.Errorf("the removal: %v", err)
	}
	if !slices.Contains(k.removed, dir+"/old") || !slices.Equal(k.hidden, []string{receipt}) || k.removed[0] != receipt {
		t.Errorf("removed %q, hidden %q", k.removed, k.hidden)
	}
	// The next removal finds the receipt among the old versions. It gets no second marker.
	k.old[receipt] = 10
	k.removed, k.hidden = nil, nil
	if err := root.RemoveCommitted(t.Context(), c.ref); !errors.As(err, &held) || held.Bytes != 10 || k.removed[0] != receipt || len(k.hidden) > 0 {
		t.Errorf("again: %v; removed %q, hidden %q", err, k.removed, k.hidden)
	}
	k.shows = func() { store(t, b.Bucket, receipt, []byte("{}")) }
	if err := root.RemoveCommitted(t.Context(), c.ref); !errors.As(err, &held) || !slices.Equal(k.hidden, []string{receipt}) {
		t.Errorf("a receipt that is shown again: %v; hidden %q", err, k.hidden)
	}
	if bytes, err := root.Bytes(t.Context(), c.ref, nil); err != nil || bytes != -1 {
		t.Errorf("left are %d bytes, %v", bytes, err)
	}
}
