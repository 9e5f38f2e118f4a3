package data_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/tensor"
	"github.com/cockroachdb/pebble/v2/vfs"
)

var hostile = []checkpoint.Ref{
	{},
	{Run: "r", Trial: "t"},
	{Run: "..", Trial: "t", Checkpoint: "c"},
	{Run: "r", Trial: ".", Checkpoint: "c"},
	{Run: "r", Trial: "t", Checkpoint: "../../etc"},
	{Run: "/r", Trial: "t", Checkpoint: "c"},
	{Run: "r", Trial: "t\x00", Checkpoint: "c"},
	{Run: "r", Trial: "t", Checkpoint: strings.Repeat("c", 256)},
}

func TestHostileRefs(t *testing.T) {
	fs := memory(t)
	root := open(t, fs)
	ctx := t.Context()
	before := fs.String()
	for _, ref := range hostile {
		w, r := root.Writer(ref), root.Reader(ref)
		calls := map[string]func() error{
			"SetUp":            func() error { return w.SetUp(ctx, true) },
			"PrepareLocalPlan": func() error { _, err := w.PrepareLocalPlan(ctx, checkpoint.Local{}); return err },
			"WriteData":        func() error { _, err := w.WriteData(ctx, 0, nil, nil); return err },
			"Finish":           func() error { _, err := w.Finish(ctx, checkpoint.Manifest{}, commit); return err },
			"ReadMetadata":     func() error { _, err := r.ReadMetadata(ctx); return err },
			"SetUp to read":    func() error { return r.SetUp(ctx, checkpoint.Manifest{}, true) },
			"Verify":           func() error { _, err := root.Verify(ctx, ref, checkpoint.Digest{}, nil); return err },
			"Remove":           func() error { return root.Remove(ctx, ref) },
			"RemoveCommitted":  func() error { return root.RemoveCommitted(ctx, ref) },
			"WriteReceipt":     func() error { return root.WriteReceipt(ctx, ref, checkpoint.Receipt{}) },
		}
		for name, call := range calls {
			if call() == nil {
				t.Errorf("%s of %q: no error", name, ref)
			}
		}
	}
	if fs.String() != before {
		t.Errorf("the filesystem changed:\n%s", fs.String())
	}
}

func TestFinish(t *testing.T) {
	m := small()
	fs := memory(t)
	root := open(t, fs)
	w := root.Writer(ref)
	written, err := m.write(t.Context(), root)
	if err != nil {
		t.Fatal(err)
	}
	manifest := m.manifest(written)

	// A decision that was not acknowledged leaves a manifest and no
	// checkpoint.
	refused := errors.New("conflict")
	_, err = w.Finish(t.Context(), manifest, func(context.Context, checkpoint.Digest) (checkpoint.Decision, error) {
		return checkpoint.Decision{}, refused
	})
	if !errors.Is(err, refused) {
		t.Fatalf("error %v", err)
	}
	if receipts, err := listed(t, root); len(receipts) > 0 || err != nil {
		t.Fatalf("a planted manifest is listed: %v, %v", receipts, err)
	}
	if _, err := root.Reader(ref).ReadMetadata(t.Context()); !errors.Is(err, data.ErrNotCommitted) {
		t.Fatalf("a planted manifest is read: %v", err)
	}
	// Repeated, it goes through, and again.
	for range 2 {
		receipt, err := w.Finish(t.Context(), manifest, commit)
		if err != nil || receipt.Ref != ref || receipt.Sequence != decision.Sequence {
			t.Fatalf("receipt %+v, %v", receipt, err)
		}
	}
	receipts, err := listed(t, root)
	if err != nil || len(receipts) != 1 || receipts[0].Step != 100 || receipts[0].Ref != ref {
		t.Fatalf("listed %+v, %v", receipts, err)
	}
	// Another decision about the same directory is refused.
	_, err = w.Finish(t.Context(), manifest, func(context.Context, checkpoint.Digest) (checkpoint.Decision, error) {
		return checkpoint.Decision{Sequence: 43, Event: "other"}, nil
	})
	var unrecorded *data.UnrecordedError
	if !errors.As(err, &unrecorded) || unrecorded.Receipt.Sequence != 43 {
		t.Errorf("another decision: %v", err)
	}
	// A manifest of that name with other bytes is never replaced.
	name := "manifest-" + receipts[0].Manifest.String()
	put(t, fs, name, []byte("other"))
	var corrupt *data.CorruptError
	if _, err := w.Finish(t.Context(), manifest, commit); !errors.As(err, &corrupt) {
		t.Errorf("a manifest with other bytes: %v", err)
	}
}

// TestFinishChecks takes a file away, or cuts it, between write and commit.
func TestFinishChecks(t *testing.T) {
	m := small()
	for _, file := range []string{"r00000.safetensors", "r00000.idx", "r00001.safetensors", "r00001.idx"} {
		for _, remove := range []bool{true, false} {
			fs := memory(t)
			root := open(t, fs)
			written, err := m.write(t.Context(), root)
			if err != nil {
				t.Fatal(err)
			}
			if remove {
				err = fs.Remove(pathOf(file))
			} else {
				put(t, fs, file, content(t, fs, file)[1:])
			}
			if err != nil {
				t.Fatal(err)
			}
			_, err = root.Writer(ref).Finish(t.Context(), m.manifest(written), func(context.Context, checkpoint.Digest) (checkpoint.Decision, error) {
				t.Errorf("%s: the commit was called", file)
				return decision, nil
			})
			if err == nil || !strings.Contains(err.Error(), file) {
				t.Errorf("%s, removed %v: error %v", file, remove, err)
			}
		}
	}
}

// TestSealed repeats writes after the manifest is there: the same bytes give
// the same answer, and no bytes are ever replaced.
func TestSealed(t *testing.T) {
	m := small()
	fs := memory(t)
	root := open(t, fs)
	written, err := m.write(t.Context(), root)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := root.Writer(ref).Finish(t.Context(), m.manifest(written), commit); err != nil {
		t.Fatal(err)
	}
	trace := &traceFS{FS: fs}
	w := open(t, trace).Writer(ref)
	items := m.layout.Items(0)
	again, err := w.WriteData(t.Context(), 0, items, m.source(0))
	if err != nil || again.Index != written[0].Index || again.BytesWritten != written[0].BytesWritten {
		t.Errorf("the same bytes: %+v, %v", again, err)
	}
	zeros := source(func(i int) ([]byte, error) { return make([]byte, items[i].Bytes), nil })
	if _, err := w.WriteData(t.Context(), 0, items, zeros); !errors.Is(err, data.ErrSealed) {
		t.Errorf("other bytes: %v", err)
	}
	if _, err := w.WriteData(t.Context(), 5, items, m.source(0)); !errors.Is(err, data.ErrSealed) {
		t.Errorf("another rank: %v", err)
	}
	if trace.lines.String() != "" {
		t.Errorf("a sealed checkpoint was written to:\n%s", trace.lines.String())
	}
}

func TestReceipts(t *testing.T) {
	m := small()
	fs := memory(t)
	root := open(t, fs)
	if receipts, err := listed(t, root); len(receipts) > 0 || err != nil {
		t.Fatalf("no data directory: %v, %v", receipts, err)
	}
	receipt := m.save(t, root)
	good := content(t, fs, checkpoint.ReceiptFile)
	golden(t, "../checkpoint/testdata/COMMIT.json", good)

	for name, bad := range map[string][]byte{
		"empty": {}, "cut off": good[:len(good)-3], "other step": bytes.Replace(good, []byte(`"step": 100`), []byte(`"step": 900`), 1),
		"other time": bytes.Replace(good, []byte("2026"), []byte("2025"), 1), "not JSON": []byte("hello"),
	} {
		put(t, fs, checkpoint.ReceiptFile, bad)
		receipts, damaged, err := root.Checkpoints(t.Context())
		var corrupt *data.CorruptError
		if err != nil || len(receipts) > 0 || len(damaged) != 1 || damaged[0].Ref != ref || !errors.As(damaged[0].Err, &corrupt) {
			t.Errorf("%s: listed %v, damaged %v, %v", name, receipts, damaged, err)
		}
		if _, err := root.Reader(ref).ReadMetadata(t.Context()); !errors.As(err, &corrupt) {
			t.Errorf("%s: read %v", name, err)
		}
		if err := root.WriteReceipt(t.Context(), ref, receipt); err != nil {
			t.Errorf("%s: repair: %v", name, err)
		}
		if now := content(t, fs, checkpoint.ReceiptFile); !bytes.Equal(now, good) {
			t.Errorf("%s: repaired to\n%s", name, now)
		}
	}
	// A receipt is refused for a manifest that it is not about.
	for name, change := range map[string]func(*checkpoint.Receipt){
		"step":     func(r *checkpoint.Receipt) { r.Step++ },
		"run":      func(r *checkpoint.Receipt) { r.Run = "other" },
		"manifest": func(r *checkpoint.Receipt) { r.Manifest = checkpoint.Sum(nil) },
		"sequence": func(r *checkpoint.Receipt) { r.Sequence++ },
	} {
		wrong := receipt
		change(&wrong)
		if err := root.WriteReceipt(t.Context(), ref, wrong); err == nil {
			t.Errorf("a receipt with another %s was written", name)
		}
	}
}

func TestRemove(t *testing.T) {
	root := open(t, memory(t))
	if err := root.RemoveCommitted(t.Context(), ref); err != nil {
		t.Fatalf("nothing there: %v", err)
	}
	small().save(t, root)
	for range 2 {
		if err := root.RemoveCommitted(t.Context(), ref); err != nil {
			t.Fatal(err)
		}
	}
	if receipts, err := listed(t, root); len(receipts) > 0 || err != nil {
		t.Errorf("listed %v, %v", receipts, err)
	}
}

// TestRemoveTogether removes a checkpoint during its removal, at each step of it: neither
// fails because of files that are gone already.
func TestRemoveTogether(t *testing.T) {
	m := tiny()
	for k, done := 1, false; !done; k++ {
		fs := memory(t)
		m.save(t, open(t, fs))
		injected, n := faulty(fs, k, false, nil, func() {
			if err := open(t, fs).RemoveCommitted(t.Context(), ref); err != nil {
				t.Errorf("step %d: the other: %v", k, err)
			}
		})
		if err := open(t, injected).RemoveCommitted(t.Context(), ref); err != nil {
			t.Errorf("step %d: %v", k, err)
		}
		if names, err := fs.List("store/data/run/t0"); err != nil || len(names) > 0 {
			t.Errorf("step %d: left %v, %v", k, names, err)
		}
		done = *n < k
	}
}

// TestNoSpace refuses a save that would not fit, before anything is written.
func TestNoSpace(t *testing.T) {
	m := newModel()
	m.full(0, "w", tensor.Uint8, 1<<20)
	m.full(1, "v", tensor.Uint8, 1<<20)
	fs := memory(t)
	root := open(t, fs)
	if _, err := root.Free(t.Context()); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("free: %v", err)
	}
	w := root.Writer(ref)
	if err := w.SetUp(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	fs.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: 1 << 20, TotalBytes: 1 << 40})
	if free, err := root.Free(t.Context()); free != 1<<20 || err != nil {
		t.Errorf("free: %d, %v", free, err)
	}
	// A save that would fit, but leave less than must stay free, is refused too.
	fs.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: 3 << 20, TotalBytes: 1 << 40})
	root.KeepFree(func(data.Usage) int64 { return 2 << 20 })
	if _, err := w.WriteData(t.Context(), 0, m.layout.Items(0), m.source(0)); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("with 3 MiB free and 2 MiB to keep: %v", err)
	}
	root.KeepFree(func(data.Usage) int64 { return 0 })
	fs.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: 1 << 20, TotalBytes: 1 << 40})
	before := fs.String()
	var full *data.NoSpaceError
	_, err := w.WriteData(t.Context(), 0, m.layout.Items(0), m.source(0))
	if !errors.As(err, &full) || !errors.Is(err, syscall.ENOSPC) || full.Need <= 1<<20 || full.Free != 1<<20 {
		t.Errorf("error %v", err)
	}
	if fs.String() != before {
		t.Errorf("something was written:\n%s", fs.String())
	}
	// Two ranks at once do not both count on the same space: while rank 0
	// waits for its bytes, rank 1 finds too little.
	fs.TestingSetDiskUsage(vfs.DiskUsage{AvailBytes: 2 << 20, TotalBytes: 1 << 40})
	_, err = w.WriteData(t.Context(), 0, m.layout.Items(0), source(func(i int) ([]byte, error) {
		if _, err := w.WriteData(t.Context(), 1, m.layout.Items(1), m.source(1)); !errors.As(err, &full) || full.Pending <= 1<<20 {
			t.Errorf("the second rank: %v", err)
		}
		return m.source(0).Item(i)
	}))
	if err != nil {
		t.Fatal(err)
	}
	// The claim was given back.
	if _, err := w.WriteData(t.Context(), 1, m.layout.Items(1), m.source(1)); err != nil {
		t.Error(err)
	}
}

func TestFreeOnDisk(t *testing.T) {
	dir := t.TempDir()
	root, err := data.Open(vfs.Default, dir+"/not/yet")
	if err != nil {
		t.Fatal(err)
	}
	if free, err := root.Free(t.Context()); free == 0 || err != nil {
		t.Errorf("free %d, %v", free, err)
	}
	if _, err := os.Stat(dir + "/not"); err == nil {
		t.Error("Open made a directory")
	}
	if _, err := data.Open(nil, ""); err == nil {
		t.Error("opened nothing")
	}
}
