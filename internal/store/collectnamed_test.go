package store

import (
	"context"
	"errors"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/objecttest"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/refs"
	"github.com/ckptstore/ckptstore/internal/store/collection"
)

// inBucket opens a store whose files are in a bucket, which has no links.
func inBucket(t *testing.T) (*Store, *objecttest.Bucket) {
	t.Helper()
	s, b := open(t, made(t)), objecttest.NewBucket()
	s.Data = data.OpenBackend(b, vfs.Default)
	s.Data.OfStore(s.ID)
	return s, b
}

// objects lists the names in the directory of a checkpoint.
func objects(t *testing.T, b *objecttest.Bucket, id string) string {
	t.Helper()
	entries, err := b.List(t.Context(), refOf("run", id).String())
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name)
	}
	slices.Sort(names)
	return strings.Join(names, " ")
}

// left returns why files of a checkpoint stay after a collection.
func left(out collection.Collection, id string) string {
	for _, c := range out.Checkpoints {
		if c.ID == id {
			return c.Left
		}
	}
	return "it is not in the collection"
}

// TestCollectNamed deletes checkpoints whose files others name: those files stay while an open
// save may name them, and while a checkpoint names them, and go with the last of these.
func TestCollectNamed(t *testing.T) {
	t.Parallel()
	s, b := inBucket(t)
	write, commit := largeSave(t, s, 1)
	write()
	commit()
	row := ask(t, s, query.Resolve, query.Params{Ref: "run@step-1.a1"})
	digest, err := checkpoint.ParseDigest(row.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	base := data.Base{Ref: RefOf(row), Manifest: digest}
	committed(t, s, "run", 2)
	write, commit = largeSave(t, s, 3, refs.Ref{Run: row.Run, Trial: row.Trial, Checkpoint: row.ID})
	before := objects(t, b, "step-1.a1")
	out := collect(t, s, "last=1")
	if went(out) != "delete step-1.a1" || !strings.Contains(left(out, "step-1.a1"), "open save") || objects(t, b, "step-1.a1") != before {
		t.Errorf("with an open save it did %s: %s; left are %s", went(out), left(out, "step-1.a1"), objects(t, b, "step-1.a1"))
	}
	if got := write(base); got.BytesWritten != 0 || got.BytesReused != data.MinReuse {
		t.Errorf("wrote %+v", got)
	}
	commit()
	const kept = "kept for 1 later checkpoint"
	dry, err := s.Collect(t.Context(), collection.Options{Policy: policy(t, "last=1")})
	if err != nil || left(dry, "step-1.a1") != kept || left(dry, "step-3.a1") != "" {
		t.Errorf("a dry run: %+v, %v", dry.Checkpoints, err)
	}
	for range 2 {
		out = collect(t, s, "last=1")
		if left(out, "step-1.a1") != kept || objects(t, b, "step-1.a1") != checkpoint.DataFile(0) {
			t.Errorf("it did %s: %s; left are %s", went(out), left(out, "step-1.a1"), objects(t, b, "step-1.a1"))
		}
	}
	if list := visible(t, s, "run"); list != "step-3.a1" {
		t.Errorf("left are %s", list)
	}
	committed(t, s, "run", 4)
	out = collect(t, s, "last=1")
	if went(out) != "delete step-3.a1, sweep step-1.a1" || out.Freed < data.MinReuse || objects(t, b, "step-1.a1")+objects(t, b, "step-3.a1") != "" {
		t.Errorf("it did %s and freed %d; left are %s %s", went(out), out.Freed, objects(t, b, "step-1.a1"), objects(t, b, "step-3.a1"))
	}
	// A save whose base was deleted before its begin does not hold it.
	if write, _ = largeSave(t, s, 5, refs.Ref{Run: row.Run, Trial: row.Trial, Checkpoint: row.ID}); write(base).BytesReused != 0 {
		t.Error("it reuses what is gone")
	}
	if out = collect(t, s, "last=1"); went(out) != "" {
		t.Errorf("it did %s", went(out))
	}
}

// locking is a bucket that locks the data of checkpoints.
type locking struct {
	*objecttest.Bucket
	err   object.LockedError
	tried int
}

func (l *locking) Remove(ctx context.Context, names ...string) error {
	free := slices.DeleteFunc(slices.Clone(names), func(name string) bool { return checkpoint.HoldsData(path.Base(name)) })
	if err := l.Bucket.Remove(ctx, free...); err != nil || len(free) == len(names) {
		return err
	}
	l.tried++
	return &l.err
}

// TestCollectLocked deletes a checkpoint whose data is locked: the rest is removed and counted, and
// the data is removed after the lock has ended. A process does not try before, except for a legal
// hold, which may end at any time.
func TestCollectLocked(t *testing.T) {
	t.Parallel()
	s := open(t, made(t))
	b := &locking{Bucket: objecttest.NewBucket(), err: object.LockedError{Versions: 1, Bytes: data.MinReuse, Until: time.Now().Add(time.Hour)}}
	s.Data = data.OpenBackend(b, vfs.Default)
	s.Data.OfStore(s.ID)
	write, commit := largeSave(t, s, 1)
	write()
	commit()
	committed(t, s, "run", 2)
	out := collect(t, s, "last=1")
	if went(out) != "delete step-1.a1" || left(out, "step-1.a1") != b.err.Error() || out.Freed <= 0 || out.Freed >= data.MinReuse || objects(t, b.Bucket, "step-1.a1") != checkpoint.DataFile(0) {
		t.Errorf("it did %s: %s, and freed %d; left are %s", went(out), left(out, "step-1.a1"), out.Freed, objects(t, b.Bucket, "step-1.a1"))
	}
	if out = collect(t, s, "last=1"); went(out) != "" || b.tried != 1 {
		t.Errorf("before the lock has ended it did %s, after %d tries", went(out), b.tried)
	}
	dry, err := s.Collect(t.Context(), collection.Options{Policy: policy(t, "last=1")})
	if err != nil || went(dry) != "sweep step-1.a1" {
		t.Errorf("a dry run: %s, %v", went(dry), err)
	}
	s.collected = collection.Memory{} // as if the lock had ended
	b.err = object.LockedError{Versions: 1, Hold: true, Until: time.Now().Add(time.Hour)}
	for range 2 {
		if out = collect(t, s, "last=1"); went(out) != "sweep step-1.a1" || left(out, "step-1.a1") != b.err.Error() {
			t.Errorf("under a hold it did %s: %s", went(out), left(out, "step-1.a1"))
		}
	}
	b.err = object.LockedError{Versions: 1, Refused: errors.New("denied")}
	for range 2 {
		if out = collect(t, s, "last=1"); went(out) != "sweep step-1.a1" || left(out, "step-1.a1") != "the server refuses the removal: denied" {
			t.Errorf("without a permission it did %s: %s", went(out), left(out, "step-1.a1"))
		}
	}
	s.Data = data.OpenBackend(b.Bucket, vfs.Default)
	s.Data.OfStore(s.ID)
	if out = collect(t, s, "last=1"); went(out) != "sweep step-1.a1" || left(out, "step-1.a1") != "" || out.Freed < data.MinReuse {
		t.Errorf("after the hold it did %s: %s, and freed %d", went(out), left(out, "step-1.a1"), out.Freed)
	}
}

// refusing is a bucket that keeps what is removed as versions, once a permission is gone.
type refusing struct {
	*objecttest.Bucket
	left  int // collections until then
	asked int
}

func (r *refusing) ListAll(ctx context.Context, dir string) ([]object.Entry, error) {
	return r.List(ctx, dir)
}

func (r *refusing) Hide(ctx context.Context, names ...string) error { return r.Remove(ctx, names...) }
func (r *refusing) Locked(context.Context, ...string) error         { return nil }
func (r *refusing) Refresh()                                        { r.asked++ }

func (r *refusing) Unfreed(context.Context) (why, err error) {
	if r.asked > r.left {
		why = errors.New("denied")
	}
	return why, nil
}

// TestCollectUnfreed asks a bucket in each collection whether it frees what is removed, and counts
// what it does not.
func TestCollectUnfreed(t *testing.T) {
	t.Parallel()
	s := open(t, made(t))
	b := &refusing{Bucket: objecttest.NewBucket(), left: 1}
	s.Data = data.OpenBackend(b, vfs.Default)
	s.Data.OfStore(s.ID)
	for n := int64(1); n <= 3; n++ {
		write, commit := largeSave(t, s, n)
		write()
		commit()
	}
	out, err := s.Collect(t.Context(), collection.Options{Policy: policy(t, "last=2"), Apply: true})
	if err != nil || out.Freed < data.MinReuse || out.Waits != 0 {
		t.Errorf("freed %d, %d of it later, %v", out.Freed, out.Waits, err)
	}
	if out, err = s.Collect(t.Context(), collection.Options{Policy: policy(t, "last=1"), Apply: true}); err != nil || out.Freed < data.MinReuse || out.Waits != out.Freed {
		t.Errorf("then freed %d, %d of it later, %v", out.Freed, out.Waits, err)
	}
}
