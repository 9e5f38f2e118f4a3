package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/projections"
)

// Receipts are the checkpoints of a directory as the receipts beside their files say,
// for who may not write there: without lock, log or views. What the log alone knows,
// such as tags and what is superseded, they do not say.
type Receipts struct {
	data *data.Root
	log  *slog.Logger
}

// OpenReceipts opens them. What is damaged is left out, and said to the logger.
func OpenReceipts(location string, log *slog.Logger) (*Receipts, error) {
	data, err := OpenData(location)
	if err != nil {
		return nil, err
	}
	return &Receipts{data: data, log: log}, nil
}

// ReadOnly is why this process cannot open the store in a directory, though it can
// read there: the filesystem or the permissions do not let it write, or others can
// write there, which is [ErrUntrusted]. It is nil where it can, where there is
// nothing, and of a URL.
func ReadOnly(location string) error {
	dir, isURL, err := parseLocation(location)
	if err != nil || isURL {
		return nil // opening it says what is wrong with it
	}
	if _, err := os.Stat(filepath.Join(dir, "store.json")); err != nil {
		return nil // as above
	}
	if err := canWrite(dir); err != nil {
		return err
	}
	return mayOpen(dir)
}

// canWrite is the error of the filesystem, or of its permissions, that this process
// cannot write to the store in dir.
func canWrite(dir string) error {
	for _, name := range []string{lockName, ".", "data", "log"} {
		path := filepath.Join(dir, name)
		if err := unix.Faccessat(unix.AT_FDCWD, path, unix.W_OK, unix.AT_EACCESS); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("write to %s: %w", path, err)
		}
	}
	return nil
}

// List are the committed checkpoints of a run, or of all runs, of each run the newest
// first.
func (r *Receipts) List(ctx context.Context, run string, _ bool) ([]projections.Checkpoint, error) {
	list, err := r.read(ctx)
	if err != nil {
		return nil, err
	}
	out := []projections.Checkpoint{}
	named := false
	for _, of := range list {
		if run != "" && of.Run != run {
			continue
		}
		named = true
		m, err := r.data.Reader(of.Ref).WithManifest(of.Manifest).ReadMetadata(ctx)
		if errors.As(err, new(*data.CorruptError)) || errors.Is(err, fs.ErrNotExist) {
			// Who may write there may be removing it, and the others are good.
			r.log.Warn("a checkpoint is left out: its manifest is damaged or gone; `ckptstore verify` tells which", "checkpoint", of.Run+"@"+of.Checkpoint, "error", err)
			continue
		}
		if err != nil {
			return nil, err
		}
		row := RowOf(of)
		row.WorldSize, row.Bytes = m.WorldSize, m.Layout.Bytes()
		out = append(out, row)
	}
	if run != "" && !named {
		return nil, &projections.NotFoundError{What: "run", Ref: run, Hint: "no receipt names it, and the log cannot be read without write permission"}
	}
	slices.SortFunc(out, func(x, y projections.Checkpoint) int {
		return cmp.Or(cmp.Compare(x.Run, y.Run), cmp.Compare(y.CommittedSeq, x.CommittedSeq))
	})
	return out, nil
}

// Committed is the checkpoint that a reference stands for.
func (r *Receipts) Committed(ctx context.Context, ref string) (projections.Checkpoint, error) {
	list, err := r.read(ctx)
	if err != nil {
		return projections.Checkpoint{}, err
	}
	found, err := FindReceipt(list, ref)
	if err != nil {
		return projections.Checkpoint{}, err
	}
	return RowOf(found), nil
}

// ReaderOf reads one of them.
func (r *Receipts) ReaderOf(c projections.Checkpoint) (*data.FileReader, error) {
	return readerOf(r.data, c)
}

func (r *Receipts) read(ctx context.Context) ([]checkpoint.Receipt, error) {
	list, damaged, err := r.data.Checkpoints(ctx)
	for _, d := range damaged {
		r.log.Warn("a receipt is left out", "file", d.File, "error", d.Problem())
	}
	return list, err
}

// RowOf is what a receipt says of its checkpoint.
func RowOf(r checkpoint.Receipt) projections.Checkpoint {
	return projections.Checkpoint{
		Run: r.Run, Trial: r.Trial, ID: r.Checkpoint, Name: r.Name, Step: r.Step, Attempt: r.Attempt,
		State: projections.Committed, Manifest: r.Manifest.String(), CommittedSeq: r.Sequence, EndedAt: r.CommittedAt,
	}
}

// minPrefix is how much of an ID names a checkpoint, as with a log.
const minPrefix = 4

// FindReceipt is the receipt that a reference stands for, where there is no log. The forms are tried in
// the order of [projections.Resolve].
func FindReceipt(list []checkpoint.Receipt, ref string) (checkpoint.Receipt, error) {
	list = slices.Clone(list)
	slices.SortFunc(list, func(x, y checkpoint.Receipt) int { return cmp.Compare(y.Sequence, x.Sequence) })
	if of := receiptsOf(list, ref); len(of) > 0 {
		return oneReceipt(ref, of, "latest")
	}
	for end := strings.LastIndexByte(ref, '@'); end >= 0; end = strings.LastIndexByte(ref[:end], '@') {
		if of := receiptsOf(list, ref[:end]); len(of) > 0 {
			return oneReceipt(ref, of, ref[end+1:])
		}
	}
	if strings.Contains(ref, "@") {
		return checkpoint.Receipt{}, &projections.NotFoundError{What: "run", Ref: ref, Hint: "no receipt names it; `ckptstore ls --offline` lists those that there are"}
	}
	return oneReceipt(ref, list, ref)
}

// receiptsOf are those of RUN, or of RUN/TRIAL. Of a run with several trials
// "main" is meant, as with a log.
func receiptsOf(list []checkpoint.Receipt, name string) []checkpoint.Receipt {
	where := func(is func(checkpoint.Receipt) bool) (of []checkpoint.Receipt) {
		for _, r := range list {
			if is(r) {
				of = append(of, r)
			}
		}
		return of
	}
	of := where(func(r checkpoint.Receipt) bool { return r.Run == name })
	if main := where(func(r checkpoint.Receipt) bool { return r.Run == name && r.Trial == projections.DefaultTrial }); len(main) > 0 {
		return main
	}
	if len(of) > 0 {
		return of
	}
	return where(func(r checkpoint.Receipt) bool { return r.Run+"/"+r.Trial == name })
}

// oneReceipt is the one of a list, the newest first, that the right side of a
// reference means.
func oneReceipt(ref string, list []checkpoint.Receipt, what string) (checkpoint.Receipt, error) {
	if strings.HasPrefix(what, "best:") {
		return checkpoint.Receipt{}, fmt.Errorf("%w: %s: which is the best is in the log, and --offline reads none", projections.ErrReference, ref)
	}
	if what == "latest" { // which is never a file by itself
		list = slices.DeleteFunc(slices.Clone(list), func(r checkpoint.Receipt) bool {
			_, _, file := projections.SplitFile(r.Name)
			return file
		})
		if len(list) == 0 {
			return checkpoint.Receipt{}, &projections.NotFoundError{What: "checkpoint", Ref: ref, Hint: "there are files by themselves alone: name one as `ckptstore ls --offline` lists it"}
		}
		return oneTrial(ref, list)
	}
	for _, matches := range []func(checkpoint.Receipt) bool{
		func(r checkpoint.Receipt) bool { return r.Checkpoint == what },
		func(r checkpoint.Receipt) bool { return r.Name == what },
	} {
		if of := slices.DeleteFunc(slices.Clone(list), func(r checkpoint.Receipt) bool { return !matches(r) }); len(of) > 0 {
			return oneTrial(ref, of)
		}
	}
	var of []checkpoint.Receipt
	for _, r := range list {
		if len(what) >= minPrefix && strings.HasPrefix(r.Checkpoint, what) {
			of = append(of, r)
		}
	}
	if len(of) == 1 {
		return of[0], nil
	}
	if len(of) > 1 {
		return checkpoint.Receipt{}, &projections.AmbiguousError{Ref: ref, Candidates: candidates(of)}
	}
	return checkpoint.Receipt{}, &projections.NotFoundError{What: "checkpoint", Ref: ref, Hint: "no receipt names it, and tags are in the log alone; `ckptstore ls --offline` lists those that there are"}
}

// oneTrial is the newest, if all are of one trial.
func oneTrial(ref string, of []checkpoint.Receipt) (checkpoint.Receipt, error) {
	for _, r := range of[1:] {
		if r.Run != of[0].Run || r.Trial != of[0].Trial {
			return checkpoint.Receipt{}, &projections.AmbiguousError{Ref: ref, Candidates: candidates(of)}
		}
	}
	return of[0], nil
}

func candidates(of []checkpoint.Receipt) (names []string) {
	for _, r := range of {
		names = append(names, r.Run+"/"+r.Trial+"@"+r.Checkpoint)
	}
	return names
}

// VerifyOptions say how to verify several checkpoints.
type VerifyOptions struct {
	Quick    bool              // no chunk is read: see [data.VerifyOptions]
	Progress func(bytes int64) // told how many bytes are read so far, by one goroutine at a time; may be nil
}

// VerifyAll verifies committed checkpoints, several at a time. A file that more
// than one of them has a link to is read once. Digests of adopted files that are
// not known yet are learned, unless it is quick or the store was opened to read, and
// recorded, as by [Store.Learn]. The reports are in the order of the checkpoints.
func (s *Store) VerifyAll(ctx context.Context, list []projections.Checkpoint, o VerifyOptions) ([]data.Report, error) {
	s.learning.Lock()
	defer s.learning.Unlock()
	together := data.NewTogether()
	return verifyAll(ctx, together, len(list), o.Progress, func(ctx context.Context, i int, progress func(int64)) (data.Report, error) {
		if !o.Quick {
			report, err := s.learnOne(ctx, list[i], data.LearnOptions{Progress: progress, Together: together})
			return s.owed(list[i], report), err
		}
		digest, err := checkpoint.ParseDigest(list[i].Manifest)
		if err != nil {
			return data.Report{}, fmt.Errorf("verify %s@%s: %w", list[i].Run, list[i].ID, err)
		}
		report, err := s.Data.VerifyWith(ctx, RefOf(list[i]), digest, data.VerifyOptions{Progress: progress, Quick: true, Together: together})
		return s.owed(list[i], report), err
	})
}

// VerifyReceipts verifies checkpoints by what their receipts say, as
// [Store.VerifyAll] does by the log; it learns nothing.
func VerifyReceipts(ctx context.Context, root *data.Root, list []checkpoint.Receipt, o VerifyOptions) ([]data.Report, error) {
	together := data.NewTogether()
	return verifyAll(ctx, together, len(list), o.Progress, func(ctx context.Context, i int, progress func(int64)) (data.Report, error) {
		return root.VerifyWith(ctx, list[i].Ref, list[i].Manifest, data.VerifyOptions{Progress: progress, Quick: o.Quick, Together: together})
	})
}

// verifyAll adds up the progress of n verifications.
func verifyAll(ctx context.Context, together *data.Together, n int, progress func(int64), verify func(context.Context, int, func(int64)) (data.Report, error)) ([]data.Report, error) {
	reports := make([]data.Report, n)
	var mu sync.Mutex
	sum := int64(0)
	err := together.Each(ctx, n, func(ctx context.Context, i int) (err error) {
		before := int64(0)
		reports[i], err = verify(ctx, i, func(read int64) {
			mu.Lock()
			defer mu.Unlock()
			sum, before = sum+read-before, read
			if progress != nil {
				progress(sum)
			}
		})
		return err
	})
	return reports, err
}
