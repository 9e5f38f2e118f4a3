package store

import (
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/object/objecttest"
	"github.com/ckptstore/ckptstore/internal/query"
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
func left(out Collection, id string) string {
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
	write, commit = largeSave(t, s, 3, refNameOf(row))
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
	dry, err := s.Collect(t.Context(), CollectOptions{Policy: policy(t, "last=1")})
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
	if write, _ = largeSave(t, s, 5, refNameOf(row)); write(base).BytesReused != 0 {
		t.Error("it reuses what is gone")
	}
	if out = collect(t, s, "last=1"); went(out) != "" {
		t.Errorf("it did %s", went(out))
	}
}
