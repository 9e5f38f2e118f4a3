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

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// statMost is how many directories of checkpoints of one trial are looked at
// for when they were changed last.
const statMost = 1024

// Newest is the receipts of the checkpoints that were probably committed last,
// of at most so many trials and so many of each, in no order. It reads no others:
// a directory is newer than another when it was changed later, or when the numbers
// in its name are higher. A copy whose files have the times of the copying, or a
// clock that was wrong, makes it choose others. Damaged receipts and links among
// them are reported beside the list.
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
		for _, name := range names {
			ref := checkpoint.Ref{Run: path.Clean(run), Trial: trial, Checkpoint: name}
			receipt, err := r.readReceipt(ctx, ref)
			switch {
			case err == nil:
				receipts = append(receipts, receipt)
			case !errors.Is(err, ErrNotCommitted):
				damaged = append(damaged, Damaged{Ref: ref, File: r.path(ref, checkpoint.ReceiptFile), Err: err})
			}
		}
	}
	return receipts, damaged, nil
}

// changed is a directory and when a name in it was last made or removed.
type changed struct {
	name string
	at   time.Time
}

// trials are the directories of all trials. linked is told of the links.
func (r *Root) trials(ctx context.Context, linked func(Damaged)) (dirs []changed, err error) {
	runs, err := r.b.List(ctx, "")
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
		names, err := r.b.List(ctx, run)
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
		some, err := r.changes(ctx, run, names, linked)
		if err != nil {
			return nil, err
		}
		dirs = append(dirs, some...)
	}
	return dirs, nil
}

// isFile reports that a directory is gone, or is a file, a pipe or a device.
func isFile(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.As(err, new(*beneath.TypeError)) || err != nil && strings.Contains(err.Error(), "not a directory")
}

// changes looks at the directories among names. linked is told of the links.
func (r *Root) changes(ctx context.Context, dir string, names []string, linked func(Damaged)) (dirs []changed, err error) {
	for _, name := range names {
		info, err := r.b.Stat(ctx, path.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if link, ok := r.linkAt(path.Join(dir, name), err); ok {
			linked(link)
			continue
		}
		if err != nil {
			return nil, err
		}
		if info.Dir {
			dirs = append(dirs, changed{path.Join(dir, name), info.Modified})
		}
	}
	return dirs, nil
}

// newestOf are the names of the checkpoints of a trial that were changed last,
// and of those with the highest numbers, so many of each.
func (r *Root) newestOf(ctx context.Context, dir string, most int) ([]string, error) {
	names, err := r.b.List(ctx, dir)
	if isFile(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	slices.SortFunc(names, func(a, b string) int { return byNumbers(b, a) })
	found := slices.Clone(names[:min(most, len(names))])
	if len(names) > most && len(names) <= statMost {
		dirs, err := r.changes(ctx, dir, names, func(Damaged) {}) // those that are read are reported
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

// digits is how many a text begins with.
func digits(s string) int {
	n := 0
	for n < len(s) && '0' <= s[n] && s[n] <= '9' {
		n++
	}
	return n
}

// EachReceipt calls visit for every receipt that can be read, as it is found.
// Unlike [Root.Checkpoints] it keeps none.
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
