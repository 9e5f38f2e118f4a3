package demo

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/tensor"
)

func (d *demo) metrics(ctx context.Context, run string) ([]projections.Report, error) {
	return query.Ask(ctx, d.store.Views(), query.Reports, query.Params{Run: run, Trial: projections.DefaultTrial})
}

// accuracy returns the last accuracy that the run reported.
func (d *demo) accuracy(ctx context.Context, run string) (float64, error) {
	reports, err := d.metrics(ctx, run)
	if err != nil {
		return 0, err
	}
	for _, r := range slices.Backward(reports) {
		if a, ok := r.Metrics[metricAccuracy].(float64); ok {
			return a, nil
		}
	}
	return 0, fmt.Errorf("run %q has reported no accuracy", run)
}

// states returns the digest of the full tensors at each saved step, as the ranks had
// them in memory.
func (d *demo) states(ctx context.Context, run string) (map[int64]string, error) {
	reports, err := d.metrics(ctx, run)
	states := map[int64]string{}
	for _, r := range reports {
		if s, ok := r.Metrics[metricState].(string); ok {
			states[r.Step] = s
		}
	}
	return states, err
}

// sameEnd compares the interrupted run with the reference: the states in
// memory at every saved step, and the bytes of every tensor and every rank's
// random state in the last checkpoint's files.
func (d *demo) sameEnd(ctx context.Context, o workerOptions) (bool, error) {
	want, err := d.states(ctx, reference)
	if err != nil {
		return false, err
	}
	got, err := d.states(ctx, killed)
	if err != nil {
		return false, err
	}
	name := planner.DefaultName(o.steps)
	a, err := d.contents(ctx, reference+"@"+name)
	if err != nil {
		return false, err
	}
	b, err := d.contents(ctx, killed+"@"+name)
	if err != nil {
		return false, err
	}
	return len(want) == int(o.steps/o.saveEvery) && maps.Equal(want, got) && len(a) > 0 && maps.Equal(a, b), nil
}

// restoredEqual compares the memory of the last job's ranks after the load with the
// memory at the save that they loaded.
func (d *demo) restoredEqual(ctx context.Context, world int) (bool, error) {
	trial, err := query.Ask(ctx, d.store.Views(), query.Trial, query.Params{Run: killed, Trial: projections.DefaultTrial})
	if err != nil {
		return false, err
	}
	if trial.WorldSize != world {
		return false, fmt.Errorf("the last attempt had %d ranks, not %d", trial.WorldSize, world)
	}
	saved, err := d.states(ctx, killed)
	if err != nil {
		return false, err
	}
	reports, err := d.metrics(ctx, killed)
	if err != nil {
		return false, err
	}
	for _, r := range reports {
		restored, ok := r.Metrics[metricRestored].(string)
		if !ok || r.Attempt != trial.Attempt {
			continue
		}
		from, err := query.Ask(ctx, d.store.Views(), query.Resolve, query.Params{Ref: killed + "@" + fmt.Sprint(r.Metrics[metricFrom])})
		if err != nil {
			return false, err
		}
		if from.WorldSize == world {
			return false, fmt.Errorf("checkpoint %s was saved by %d ranks too: nothing was resharded", from.ID, world)
		}
		return restored == saved[from.Step], nil
	}
	return false, fmt.Errorf("no rank of attempt %d has reported what it restored", trial.Attempt)
}

// contents returns the digest of every tensor and value of a checkpoint, read from its
// files as one rank would.
func (d *demo) contents(ctx context.Context, ref string) (map[string]checkpoint.Digest, error) {
	c, err := query.Ask(ctx, d.store.Views(), query.Resolve, query.Params{Ref: ref})
	if err != nil {
		return nil, err
	}
	r := d.store.Data.Reader(store.RefOf(c))
	m, err := r.ReadMetadata(ctx)
	if err != nil {
		return nil, err
	}
	if err := r.SetUp(ctx, m, true); err != nil {
		return nil, err
	}
	var wants []checkpoint.Want
	for _, t := range m.Layout.Tensors {
		wants = append(wants, checkpoint.Want{Shard: tensor.Shard{FQN: t.FQN, DType: t.DType, Global: t.Shape, Box: t.Shape.Full()}})
	}
	for _, v := range m.Layout.Values {
		wants = append(wants, checkpoint.Want{Value: true, Shard: tensor.Shard{FQN: v.FQN}, Rank: v.Rank})
	}
	loader := planner.NewLoader(m.Layout)
	reads, err := loader.Load(wants)
	if err != nil {
		return nil, err
	}
	buffers := make(buffers, len(wants))
	for i, w := range wants {
		buffers[i] = make([]byte, loader.Size(w))
	}
	if _, err := r.ReadData(ctx, wants, reads, buffers); err != nil {
		return nil, err
	}
	digests := map[string]checkpoint.Digest{}
	for i, w := range wants {
		digests[fmt.Sprintf("%s %v %v %d", w.Shard.FQN, w.Shard.DType, w.Shard.Global, w.Rank)] = checkpoint.Sum(buffers[i])
	}
	return digests, nil
}

type buffers [][]byte

var _ data.Destination = buffers(nil)

// Want implements data.Destination.
func (b buffers) Want(i int) []byte { return b[i] }

// rebuild deletes the views and compares their digest with that of views rebuilt from
// the log.
func (d *demo) rebuild(ctx context.Context) (bool, error) {
	before, err := query.Ask(ctx, d.store.Views(), query.Digest, query.Params{})
	if err != nil {
		return false, err
	}
	if err := d.store.Close(); err != nil {
		return false, err
	}
	d.store = nil
	if err := os.RemoveAll(filepath.Join(d.storeDir(), "views")); err != nil {
		return false, err
	}
	if err := d.open(ctx); err != nil {
		return false, err
	}
	after, err := query.Ask(ctx, d.store.Views(), query.Digest, query.Params{})
	return err == nil && before == after, err
}

// flip flips one bit of the newest checkpoint's data, verifies, and flips it back. It
// reports whether verify found exactly that damage, and nothing before.
func (d *demo) flip(ctx context.Context) (found bool, err error) {
	c, err := query.Ask(ctx, d.store.Views(), query.Resolve, query.Params{Ref: killed + "@latest"})
	if err != nil {
		return false, err
	}
	manifest, err := checkpoint.ParseDigest(c.Manifest)
	if err != nil {
		return false, err
	}
	ref := store.RefOf(c)
	clean, err := d.store.Data.Verify(ctx, ref, manifest, nil)
	if err != nil {
		return false, err
	}
	const file = "r00001.safetensors"
	if err := d.flipBit(ctx, ref, file); err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, d.flipBit(context.WithoutCancel(ctx), ref, file)) }()
	report, err := d.store.Data.Verify(ctx, ref, manifest, nil)
	if err != nil {
		return false, err
	}
	for _, f := range report.Findings {
		d.out.note("    verify: %s", f)
		found = f.File == file && f.FQN != "" && f.Block >= 0
	}
	return found && len(report.Findings) == 1 && clean.Clean(), nil
}

// flipFromEnd is how far before the end of its file the flipped bit is: within a tensor.
const flipFromEnd = 100

// flipBit flips one bit of a file of a checkpoint: in place, or, as an object cannot be written to,
// by an object that replaces it.
func (d *demo) flipBit(ctx context.Context, ref checkpoint.Ref, file string) error {
	if d.bucket == nil {
		return flipFile(filepath.Join(d.store.Data.Dir(), ref.Run, ref.Trial, ref.Checkpoint, file))
	}
	ctx, cancel := context.WithTimeout(ctx, flipLimit)
	defer cancel()
	objects, name := d.bucket.Data(), path.Join(ref.Run, ref.Trial, ref.Checkpoint, file)
	bytes, err := objects.Get(ctx, name, flipMost)
	if err != nil {
		return err
	}
	bytes[len(bytes)-flipFromEnd] ^= flipped
	u, err := objects.Create(ctx, name, int64(len(bytes)), object.Replace)
	if err != nil {
		return err
	}
	defer u.Abort()
	if _, err := u.WriteAt(bytes, 0); err != nil {
		return err
	}
	return u.Commit(ctx)
}

const (
	flipped   = 1 << 3 // the bit
	flipMost  = 1 << 20
	flipLimit = time.Minute
)

func flipFile(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	var b [1]byte
	info, err := f.Stat()
	if err == nil {
		at := info.Size() - flipFromEnd
		if _, err = f.ReadAt(b[:], at); err == nil {
			b[0] ^= flipped
			_, err = f.WriteAt(b[:], at)
		}
	}
	return errors.Join(err, f.Close())
}
