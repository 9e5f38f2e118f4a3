package copier

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
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

// Outside are files of other programs that a checkpoint is read from. A copy of a
// store does not contain them.
type Outside struct {
	Checkpoint string   `json:"checkpoint"`
	Files      []string `json:"files"`
}

// Incomplete is a committed checkpoint with missing or damaged files.
type Incomplete struct {
	Checkpoint string `json:"checkpoint"`
	Problem    string `json:"problem"`
}

// width is the number of checkpoints copied in parallel. Syncs of small files take
// longer than the writes, and run well in parallel.
const width = 8

// Checkpoints copies checkpoints and checks that each copy is complete. A checkpoint that is
// not is listed, and is no error: the copy of a store has what the store has.
type Checkpoints struct {
	Files *Files     // copies the bytes, and may copy other files of the store
	Data  *data.Root // of the copies

	from  string       // directory of the source data
	total atomic.Int64 // expected bytes

	mu      sync.Mutex
	lacking map[checkpoint.Ref]Incomplete
	outside map[checkpoint.Ref]Outside
}

// NewCheckpoints returns a copier of the checkpoints in data/ of the directory from to those of
// the directory to, whose data is root. link is that of [New]. progress, which may be nil, is
// called with the bytes done and those that [Checkpoints.Expect] announced; its calls do not
// overlap.
func NewCheckpoints(from, to string, root *data.Root, link bool, progress func(done, total int64)) *Checkpoints {
	f := &Checkpoints{Data: root, from: filepath.Join(from, "data"), lacking: map[checkpoint.Ref]Incomplete{}, outside: map[checkpoint.Ref]Outside{}}
	f.Files = New(from, to, link, f.progress(progress))
	return f
}

// Expect adds to the number of bytes that will be copied.
func (f *Checkpoints) Expect(bytes int64) { f.total.Add(bytes) }

// progress returns a function that adds up bytes and calls report with the sum.
func (f *Checkpoints) progress(report func(done, total int64)) func(int64) {
	if report == nil {
		return nil
	}
	var mu sync.Mutex
	done := int64(0)
	return func(n int64) {
		mu.Lock()
		defer mu.Unlock()
		done += n
		report(done, max(done, f.total.Load()))
	}
}

// Each copies checkpoints. It calls receipt, which may be nil, for a copy that has none.
func (f *Checkpoints) Each(ctx context.Context, rows []projections.Checkpoint, receipt func(context.Context, projections.Checkpoint) error) error {
	g, within := errgroup.WithContext(ctx)
	g.SetLimit(width)
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

func (f *Checkpoints) one(ctx context.Context, c projections.Checkpoint, receipt func(context.Context, projections.Checkpoint) error) error {
	ref := checkpoint.RefOf(c.Run, c.Trial, c.ID)
	name := c.Run + "@" + c.ID
	digest, err := checkpoint.ParseDigest(c.Manifest)
	if err != nil {
		return fmt.Errorf("checkpoint %s: %w", name, err)
	}
	err = f.CopyUnchecked(ctx, ref)
	if errors.Is(err, ErrVanished) {
		f.Lacks(ref, name, err.Error())
		return nil
	}
	if err != nil {
		return fmt.Errorf("checkpoint %s: %w", name, err)
	}
	if _, err := os.Lstat(filepath.Join(f.Data.Dir(), ref.String(), checkpoint.ReceiptFile)); err != nil && receipt != nil {
		if err := receipt(ctx, c); err != nil && ctx.Err() == nil {
			f.Lacks(ref, name, err.Error())
			return nil
		}
	}
	report, err := f.Data.VerifyWith(ctx, ref, digest, data.VerifyOptions{Quick: true})
	if err != nil {
		return err
	}
	if !report.Clean() {
		f.Lacks(ref, name, report.Findings[0].String())
		return nil
	}
	files, err := f.Data.AdoptedBy(ctx, ref)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.lacking, ref)
	if len(files) > 0 {
		f.outside[ref] = Outside{Checkpoint: name, Files: files}
	}
	return nil
}

// CopyUnchecked copies the files of a checkpoint as they are. It returns [ErrVanished] if some
// disappear meanwhile.
func (f *Checkpoints) CopyUnchecked(ctx context.Context, ref checkpoint.Ref) error {
	return f.Files.checkpoint(ctx, filepath.Join(f.from, ref.String()), filepath.Join(f.Data.Dir(), ref.String()))
}

// Lacks lists a checkpoint as incomplete.
func (f *Checkpoints) Lacks(ref checkpoint.Ref, name, problem string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lacking[ref] = Incomplete{Checkpoint: name, Problem: problem}
}

// Lacked counts the incomplete checkpoints.
func (f *Checkpoints) Lacked() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.lacking)
}

// Remove removes the copy of a checkpoint, if it exists.
func (f *Checkpoints) Remove(ref checkpoint.Ref) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.lacking, ref)
	delete(f.outside, ref)
	return f.Files.to.RemoveAll(filepath.Join(f.Data.Dir(), ref.String()))
}

// RemoveOthers removes the copies of a run's checkpoints that are not in live: an earlier,
// interrupted call made them, and they were deleted since.
func (f *Checkpoints) RemoveOthers(run string, live map[checkpoint.Ref]bool) error {
	name := checkpoint.RefOf(run, "", "").Run
	trials, err := f.Files.to.ReadDir(filepath.Join(f.Data.Dir(), name))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, trial := range trials {
		there, err := f.Files.to.ReadDir(filepath.Join(f.Data.Dir(), name, trial.Name()))
		if err != nil {
			return err
		}
		for _, e := range there {
			if ref := (checkpoint.Ref{Run: name, Trial: trial.Name(), Checkpoint: e.Name()}); !live[ref] {
				if err := f.Remove(ref); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// Findings returns the checkpoints with files elsewhere and those that are incomplete, sorted.
func (f *Checkpoints) Findings() (outside []Outside, incomplete []Incomplete) {
	f.mu.Lock()
	defer f.mu.Unlock()
	outside, incomplete = []Outside{}, []Incomplete{}
	for _, o := range f.outside {
		outside = append(outside, o)
	}
	for _, l := range f.lacking {
		incomplete = append(incomplete, l)
	}
	slices.SortFunc(outside, func(a, b Outside) int { return cmp.Compare(a.Checkpoint, b.Checkpoint) })
	slices.SortFunc(incomplete, func(a, b Incomplete) int { return cmp.Compare(a.Checkpoint, b.Checkpoint) })
	return outside, incomplete
}

// SyncDirs makes the names of all copies durable.
func (f *Checkpoints) SyncDirs() error {
	dir := f.Data.Dir()
	root := f.Files.to
	if err := root.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	err := eachDir(root, dir, 2, root.SyncDir)
	return errors.Join(err, root.SyncDir(dir), root.SyncDir(filepath.Dir(dir)))
}

// EachTrial calls do with the checkpoints that each trial's directory of the source has. It
// returns [fs.ErrNotExist] if the source has no data directory.
func (f *Checkpoints) EachTrial(do func([]checkpoint.Ref) error) error {
	return eachDir(f.Files.from, f.from, 2, func(path string) error {
		if filepath.Dir(filepath.Dir(path)) != f.from {
			return nil // the directory of a run
		}
		entries, err := f.Files.from.ReadDir(path)
		if err != nil {
			return err
		}
		refs := make([]checkpoint.Ref, len(entries))
		for i, e := range entries {
			refs[i] = checkpoint.Ref{Run: filepath.Base(filepath.Dir(path)), Trial: filepath.Base(path), Checkpoint: e.Name()}
		}
		return do(refs)
	})
}

// eachDir calls do for the directories up to depth levels below dir. A symbolic link
// among them is an error, since a store has none.
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

// Count counts the directories of checkpoints in a data directory.
func Count(dir string) (n int, err error) {
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

// Size returns the size in bytes of all files below dir. A file with several names there counts
// once for each.
func Size(dir string) (bytes int64, err error) {
	err = beneath.At(filepath.Dir(dir)).WalkDir(dir, func(_ string, e os.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		info, err := e.Info()
		if err == nil {
			bytes += info.Size()
		}
		return err
	})
	if errors.Is(err, os.ErrNotExist) {
		err = nil
	}
	return bytes, err
}
