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

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

// Receipts are the checkpoints of a directory according to the receipts next to their files.
// They serve processes without write permission: without lock, log or views. They lack what
// only the log has, such as tags and superseded checkpoints.
type Receipts struct {
	data *data.Root
	log  *slog.Logger
}

// OpenReceipts opens the receipts in a directory. It logs and skips damaged ones.
func OpenReceipts(location string, log *slog.Logger) (*Receipts, error) {
	data, err := OpenData(location)
	if err != nil {
		return nil, err
	}
	return &Receipts{data: data, log: log}, nil
}

// OpenByReceipts opens the store in a directory by its receipts, for processes without write
// permission. Its views have what the receipts record: committed checkpoints, without superseded
// ones among them being known. The store has no log: Log is nil, and no decision can be made.
func OpenByReceipts(ctx context.Context, o Options) (*Store, error) {
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	dir, err := filepath.Abs(o.Location)
	if err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	s, err := closedStore(dir, o)
	if err != nil {
		return nil, err
	}
	list, err := (&Receipts{data: s.Data, log: o.Logger}).read(ctx)
	if err != nil {
		return nil, err
	}
	rows, last, err := foldReceipts(list)
	if err != nil {
		return nil, fmt.Errorf("open store %s by its receipts: %w", dir, err)
	}
	s.local = query.Past{Rows: rows, Sequence: last}
	return s, nil
}

// foldReceipts folds the decisions that receipts stand for. A commit has its own sequence, and
// the beginning of the save the sequence before it.
func foldReceipts(list []checkpoint.Receipt) (*projections.Memory, uint64, error) {
	list = slices.Clone(list)
	slices.SortFunc(list, func(x, y checkpoint.Receipt) int { return cmp.Compare(x.Sequence, y.Sequence) })
	rows, last := projections.NewMemory(), uint64(0)
	seen := map[events.Aggregate]bool{}
	for _, r := range list {
		agg := events.Aggregate{Run: r.Run, Trial: r.Trial}
		fold := func(seq uint64, body events.Body) error {
			d, err := events.NewDecision(events.Stamp{ID: fmt.Sprintf("%s-%d", body.Kind(), seq), Source: "receipts", Time: r.CommittedAt}, agg, body)
			if err != nil {
				return err
			}
			return projections.Apply(rows, events.Recorded{Event: d.Event, Sequence: seq, Stored: r.CommittedAt})
		}
		if r.Sequence < 2 || (events.Scope{Run: r.Run, Trial: r.Trial, Actor: events.Server}).Validate() != nil {
			return nil, 0, fmt.Errorf("%w: the receipt of %s@%s has sequence %d", ErrDamaged, r.Run, r.Checkpoint, r.Sequence)
		}
		var err error
		if !seen[agg] {
			seen[agg] = true
			err = fold(r.Sequence-1, &events.TrialCreated{})
		}
		if err == nil {
			err = fold(r.Sequence-1, &events.CheckpointBegun{Attempt: r.Attempt, Checkpoint: r.Checkpoint, Name: r.Name, Step: r.Step, WorldSize: r.WorldSize})
		}
		if err == nil {
			err = fold(r.Sequence, &events.CheckpointCommitted{Attempt: r.Attempt, Checkpoint: r.Checkpoint, Manifest: r.Manifest.String(), Bytes: r.Bytes})
		}
		if err != nil {
			return nil, 0, err
		}
		last = max(last, r.Sequence)
	}
	return rows, last, nil
}

// ReadOnly returns why this process cannot open the store in a directory that it can read: the
// filesystem or the permissions do not let it write, or other users can write there, which is
// [ErrUntrusted]. It returns nil if the process can open it, if nothing is there, and for a URL.
func ReadOnly(location string) error {
	dir, isURL, err := parseLocation(location)
	if err != nil || isURL {
		return nil // opening it reports the cause
	}
	if _, err := os.Stat(filepath.Join(dir, "store.json")); err != nil {
		return nil // as above
	}
	if err := canWrite(dir); err != nil {
		return err
	}
	return mayOpen(dir)
}

// canWrite returns the error of the filesystem, or of its permissions, that keeps this process
// from writing to the store in dir.
func canWrite(dir string) error {
	for _, name := range []string{lockName, ".", "data", "log"} {
		path := filepath.Join(dir, name)
		if err := unix.Faccessat(unix.AT_FDCWD, path, unix.W_OK, unix.AT_EACCESS); err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("write to %s: %w", path, err)
		}
	}
	return nil
}

// List returns the committed checkpoints of a run, or of all runs, each run's newest first.
func (r *Receipts) List(ctx context.Context, run string, _ bool) ([]projections.Checkpoint, error) {
	list, err := r.read(ctx)
	if err != nil {
		return nil, err
	}
	list = slices.DeleteFunc(list, func(of checkpoint.Receipt) bool { return run != "" && of.Run != run })
	rows, problems := RowsOf(ctx, r.data, list)
	out := []projections.Checkpoint{}
	for i, err := range problems {
		if errors.As(err, new(*data.CorruptError)) || errors.Is(err, fs.ErrNotExist) {
			// Another process may be removing it, and the others are good.
			r.log.Warn("checkpoint skipped: its manifest is damaged or missing; run `ckptstore verify`", "checkpoint", list[i].Run+"@"+list[i].Checkpoint, "error", err)
			continue
		}
		if err != nil {
			return nil, err
		}
		out = append(out, rows[i])
	}
	if run != "" && len(list) == 0 {
		return nil, &projections.NotFoundError{What: "run", Ref: run, Hint: "no receipt names it, and the log cannot be read without write permission"}
	}
	slices.SortFunc(out, func(x, y projections.Checkpoint) int {
		return cmp.Or(cmp.Compare(x.Run, y.Run), cmp.Compare(y.CommittedSeq, x.CommittedSeq))
	})
	return out, nil
}

// Committed returns the checkpoint that a reference means.
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

// ReaderOf opens one of the checkpoints.
func (r *Receipts) ReaderOf(c projections.Checkpoint) (*data.FileReader, error) {
	return readerOf(r.data, c)
}

func (r *Receipts) read(ctx context.Context) ([]checkpoint.Receipt, error) {
	list, damaged, err := r.data.Checkpoints(ctx)
	for _, d := range damaged {
		r.log.Warn("receipt skipped", "file", d.File, "error", d.Problem())
	}
	return list, err
}

// RowOf returns the row of a receipt's checkpoint. World size and bytes are zero if the receipt
// is of an older version.
func RowOf(r checkpoint.Receipt) projections.Checkpoint {
	return projections.Checkpoint{
		Run: r.Run, Trial: r.Trial, ID: r.Checkpoint, Name: r.Name, Step: r.Step, Attempt: r.Attempt,
		WorldSize: r.WorldSize, Bytes: r.Bytes,
		State: projections.Committed, Manifest: r.Manifest.String(), CommittedSeq: r.Sequence, EndedAt: r.CommittedAt,
	}
}

// RowsOf returns the rows of some receipts with world size and bytes, and for each receipt an
// error or nil. It reads a manifest only where the receipt is of an older version, several at a
// time where each is a request to a bucket.
func RowsOf(ctx context.Context, root *data.Root, receipts []checkpoint.Receipt) ([]projections.Checkpoint, []error) {
	rows, problems := make([]projections.Checkpoint, len(receipts)), make([]error, len(receipts))
	var g errgroup.Group
	g.SetLimit(root.Width())
	for i, r := range receipts {
		rows[i] = RowOf(r)
		if r.WorldSize > 0 {
			continue
		}
		g.Go(func() error {
			m, err := root.Reader(r.Ref).WithManifest(r.Manifest).ReadMetadata(ctx)
			rows[i].WorldSize, rows[i].Bytes, problems[i] = m.WorldSize, m.Layout.Bytes(), err
			return nil
		})
	}
	_ = g.Wait() // never fails
	return rows, problems
}

// minPrefix is the shortest prefix of an ID that names a checkpoint, as with a log.
const minPrefix = 4

// FindReceipt returns the receipt that a reference means, without a log. It tries the forms of
// a reference in the order of [projections.Resolve].
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
		return checkpoint.Receipt{}, &projections.NotFoundError{What: "run", Ref: ref, Hint: "no receipt names it; `ckptstore ls --offline` lists the existing ones"}
	}
	return oneReceipt(ref, list, ref)
}

// receiptsOf returns the receipts of RUN, or of RUN/TRIAL. RUN with several trials means its
// trial "main", as with a log.
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

// oneReceipt returns the receipt of a list, newest first, that the right side of a reference
// means.
func oneReceipt(ref string, list []checkpoint.Receipt, what string) (checkpoint.Receipt, error) {
	if strings.HasPrefix(what, "best:") {
		return checkpoint.Receipt{}, fmt.Errorf("%w: %s: the best checkpoint is recorded only in the log, which --offline does not read", projections.ErrReference, ref)
	}
	if what == "latest" { // never a single-file checkpoint
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
	return checkpoint.Receipt{}, &projections.NotFoundError{What: "checkpoint", Ref: ref, Hint: "no receipt names it, and tags are in the log alone; `ckptstore ls --offline` lists the existing ones"}
}

// oneTrial returns the newest receipt, if all are of one trial.
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

// VerifyOptions configure [Store.VerifyAll] and [VerifyReceipts].
type VerifyOptions struct {
	Quick    bool              // read no chunk: see [data.VerifyOptions]
	Progress func(bytes int64) // called with the bytes read so far, by one goroutine at a time; may be nil
}

// VerifyAll verifies committed checkpoints, several in parallel. It reads a file that several of
// them link to once. It learns digests of adopted files that are not known yet and records them,
// as [Store.Learn] does, unless o.Quick is set or the store was opened to read. The reports are
// in the order of the checkpoints.
func (s *Store) VerifyAll(ctx context.Context, list []projections.Checkpoint, o VerifyOptions) ([]data.Report, error) {
	s.learning.Lock()
	defer s.learning.Unlock()
	together := s.Data.NewTogether()
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

// VerifyReceipts verifies checkpoints against their receipts, as [Store.VerifyAll] does against
// the log. It learns no digests.
func VerifyReceipts(ctx context.Context, root *data.Root, list []checkpoint.Receipt, o VerifyOptions) ([]data.Report, error) {
	together := root.NewTogether()
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
