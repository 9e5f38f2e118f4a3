package data

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/disk"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/local"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// AdoptData replaces [FileWriter.WriteData] for a rank of a checkpoint of another program. It
// writes an index of where each chunk lies in from's files, and no chunks. The items must be
// those of from; only empty ones may be left out, because planners keep one item of each box.
// On return the index is durable. Like WriteData, it may be repeated.
func (w *FileWriter) AdoptData(ctx context.Context, rank int, items []checkpoint.Item, from *Foreign) (Written, error) {
	written, err := w.adoptData(ctx, rank, items, from)
	return written, w.wrap(fmt.Sprintf("adopt the files of rank %d", rank), err)
}

func (w *FileWriter) adoptData(ctx context.Context, rank int, items []checkpoint.Item, from *Foreign) (Written, error) {
	if err := w.check(ctx); err != nil {
		return Written{}, err
	}
	r := from.ranks[rank]
	if r == nil {
		return Written{}, fmt.Errorf("%s has no file of this rank", from.path)
	}
	x, err := r.only(items)
	if err != nil {
		return Written{}, fmt.Errorf("%s: %w", from.path, err)
	}
	if err := w.root.checkUnchanged(ctx, x); err != nil {
		return Written{}, err
	}
	data := x.Encode()
	_, sealed, err := w.there(ctx)
	if err != nil {
		return Written{}, err
	}
	if sealed {
		there, err := w.root.readFile(ctx, w.ref, checkpoint.IndexFile(rank))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return Written{}, err
		}
		if string(there) != string(data) {
			return Written{}, fmt.Errorf("%s: %w; import under another step", w.root.path(w.ref, checkpoint.IndexFile(rank)), ErrSealed)
		}
		return adoptedAs(rank, data), nil
	}
	claim := &claim{root: w.root, left: int64(len(data))}
	if err := w.root.reserve(ctx, claim.left); err != nil {
		return Written{}, err
	}
	defer claim.give()
	if err := w.root.writeFile(ctx, w.ref, checkpoint.IndexFile(rank), data, object.Replace); err != nil {
		return Written{}, err
	}
	if err := w.root.sync(ctx, w.ref); err != nil {
		return Written{}, err
	}
	return adoptedAs(rank, data), nil
}

// only returns the index with the entries of items, which may lack empty ones.
func (x *rankIndex) only(items []checkpoint.Item) (*checkpoint.Index, error) {
	part := *x.index
	part.Entries = make([]checkpoint.Entry, 0, len(items))
	wanted := make(map[key]bool, len(items))
	for _, it := range items {
		k := itemKey(part.Rank, it)
		wanted[k] = true
		if i, ok := x.at[k]; ok {
			part.Entries = append(part.Entries, x.index.Entries[i])
		}
	}
	for k, i := range x.at {
		if e := x.index.Entries[i]; !wanted[k] && e.Item.Bytes > 0 {
			return nil, fmt.Errorf("%q %s is left out", e.Item.Shard.FQN, e.BoxString())
		}
	}
	if missing, extra := compareItems(&part, items); len(missing)+len(extra) > 0 {
		return nil, fmt.Errorf("its contents differ: %s", strings.Join(append(missing, extra...), ", "))
	}
	return &part, nil
}

// adoptedAs returns the result for an adopted index whose file is data.
func adoptedAs(rank int, data []byte) Written {
	return Written{Index: checkpoint.Sum(data), Files: []checkpoint.File{{Name: checkpoint.IndexFile(rank), Size: int64(len(data))}}}
}

// Unlearned lists the ranks of a checkpoint whose files are adopted and whose sums are not
// learned. It opens no file.
func (r *Root) Unlearned(ctx context.Context, ref checkpoint.Ref) ([]int, error) {
	if err := ref.Validate(); err != nil {
		return nil, err
	}
	names, err := r.names(ctx, nameOf(ref))
	if err != nil {
		return nil, fmt.Errorf("find adopted files of checkpoint %s: %w", ref, err)
	}
	if slices.ContainsFunc(names, func(n string) bool { return checkpoint.ValidatePlainName(n) == nil }) {
		return nil, nil // files of another program lie here, and were digested when they came
	}
	var ranks []int
	for _, file := range names {
		rank := -1
		if _, err := fmt.Sscanf(file, "r%d.idx", &rank); err != nil || rank < 0 || file != checkpoint.IndexFile(rank) {
			continue
		}
		if !slices.Contains(names, checkpoint.DataFile(rank)) && !slices.Contains(names, checkpoint.SumsFile(rank)) {
			ranks = append(ranks, rank)
		}
	}
	slices.Sort(ranks)
	return ranks, nil
}

// AdoptedBy lists the paths of the files of other programs that a checkpoint is read from,
// sorted.
func (r *Root) AdoptedBy(ctx context.Context, ref checkpoint.Ref) ([]string, error) {
	err := ref.Validate()
	var files []string
	if err == nil {
		files, err = r.adoptedBy(ctx, ref)
	}
	if err != nil {
		return nil, fmt.Errorf("list the adopted files of checkpoint %s: %w", ref, err)
	}
	slices.Sort(files)
	return slices.Compact(files), nil
}

func (r *Root) adoptedBy(ctx context.Context, ref checkpoint.Ref) (files []string, err error) {
	names, err := r.names(ctx, nameOf(ref))
	problems := []error{disk.Gone(err)}
	for _, file := range names {
		rank := -1
		if _, err := fmt.Sscanf(file, "r%d.idx", &rank); err != nil || file != checkpoint.IndexFile(rank) || slices.Contains(names, checkpoint.DataFile(rank)) {
			continue
		}
		data, err := r.readFile(ctx, ref, file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // its checkpoint was removed just now
		}
		var x checkpoint.Index
		if err == nil {
			x, err = checkpoint.DecodeIndex(data)
		}
		if err != nil {
			problems = append(problems, fmt.Errorf("%s: %w", r.path(ref, file), err))
		} else if x.Adopted() {
			for _, f := range x.Files {
				files = append(files, f.Name)
			}
		}
	}
	return files, errors.Join(problems...)
}

// Adopted lists the paths of all files of other programs that checkpoints below the root are
// read from, committed or not, sorted.
func (r *Root) Adopted(ctx context.Context) ([]string, error) {
	var files []string
	var problems []error
	err := r.walk(ctx, func(ref checkpoint.Ref) {
		some, err := r.adoptedBy(ctx, ref)
		files, problems = append(files, some...), append(problems, err)
	}, func(link Damaged) { problems = append(problems, link.Err) })
	if err = errors.Join(append(problems, err)...); err != nil {
		return nil, fmt.Errorf("list the adopted files of %s: %w", r.Dir(), err)
	}
	slices.Sort(files)
	return slices.Compact(files), nil
}

// ChangedError reports that an adopted file has changed since it was adopted, so that its
// bytes can no longer be trusted. None were handed out.
type ChangedError struct {
	File               string // path
	Size, WantSize     int64  // in bytes
	Modified, WantTime time.Time
	Gone               bool
}

// Error reports the file, the change and the next step.
func (e *ChangedError) Error() string {
	what := fmt.Sprintf("it was written at %s, and at %s when it was adopted",
		e.Modified.UTC().Format(time.RFC3339Nano), e.WantTime.UTC().Format(time.RFC3339Nano))
	switch {
	case e.Gone:
		what = "it no longer exists"
	case e.Size != e.WantSize:
		what = fmt.Sprintf("it has %d bytes, and had %d when it was adopted", e.Size, e.WantSize)
	}
	return fmt.Sprintf("adopted file %s has changed: %s; put the old file back, or import it again", e.File, what)
}

// ProblemKind returns [problem.Damage].
func (*ChangedError) ProblemKind() problem.Kind { return problem.Damage }

// Is makes errors.Is(err, fs.ErrNotExist) hold for a file that is gone.
func (e *ChangedError) Is(target error) bool { return e.Gone && target == fs.ErrNotExist }

// unchanged compares an adopted file with its recorded size and time. info is of the open
// file, so the check covers what is read afterwards.
func unchanged(x *checkpoint.Index, n int, info object.Info) error {
	want := x.Files[n]
	if info.Size == want.Size && info.Modified.UnixNano() == x.Modified[n] {
		return nil
	}
	return &ChangedError{
		File: want.Name, Size: info.Size, WantSize: want.Size,
		Modified: info.Modified, WantTime: time.Unix(0, x.Modified[n]),
	}
}

// checkUnchanged is like unchanged, for all files of an index by their names.
func (r *Root) checkUnchanged(ctx context.Context, x *checkpoint.Index) error {
	var errs []error
	for n, f := range x.Files {
		info, err := local.Stat(r.outside, f.Name)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			err = &ChangedError{File: f.Name, WantSize: f.Size, Gone: true}
		case err == nil:
			err = unchanged(x, n, info)
		}
		errs = append(errs, err, ctx.Err())
	}
	return errors.Join(errs...)
}
