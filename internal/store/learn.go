package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/foreign"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
)

const (
	// learnAfter is when an owner begins to learn the digests of adopted files after
	// opening a store, and how often it checks for more.
	learnAfter = time.Minute
	// learnRate limits the bytes a second that it reads for that, so that a training
	// does not notice.
	learnRate = 32 << 20
	// attachTimeout bounds one decision, including retries.
	attachTimeout = time.Minute
)

// Learn verifies a checkpoint. It learns digests of adopted files that are not known yet
// and records them in the log: see [data.Root.Learn]. A difference from what the log has
// recorded is a finding.
func (s *Store) Learn(ctx context.Context, c projections.Checkpoint, progress func(bytes int64)) (data.Report, error) {
	return s.learn(ctx, c, data.LearnOptions{Progress: progress})
}

func (s *Store) learn(ctx context.Context, c projections.Checkpoint, o data.LearnOptions) (data.Report, error) {
	s.learning.Lock()
	defer s.learning.Unlock()
	return s.learnOne(ctx, c, o)
}

// learnOne is learn for a caller that holds the lock. Calls for different checkpoints may
// run concurrently.
func (s *Store) learnOne(ctx context.Context, c projections.Checkpoint, o data.LearnOptions) (data.Report, error) {
	digest, err := checkpoint.ParseDigest(c.Manifest)
	if err != nil {
		return data.Report{}, err
	}
	if s.unwritable() != nil {
		return s.Data.VerifyWith(ctx, RefOf(c), digest, data.VerifyOptions{Progress: o.Progress, Together: o.Together})
	}
	o.Recorded = map[string]checkpoint.Digest{}
	for _, a := range c.Attachments {
		if o.Recorded[a.Name], err = checkpoint.ParseDigest(a.Digest); err != nil {
			return data.Report{}, fmt.Errorf("attachment %q of %s@%s: %w", a.Name, c.Run, c.ID, err)
		}
	}
	report, err := s.Data.Learn(ctx, RefOf(c), digest, o)
	if err != nil {
		return report, err
	}
	for _, sums := range report.Sums {
		if _, known := o.Recorded[sums.Name]; known {
			continue
		}
		err := s.decide(ctx, events.Aggregate{Run: c.Run, Trial: c.Trial}, &events.CheckpointAttached{
			Checkpoint: c.ID, Name: sums.Name, Digest: sums.Digest.String(), Size: sums.Size,
		})
		if err != nil {
			return report, fmt.Errorf("record %s of checkpoint %s@%s: %w", sums.Name, c.Run, c.ID, err)
		}
	}
	return report, nil
}

// decide appends a decision that does not depend on other decisions.
func (s *Store) decide(ctx context.Context, agg events.Aggregate, body events.Body) error {
	ctx, cancel := context.WithTimeout(ctx, attachTimeout)
	defer cancel()
	d, err := events.NewDecision(Stamp("ckptstore"), agg, body)
	if err != nil {
		return err
	}
	for {
		trial, err := Queries{s.Views()}.Trial(ctx, agg.Run, agg.Trial)
		if err != nil {
			return err
		}
		if _, err = s.Log.Decide(ctx, d, trial.LaneSeq); !errors.Is(err, jetlog.ErrConflict) {
			return err
		}
	}
}

// learner learns in the background while this process owns the store.
type learner struct {
	store  *Store
	cancel context.CancelFunc
	done   chan struct{}

	runs map[string]bool // runs already checked; nil once all are
	upTo uint64          // event up to which later commits were checked
}

func startLearner(s *Store, every time.Duration) *learner {
	ctx, cancel := context.WithCancel(context.Background())
	l := &learner{store: s, cancel: cancel, done: make(chan struct{}), runs: map[string]bool{}}
	go func() {
		defer close(l.done)
		for sleep(ctx, every) {
			if !s.Owns() {
				continue
			}
			if err := l.pass(ctx); err != nil && ctx.Err() == nil {
				s.opts.Logger.Warn("digests of adopted files not learned; retrying", "error", err)
			}
		}
	}()
	return l
}

func (l *learner) stop() {
	l.cancel()
	<-l.done
}

// learnLook is how many bytes a check of a checkpoint with nothing to learn counts as:
// a thousand checks a second.
const learnLook = learnRate >> 10

// pass checks every checkpoint once, run by run, and then those committed since.
func (l *learner) pass(ctx context.Context) error {
	if l.runs != nil {
		if err := l.first(ctx); err != nil {
			return err
		}
	}
	last, err := l.store.Log.Last(ctx)
	if err != nil {
		return err
	}
	for e, err := range l.store.Log.ReadCheckpoints(ctx, l.upTo+1, last) {
		if err != nil {
			return err
		}
		if e.Kind == (events.CheckpointCommitted{}).Kind() {
			id, err := endedBy(e)
			if err != nil {
				return err
			}
			c, err := Queries{l.store.Views()}.Resolve(ctx, e.Scope.Run+"/"+e.Scope.Trial+"@"+id)
			if err == nil && c.State == projections.Committed && c.ID == id {
				err = l.one(ctx, c)
			}
			if err != nil {
				return fmt.Errorf("checkpoint %s@%s: %w", e.Scope.Run, id, err)
			}
		}
		l.upTo = e.Sequence
	}
	l.upTo = last
	return nil
}

// first checks the checkpoints that existed when this process became the owner.
func (l *learner) first(ctx context.Context) error {
	if l.upTo == 0 {
		last, err := l.store.Log.Last(ctx)
		if err != nil {
			return err
		}
		l.upTo = last
	}
	runs, err := query.Ask(ctx, l.store.Views(), query.Runs, query.Params{})
	if err != nil {
		return err
	}
	p := stepped{pacer: pacer{rate: learnRate}}
	for _, run := range runs {
		if l.runs[run.Name] {
			continue
		}
		list, err := query.Ask(ctx, l.store.Views(), query.Checkpoints, query.Params{Run: run.Name, All: true})
		if err != nil {
			return err
		}
		for _, c := range list {
			if c.State != projections.Committed {
				continue
			}
			if err := l.one(ctx, c); err != nil {
				return fmt.Errorf("checkpoint %s@%s: %w", c.Run, c.ID, err)
			}
			if err := p.pace(ctx, learnLook); err != nil {
				return err
			}
		}
		l.runs[run.Name] = true
	}
	l.runs = nil
	return nil
}

func (l *learner) one(ctx context.Context, c projections.Checkpoint) error {
	ranks, err := l.store.Data.Unlearned(ctx, RefOf(c))
	if err != nil || len(ranks) == 0 {
		return err
	}
	p := pacer{rate: learnRate}
	report, err := l.store.learn(ctx, c, data.LearnOptions{Pace: p.pace})
	if err != nil {
		return err
	}
	for _, f := range report.Findings {
		l.store.opts.Logger.Error("adopted file damaged or changed", "checkpoint", c.Run+"@"+c.ID, "finding", f.String())
	}
	return nil
}

// pacer limits a rate of bytes.
type pacer struct {
	rate int64 // bytes a second

	mu   sync.Mutex
	next time.Time // when the next byte may pass
}

func (p *pacer) pace(ctx context.Context, bytes int64) error {
	p.mu.Lock()
	now := time.Now()
	if p.next.Before(now) {
		p.next = now
	}
	p.next = p.next.Add(time.Duration(bytes) * time.Second / time.Duration(p.rate))
	wait := p.next.Sub(now)
	p.mu.Unlock()
	if !sleep(ctx, wait) {
		return ctx.Err()
	}
	return nil
}

// OpenForeign opens a checkpoint of another program by its path: see [foreign.Open]. It
// needs no store. If chunks overlap, it returns an error that names them. It accepts gaps
// between chunks: see [VerifyForeign].
func OpenForeign(ctx context.Context, path string) (*data.Foreign, error) {
	full, err := filepath.Abs(path)
	if err == nil {
		// A link may lead elsewhere when an adopted file is read later.
		var real string
		if real, err = filepath.EvalSymlinks(full); err == nil {
			full = real
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("open checkpoint %s: %w%s", path, fs.ErrNotExist, nearest(full))
	}
	if err != nil {
		return nil, fmt.Errorf("open checkpoint %s: %w", path, err)
	}
	f, err := foreign.Open(ctx, vfs.Default, full)
	if err != nil {
		return nil, err
	}
	var locals []checkpoint.Local
	for _, r := range f.Manifest().Ranks {
		locals = append(locals, checkpoint.Local{Rank: r.Rank, Items: f.Items(r.Rank)})
	}
	offers := planner.Dedup(locals)
	if err := offers.Overlaps(offers.Layout()); err != nil {
		return nil, fmt.Errorf("open checkpoint %s: %w", path, err)
	}
	return f, nil
}

// nearest describes what exists in place of a missing path: the nearest existing directory
// above it, with its entries.
func nearest(path string) string {
	for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
		list, err := os.ReadDir(dir)
		if err != nil && dir != filepath.Dir(dir) {
			continue
		}
		var names []string
		for _, e := range list {
			if !strings.HasPrefix(e.Name(), ".") && (dir == filepath.Dir(path) || e.IsDir()) {
				names = append(names, e.Name())
			}
		}
		if near := projections.Near(filepath.Base(path), names); near != "" {
			return fmt.Sprintf(": in %s %s", dir, near)
		}
		return fmt.Sprintf(": %s is empty", dir)
	}
}

// VerifyForeign is [data.Foreign.Verify]. It also reports parts of tensors that no chunk
// covers.
func VerifyForeign(ctx context.Context, f *data.Foreign, progress func(bytes int64)) (data.Report, error) {
	report, err := f.Verify(ctx, progress)
	if err != nil {
		return report, err
	}
	for _, hole := range planner.Holes(f.Manifest().Layout) {
		found := data.Finding{Kind: data.Missing, File: f.Path(), Block: -1, Offset: -1, Problem: hole.Error()}
		if region := (*planner.MissingRegionError)(nil); errors.As(hole, &region) {
			found.FQN, found.Chunk, found.Problem = region.FQN, region.Region.String(), "no file holds this part of the tensor"
		}
		report.Findings = append(report.Findings, found)
	}
	return report, nil
}

// ExportTo writes a checkpoint into a directory: see [foreign.Export].
func ExportTo(ctx context.Context, from data.Reader, dir string, o foreign.ExportOptions) (foreign.Exported, error) {
	full, err := filepath.Abs(dir)
	if err != nil {
		return foreign.Exported{}, fmt.Errorf("export to %s: %w", dir, err)
	}
	return foreign.Export(ctx, from, vfs.Default, full, o)
}

// CompareExport is [foreign.Compare] of a directory in the file system.
func CompareExport(ctx context.Context, from data.Reader, dir string, o foreign.CompareOptions) ([]foreign.Hashed, data.Format, error) {
	full, err := filepath.Abs(dir)
	if err != nil {
		return nil, "", fmt.Errorf("compare with %s: %w", dir, err)
	}
	return foreign.Compare(ctx, from, vfs.Default, full, o)
}
