package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/projections"
)

// copyWidth is how many checkpoints are copied at a time. Syncs of files that are
// small take longer than writing them, and go well together.
const copyWidth = 8

// checkpointCopier copies checkpoints and holds each copy to be whole.
type checkpointCopier struct {
	from   string     // directory of the data that is read
	data   *data.Root // of the copies
	copier *copier
	total  atomic.Int64 // bytes that are expected

	mu      sync.Mutex
	lacking map[checkpoint.Ref]Incomplete
	outside map[checkpoint.Ref]OutsideFiles
}

// progress adds up what is told.
func (f *checkpointCopier) progress(say func(done, total int64)) func(int64) {
	if say == nil {
		return nil
	}
	var mu sync.Mutex
	done := int64(0)
	return func(n int64) {
		mu.Lock()
		defer mu.Unlock()
		done += n
		say(done, max(done, f.total.Load()))
	}
}

// each copies checkpoints. receipt writes that of a copy that has none.
func (f *checkpointCopier) each(ctx context.Context, rows []projections.Checkpoint, receipt func(context.Context, projections.Checkpoint) error) error {
	g, within := errgroup.WithContext(ctx)
	g.SetLimit(copyWidth)
	for _, c := range rows {
		if within.Err() != nil {
			break
		}
		g.Go(func() error { return f.one(within, c, receipt) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	return ctx.Err()
}

func (f *checkpointCopier) one(ctx context.Context, c projections.Checkpoint, receipt func(context.Context, projections.Checkpoint) error) error {
	ref := RefOf(c)
	name := c.Run + "@" + c.ID
	digest, err := checkpoint.ParseDigest(c.Manifest)
	if err != nil {
		return fmt.Errorf("checkpoint %s: %w", name, err)
	}
	to := filepath.Join(f.data.Dir(), ref.String())
	err = f.copier.checkpoint(ctx, filepath.Join(f.from, ref.String()), to)
	if errors.Is(err, errVanished) {
		f.lacks(ref, name, err.Error())
		return nil
	}
	if err != nil {
		return fmt.Errorf("checkpoint %s: %w", name, err)
	}
	if receipt != nil && !exists(filepath.Join(to, checkpoint.ReceiptFile)) {
		if err := receipt(ctx, c); err != nil && ctx.Err() == nil {
			f.lacks(ref, name, err.Error())
			return nil
		}
	}
	report, err := f.data.VerifyWith(ctx, ref, digest, data.VerifyOptions{Quick: true})
	if err != nil {
		return err
	}
	if !report.Clean() {
		f.lacks(ref, name, report.Findings[0].String())
		return nil
	}
	files, err := f.data.AdoptedBy(ctx, ref)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.lacking, ref)
	if len(files) > 0 {
		f.outside[ref] = OutsideFiles{Checkpoint: name, Files: files}
	}
	return nil
}

func (f *checkpointCopier) lacks(ref checkpoint.Ref, name, problem string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lacking[ref] = Incomplete{Checkpoint: name, Problem: problem}
}

// lacked counts the checkpoints that are not whole.
func (f *checkpointCopier) lacked() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.lacking)
}

// remove removes the copy of a checkpoint, if there is one.
func (f *checkpointCopier) remove(ref checkpoint.Ref) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.lacking, ref)
	delete(f.outside, ref)
	return f.copier.to.RemoveAll(filepath.Join(f.data.Dir(), ref.String()))
}

// findings are what the report says of checkpoints, sorted.
func (f *checkpointCopier) findings() (outside []OutsideFiles, incomplete []Incomplete) {
	f.mu.Lock()
	defer f.mu.Unlock()
	outside, incomplete = []OutsideFiles{}, []Incomplete{}
	for _, o := range f.outside {
		outside = append(outside, o)
	}
	for _, l := range f.lacking {
		incomplete = append(incomplete, l)
	}
	slices.SortFunc(outside, func(a, b OutsideFiles) int { return cmp.Compare(a.Checkpoint, b.Checkpoint) })
	slices.SortFunc(incomplete, func(a, b Incomplete) int { return cmp.Compare(a.Checkpoint, b.Checkpoint) })
	return outside, incomplete
}

// syncDirs makes the names of all copies durable.
func (f *checkpointCopier) syncDirs() error {
	dir := f.data.Dir()
	root := f.copier.to
	if err := root.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	err := eachDir(root, dir, 2, root.SyncDir)
	return errors.Join(err, root.SyncDir(dir), root.SyncDir(filepath.Dir(dir)))
}

// eachDir calls do for the directories up to depth levels below dir. A symbolic
// link among them is an error: a store has none.
func eachDir(root beneath.Root, dir string, depth int, do func(string) error) error {
	entries, err := root.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if e.Type() == fs.ModeSymlink {
			return &beneath.TypeError{Path: path, Type: fs.ModeSymlink}
		}
		if !e.IsDir() {
			continue
		}
		if depth > 1 {
			err = eachDir(root, path, depth-1, do)
		}
		if err == nil {
			err = do(path)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// countCheckpoints counts the directories of checkpoints in a data directory.
func countCheckpoints(dir string) (n int, err error) {
	root := beneath.At(filepath.Dir(dir))
	err = eachDir(root, dir, 2, func(path string) error {
		if filepath.Dir(filepath.Dir(path)) != dir {
			return nil // of a run
		}
		entries, err := root.ReadDir(path)
		n += len(entries)
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return n, err
}
