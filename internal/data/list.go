package data

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
)

// Damaged is a receipt that could not be read, or a symbolic link in place of a directory.
// Its checkpoint is not listed, nor is the target of the link.
type Damaged struct {
	Ref  checkpoint.Ref // for a link, only the parts that its place in the data has
	File string         // path
	Err  error          // a [*CorruptError], or why the file could not be read
}

// Link reports whether a symbolic link is the cause.
func (d Damaged) Link() bool {
	var is *beneath.TypeError
	return errors.As(d.Err, &is) && is.Link()
}

// Problem returns the problem and the next step.
func (d Damaged) Problem() error {
	if d.Link() {
		return d.Err
	}
	return fmt.Errorf("%s: %w; open the store once with its log, which rewrites the receipt", d.File, d.Err)
}

// Checkpoints lists the committed checkpoints by their receipts alone. It needs no log and
// opens no other file. It omits directories without a receipt, which are not checkpoints, and
// returns damaged receipts, and symbolic links in place of directories, in the second result.
// Both results are sorted by run, trial and checkpoint. A root that was never made has no
// checkpoints.
func (r *Root) Checkpoints(ctx context.Context) ([]checkpoint.Receipt, []Damaged, error) {
	var refs []checkpoint.Ref
	var links []Damaged
	err := r.walk(ctx, func(ref checkpoint.Ref) { refs = append(refs, ref) }, func(link Damaged) { links = append(links, link) })
	if err != nil {
		return nil, nil, fmt.Errorf("list checkpoints in %s: %w", r.Dir(), err)
	}
	receipts, damaged := r.readReceipts(ctx, refs)
	return receipts, append(links, damaged...), ctx.Err()
}

// readReceipts returns the receipts of checkpoints, in order, without those that have none.
func (r *Root) readReceipts(ctx context.Context, refs []checkpoint.Ref) (receipts []checkpoint.Receipt, damaged []Damaged) {
	type found struct {
		receipt checkpoint.Receipt
		err     error
	}
	all := make([]found, len(refs))
	var g errgroup.Group
	g.SetLimit(r.Width())
	for i, ref := range refs {
		g.Go(func() error {
			all[i].receipt, all[i].err = r.readReceipt(ctx, ref)
			return nil
		})
	}
	_ = g.Wait() // never fails
	for i, f := range all {
		switch {
		case f.err == nil:
			receipts = append(receipts, f.receipt)
		case !errors.Is(f.err, ErrNotCommitted):
			damaged = append(damaged, Damaged{Ref: refs[i], File: r.path(refs[i], checkpoint.ReceiptFile), Err: f.err})
		}
	}
	return receipts, damaged
}

// Width returns how many small files are best read at a time: one after the other on a disk,
// many where each is a request.
func (r *Root) Width() int { return max(2*r.b.Reading().Depth, 1) }

// Receipt returns the receipt of a checkpoint. Without a receipt, the error has
// [ErrNotCommitted] in its chain.
func (r *Root) Receipt(ctx context.Context, ref checkpoint.Ref) (checkpoint.Receipt, error) {
	err := errors.Join(ctx.Err(), ref.Validate())
	var receipt checkpoint.Receipt
	if err == nil {
		receipt, err = r.readReceipt(ctx, ref)
	}
	if err != nil {
		return checkpoint.Receipt{}, fmt.Errorf("read the receipt of checkpoint %s: %w", ref, err)
	}
	return receipt, nil
}

// Links lists the symbolic links among the directories of runs, trials and checkpoints. It
// follows none of them.
func (r *Root) Links(ctx context.Context) (links []Damaged, err error) {
	if err = r.walk(ctx, func(checkpoint.Ref) {}, func(link Damaged) { links = append(links, link) }); err != nil {
		return nil, fmt.Errorf("list links in %s: %w", r.Dir(), err)
	}
	return links, nil
}

// Directories returns the names of the directories of a trial's checkpoints, committed or not,
// also of those that have only old versions of files in a bucket. Run and Trial of ref are the
// names of directories.
func (r *Root) Directories(ctx context.Context, ref checkpoint.Ref) (map[string]bool, error) {
	dirs, err := r.subdirs(ctx, path.Join(ref.Run, ref.Trial), r.listAll, func(Damaged) {})
	if err != nil {
		return nil, fmt.Errorf("list checkpoints in %s: %w", r.b.Path(path.Join(ref.Run, ref.Trial)), err)
	}
	found := make(map[string]bool, len(dirs))
	for _, name := range dirs {
		found[name] = true
	}
	return found, nil
}

// walk calls visit for each directory of a checkpoint, committed or not, and linked for each
// link among them.
func (r *Root) walk(ctx context.Context, visit func(checkpoint.Ref), linked func(Damaged)) error {
	runs, err := r.subdirs(ctx, "", r.b.List, linked)
	if err != nil {
		return err
	}
	for _, run := range runs {
		if run == pendingDir {
			continue
		}
		trials, err := r.subdirs(ctx, run, r.b.List, linked)
		if err != nil {
			return err
		}
		for _, trial := range trials {
			checkpoints, err := r.subdirs(ctx, path.Join(run, trial), r.b.List, linked)
			if err != nil {
				return err
			}
			for _, name := range checkpoints {
				visit(checkpoint.Ref{Run: run, Trial: trial, Checkpoint: name})
			}
		}
	}
	return nil
}

// subdirs returns the sorted names of the directories in dir; none if dir disappeared
// meanwhile. It calls linked for each link.
func (r *Root) subdirs(ctx context.Context, dir string, list lister, linked func(Damaged)) ([]string, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	entries, err := list(ctx, dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	found, err := r.changes(ctx, dir, entries, linked)
	if err != nil {
		return nil, err
	}
	dirs := make([]string, len(found))
	for i, sub := range found {
		dirs[i] = path.Base(sub.name)
	}
	slices.Sort(dirs)
	return dirs, nil
}

// stray reports whether the path itself is a link or another type of file that stores never
// contain.
func stray(err error, path string) bool {
	var is *beneath.TypeError
	return errors.As(err, &is) && is.Path == path && !is.Type.IsDir()
}

// linkAt returns the link with that name that an error reports.
func (r *Root) linkAt(name string, err error) (Damaged, bool) {
	d := Damaged{File: r.b.Path(name), Err: err}
	of := strings.SplitN(name, "/", 3)
	for i, part := range []*string{&d.Ref.Run, &d.Ref.Trial, &d.Ref.Checkpoint} {
		if i < len(of) {
			*part = of[i]
		}
	}
	return d, d.Link() && stray(err, d.File)
}

// statMost is the number of checkpoint directories of one trial whose time of change is read.
const statMost = 1024

// Newest returns the receipts of the checkpoints that were probably committed last, of at
// most trials trials and at most each checkpoints per trial, in no order. It reads no others.
// A directory counts as newer than another if it changed later, or if the numbers in its name
// are higher. A wrong clock, or a copy whose files have the times of copying, makes it choose
// other checkpoints. Damaged receipts and links among them are returned in the second result.
func (r *Root) Newest(ctx context.Context, trials, each int) ([]checkpoint.Receipt, []Damaged, error) {
	var receipts []checkpoint.Receipt
	var damaged []Damaged
	dirs, err := r.trials(ctx, func(link Damaged) { damaged = append(damaged, link) })
	if err != nil {
		return nil, nil, fmt.Errorf("list checkpoints in %s: %w", r.Dir(), err)
	}
	slices.SortFunc(dirs, func(a, b changed) int { return b.at.Compare(a.at) })
	for _, dir := range dirs[:min(trials, len(dirs))] {
		names, err := r.newestOf(ctx, dir.name, each)
		if err != nil {
			return nil, nil, fmt.Errorf("list checkpoints in %s: %w", r.b.Path(dir.name), err)
		}
		run, trial := path.Split(dir.name)
		refs := make([]checkpoint.Ref, len(names))
		for i, name := range names {
			refs[i] = checkpoint.Ref{Run: path.Clean(run), Trial: trial, Checkpoint: name}
		}
		some, bad := r.readReceipts(ctx, refs)
		receipts, damaged = append(receipts, some...), append(damaged, bad...)
	}
	return receipts, damaged, ctx.Err()
}

// changed is a directory and the time when a name in it was last made or removed.
type changed struct {
	name string
	at   time.Time
}

// trials returns the directories of all trials. It calls linked for each link.
func (r *Root) trials(ctx context.Context, linked func(Damaged)) (dirs []changed, err error) {
	runs, err := r.names(ctx, "")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	for _, run := range runs {
		if run == pendingDir {
			continue
		}
		entries, err := r.b.List(ctx, run)
		if link, ok := r.linkAt(run, err); ok {
			linked(link)
			continue
		}
		if isFile(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		some, err := r.changes(ctx, run, entries, linked)
		if err != nil {
			return nil, err
		}
		dirs = append(dirs, some...)
	}
	return dirs, nil
}

// isFile reports whether a directory is gone, or is a file, a pipe or a device.
func isFile(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.As(err, new(*beneath.TypeError)) || err != nil && strings.Contains(err.Error(), "not a directory")
}

// changes returns the directories among entries with their times, which are zero where
// directories are not kept. It calls linked for each link.
func (r *Root) changes(ctx context.Context, dir string, entries []object.Entry, linked func(Damaged)) (dirs []changed, err error) {
	for _, e := range entries {
		name := path.Join(dir, e.Name)
		info := e.Info
		if info == nil {
			is, err := r.b.Stat(ctx, name)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if link, ok := r.linkAt(name, err); ok {
				linked(link)
				continue
			}
			if err != nil {
				return nil, err
			}
			info = &is
		}
		if info.Dir {
			dirs = append(dirs, changed{name, info.Modified})
		}
	}
	return dirs, nil
}

// newestOf returns the names of a trial's checkpoints that changed last, and of those with
// the highest numbers, up to most of each.
func (r *Root) newestOf(ctx context.Context, dir string, most int) ([]string, error) {
	entries, err := r.b.List(ctx, dir)
	if isFile(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	names := object.Names(entries)
	slices.SortFunc(names, func(a, b string) int { return byNumbers(b, a) })
	found := slices.Clone(names[:min(most, len(names))])
	if len(names) > most && len(names) <= statMost {
		dirs, err := r.changes(ctx, dir, entries, func(Damaged) {}) // Newest reports the links among those that it reads
		if err != nil {
			return nil, err
		}
		slices.SortFunc(dirs, func(a, b changed) int { return b.at.Compare(a.at) })
		for _, d := range dirs[:min(most, len(dirs))] {
			found = append(found, path.Base(d.name))
		}
	}
	slices.Sort(found)
	return slices.Compact(found), nil
}

// byNumbers compares names so that step-9 comes before step-10.
func byNumbers(a, b string) int {
	for a != "" && b != "" {
		m, n := digits(a), digits(b)
		if m == 0 || n == 0 {
			if a[0] != b[0] {
				return cmp.Compare(a[0], b[0])
			}
			a, b = a[1:], b[1:]
			continue
		}
		x, y := strings.TrimLeft(a[:m], "0"), strings.TrimLeft(b[:n], "0")
		if c := cmp.Or(cmp.Compare(len(x), len(y)), strings.Compare(x, y)); c != 0 {
			return c
		}
		a, b = a[m:], b[n:]
	}
	return cmp.Compare(len(a), len(b))
}

// digits returns the number of digits at the beginning of a text.
func digits(s string) int {
	n := 0
	for n < len(s) && '0' <= s[n] && s[n] <= '9' {
		n++
	}
	return n
}

// EachReceipt calls visit for every receipt that can be read, as it is found. Unlike
// [Root.Checkpoints] it keeps none.
func (r *Root) EachReceipt(ctx context.Context, visit func(checkpoint.Receipt) error) error {
	var stopped error
	err := r.walk(ctx, func(ref checkpoint.Ref) {
		if stopped != nil {
			return
		}
		if receipt, err := r.readReceipt(ctx, ref); err == nil {
			stopped = visit(receipt)
		} else {
			stopped = ctx.Err()
		}
	}, func(Damaged) {})
	if err = errors.Join(err, stopped); err != nil {
		return fmt.Errorf("read the receipts in %s: %w", r.Dir(), err)
	}
	return nil
}
