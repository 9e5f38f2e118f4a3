package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/refs"
	"github.com/ckptstore/ckptstore/planner/retention"
	"github.com/ckptstore/ckptstore/projections"
)

// collectTries is how often a trial's decision is retried after a conflict. With each
// conflict another process made progress.
const collectTries = 100

// CollectOptions configure [Store.Collect].
type CollectOptions struct {
	Runs   []string // none: all
	Policy retention.Policy
	Apply  bool // false: decide and remove nothing

	// at is called before each step. An error ends the collection there, as a crash
	// would.
	at func(step string) error
}

// Action is a collection's action on a checkpoint.
type Action string

// Actions. A swept checkpoint was aborted or deleted before and has left files.
const (
	Keep   Action = "keep"
	Delete Action = "delete"
	Sweep  Action = "sweep"
)

// Collected is what a collection did, or would do, with one checkpoint. Freed counts
// each file once, and only if no remaining checkpoint has a link to it.
type Collected struct {
	Run    string            `json:"run"`
	Trial  string            `json:"trial"`
	ID     string            `json:"id"`
	Step   int64             `json:"step"`
	State  projections.State `json:"state"` // before the collection
	Action Action            `json:"action"`
	Reason string            `json:"reason"`
	Bytes  int64             `json:"bytes"` // of tensors and values
	Freed  int64             `json:"freed"` // bytes of files
	// Waits are those of the freed bytes that a bucket keeps as versions, which could not be removed:
	// they are freed once a rule of the bucket removes them.
	Waits int64 `json:"waits,omitempty"`
	// Left explains why the files of a deleted or swept checkpoint stay for now.
	Left string `json:"left,omitempty"`

	row projections.Checkpoint
}

// Collection is the outcome of [Store.Collect].
type Collection struct {
	Store       string      `json:"store"`
	Policy      string      `json:"policy"`
	Applied     bool        `json:"applied"`
	Checkpoints []Collected `json:"checkpoints"`
	Freed       int64       `json:"freed"`           // sum
	Waits       int64       `json:"waits,omitempty"` // sum

	// Unfreed is why the bucket keeps removed files as versions.
	Unfreed string `json:"unfreed,omitempty"`
}

// Collect deletes the checkpoints that a policy does not keep, and sweeps the leftovers
// of aborted saves and interrupted collections. For each trial the order is:
//
//  1. check that the newest checkpoint has all its files
//  2. decide to delete each of the others, the oldest first, on the condition that
//     nothing else was decided for the trial meanwhile; on a conflict, retry
//  3. read the log again for restores that began meanwhile; leave the checkpoints that
//     they read to the next collection
//  4. remove the files
//
// Unfinished uploads to an object store of checkpoints that were aborted or deleted are removed
// with the files. Those of committed checkpoints stay: a repair may be under way.
//
// After a crash at any point, the next collection, or the next process that opens the
// store, continues. A missing file counts as removed. Collect leaves directories that
// the log does not know or that hold another checkpoint's files.
//
// With an error, the returned Collection holds the progress so far. A failure for one
// checkpoint does not affect the others.
func (s *Store) Collect(ctx context.Context, o CollectOptions) (Collection, error) {
	out := Collection{Store: s.ID, Policy: o.Policy.String(), Applied: o.Apply, Checkpoints: []Collected{}}
	runs := o.Runs
	if len(runs) == 0 {
		rows, err := query.Ask(ctx, s.Views(), query.Runs, query.Params{})
		if err != nil {
			return out, fmt.Errorf("collect: %w", err)
		}
		for _, r := range rows {
			runs = append(runs, r.Name)
		}
	}
	c := &collector{store: s, opts: o, gone: map[inode]uint64{}, refs: s.references(!o.Apply)}
	if o.at == nil {
		c.opts.at = func(string) error { return nil }
	}
	s.Data.Refresh()
	var err error
	if c.uploads, err = s.Data.Uploads(ctx); err != nil {
		// Their space is little, and a rule of the bucket removes them.
		s.opts.Logger.Warn("unfinished uploads are left", "error", err)
	}
	seen := map[string]bool{}
	runs = slices.DeleteFunc(slices.Clone(runs), func(run string) bool {
		again := seen[run]
		seen[run] = true
		return again
	})
	var errs []error
	for some := range slices.Chunk(runs, collectRuns) {
		for _, r := range c.group(ctx, some) {
			for i := range r.all {
				out.Freed += r.all[i].Freed
				out.Waits += r.all[i].Waits
				r.all[i].row = projections.Checkpoint{} // they are many
			}
			out.Checkpoints = append(out.Checkpoints, r.all...)
			if r.err != nil {
				errs = append(errs, fmt.Errorf("collect run %s: %w", r.run, r.err))
			}
		}
		if ctx.Err() != nil {
			break
		}
	}
	return out, errors.Join(errs...)
}

// collectRuns is how many runs are decided before their files are removed. The needs of
// other runs are read twice for each such group: before the decisions, and after them
// for restores that began meanwhile.
const collectRuns = 32

// collector is the state of one Collect.
type collector struct {
	store  *Store
	opts   CollectOptions
	others []retention.Need // needs of runs, as last read
	gone   map[inode]uint64 // in a dry run: links that would be removed, by file with several links
	refs   *references      // nil where files have links

	uploads map[checkpoint.Ref][]data.Upload // unfinished ones
}

// collectedRun is the outcome of one run.
type collectedRun struct {
	run    string
	trials []retention.Trial
	all    []Collected
	err    error
}

func (r *collectedRun) fail(err error) {
	if err != nil {
		r.err = errors.Join(r.err, err)
	}
}

func (c *collector) read(ctx context.Context, run string) ([]retention.Trial, error) {
	trials, err := query.Ask(ctx, c.store.Views(), query.OwnRetention, query.Params{Run: run, Metrics: c.opts.Policy.Metrics()})
	retention.Hold(trials, c.others)
	return trials, err
}

func (c *collector) needs(ctx context.Context) (err error) {
	c.others, err = query.Ask(ctx, c.store.Views(), query.Needs, query.Params{})
	return err
}

// group collects some runs.
func (c *collector) group(ctx context.Context, runs []string) []collectedRun {
	out := make([]collectedRun, 0, len(runs))
	err := error(nil)
	if c.opts.Apply || c.others == nil {
		err = c.needs(ctx)
	}
	for r := range c.ahead(ctx, runs, err) {
		switch {
		case r.err != nil:
		case c.opts.Apply:
			for i := range r.trials {
				list, err := c.decide(ctx, r.trials[i])
				r.fail(err)
				r.all = append(r.all, list...)
			}
		default:
			for _, t := range r.trials {
				r.all = append(r.all, c.verdicts(t)...)
			}
			c.finish(ctx, &r)
		}
		out = append(out, r)
		if ctx.Err() != nil {
			return out
		}
	}
	if !c.opts.Apply || err != nil {
		return out
	}
	// Deletions stand, whatever happens from here on.
	err = c.needs(ctx)
	for i := range out {
		r := &out[i]
		if r.trials == nil {
			continue
		}
		trials, readErr := r.trials, err
		if err == nil {
			trials, readErr = c.read(ctx, r.run)
		}
		if r.trials = trials; readErr != nil {
			r.fail(readErr)
			continue
		}
		c.finish(ctx, r)
		if ctx.Err() != nil {
			break
		}
	}
	return out
}

// ahead reads the rows of each run. It reads the next run while the files of the current
// one are checked, except when Apply is set: decisions need fresh rows.
func (c *collector) ahead(ctx context.Context, runs []string, err error) iter.Seq[collectedRun] {
	read := func(run string) collectedRun {
		r := collectedRun{run: run, err: err}
		if err == nil {
			r.trials, r.err = c.read(ctx, run)
		}
		return r
	}
	return func(yield func(collectedRun) bool) {
		if c.opts.Apply {
			for _, run := range runs {
				if !yield(read(run)) {
					return
				}
			}
			return
		}
		next := make(chan collectedRun)
		enough := make(chan struct{})
		var reading sync.WaitGroup
		defer reading.Wait()
		defer close(enough)
		reading.Go(func() {
			defer close(next)
			for _, run := range runs {
				select {
				case next <- read(run):
				case <-enough:
					return
				}
			}
		})
		for r := range next {
			if !yield(r) {
				return
			}
		}
	}
}

// finish removes the files of the chosen checkpoints, or computes what that would free.
func (c *collector) finish(ctx context.Context, r *collectedRun) {
	for _, t := range r.trials {
		more, err := c.leftovers(ctx, t, r.all)
		r.all = append(r.all, more...)
		r.fail(err)
	}
	if err := c.refer(ctx, r.all); err != nil {
		r.fail(err)
		return
	}
	for _, i := range oldestFirst(r.all) {
		r.fail(c.free(ctx, &r.all[i], r.trials))
		if ctx.Err() != nil {
			break
		}
	}
	slices.SortFunc(r.all, func(a, b Collected) int { return cmp.Compare(b.row.BegunSeq, a.row.BegunSeq) })
}

// refer reads which files of the chosen checkpoints others name, after the decisions.
func (c *collector) refer(ctx context.Context, all []Collected) error {
	if c.refs == nil || len(oldestFirst(all)) == 0 {
		return nil
	}
	if err := c.refs.fold(ctx, c.store.Log); err != nil {
		return err
	}
	if !c.opts.Apply {
		c.refs.suppose(slices.DeleteFunc(slices.Clone(all), func(x Collected) bool { return x.Action == Keep }))
	}
	return nil
}

// oldestFirst returns the indexes of the checkpoints to remove, in order of removal.
func oldestFirst(all []Collected) (places []int) {
	for i, x := range all {
		if x.Action != Keep {
			places = append(places, i)
		}
	}
	slices.SortFunc(places, func(a, b int) int { return cmp.Compare(all[a].row.BegunSeq, all[b].row.BegunSeq) })
	return places
}

func collected(row projections.Checkpoint, action Action, reason string) Collected {
	return Collected{
		Run: row.Run, Trial: row.Trial, ID: row.ID, Step: row.Step, State: row.State, Bytes: row.Bytes,
		Action: action, Reason: reason, row: row,
	}
}

// verdicts applies the policy to a trial and returns its verdicts, the newest first.
func (c *collector) verdicts(t retention.Trial) (all []Collected) {
	for _, v := range retention.Decide(c.opts.Policy, t) {
		action := Delete
		if v.Keep {
			action = Keep
		}
		all = append(all, collected(v.Checkpoint, action, v.Reason))
	}
	return all
}

// decide appends a trial's decisions. It returns the decisions made, also with an
// error.
func (c *collector) decide(ctx context.Context, t retention.Trial) (done []Collected, err error) {
	for range collectTries {
		all := c.verdicts(t)
		victims := oldestFirst(all)
		if len(victims) > 0 {
			if err := c.successor(ctx, t); err != nil {
				return slices.DeleteFunc(all, func(x Collected) bool { return x.Action == Delete }), err
			}
		}
		lane := t.LaneSeq
		for n, i := range victims {
			row := all[i].row
			if err = c.opts.at("decide " + row.ID); err != nil {
				return done, err
			}
			lane, err = c.store.decideAfter(ctx, row, lane, &events.CheckpointDeleted{
				Checkpoint: row.ID, Reason: fmt.Sprintf("retention %s: %s", c.opts.Policy, all[i].Reason),
			})
			if err != nil {
				victims = victims[:n]
				break
			}
		}
		for _, i := range victims {
			done = append(done, all[i])
		}
		switch {
		case err == nil:
			return append(slices.DeleteFunc(all, func(x Collected) bool { return x.Action == Delete }), done...), nil
		case !errors.Is(err, jetlog.ErrConflict):
			return done, fmt.Errorf("decide to delete checkpoints of trial %s: %w", t.Name, err)
		}
		if t, err = c.again(ctx, t); err != nil {
			return done, err
		}
	}
	return done, fmt.Errorf("trial %s: other decisions came first %d times; collect again when the run is quieter", t.Name, collectTries)
}

// again reads the trial again.
func (c *collector) again(ctx context.Context, t retention.Trial) (retention.Trial, error) {
	if err := c.needs(ctx); err != nil {
		return t, err
	}
	trials, err := c.read(ctx, t.Run)
	if err != nil {
		return t, err
	}
	i := slices.IndexFunc(trials, func(now retention.Trial) bool { return now.Name == t.Name })
	if i < 0 {
		return t, fmt.Errorf("trial %s is gone from the views", t.Name)
	}
	return trials[i], nil
}

// successor checks the checkpoint that the training would resume from, before others
// are deleted: its files may be gone although the log commits it.
func (c *collector) successor(ctx context.Context, t retention.Trial) error {
	if t.Newest == "" {
		return nil // all of them were removed by name
	}
	i := slices.IndexFunc(t.Checkpoints, func(x projections.Checkpoint) bool { return x.ID == t.Newest })
	if i < 0 {
		return fmt.Errorf("trial %s: nothing is deleted: it has no newest checkpoint", t.Name)
	}
	x := t.Checkpoints[i]
	digest, err := checkpoint.ParseDigest(x.Manifest)
	if err == nil {
		_, err = c.store.Data.Reader(RefOf(x)).WithManifest(digest).ReadMetadata(ctx)
	}
	for _, f := range t.Files {
		if err != nil {
			break
		}
		err = c.present(ctx, x, f)
	}
	if err != nil {
		return fmt.Errorf("trial %s: nothing is deleted, because the newest checkpoint is incomplete: %w: run `ckptstore verify %s@%s`", t.Name, err, x.Run, x.ID)
	}
	return nil
}

// present checks that a file of a checkpoint is in its place with its size.
func (c *collector) present(ctx context.Context, x projections.Checkpoint, f events.File) error {
	if !filepath.IsLocal(f.Name) {
		return fmt.Errorf("the log names a file %q, which is not in its directory", f.Name)
	}
	in := RefOf(x)
	if f.From != (refs.Ref{}) {
		in = checkpoint.RefOf(f.From.Run, f.From.Trial, f.From.Checkpoint)
	}
	got, err := c.store.Data.FileSize(ctx, in, f.Name)
	if err == nil && got != f.Size {
		err = &data.CorruptError{File: c.store.Data.Path(in, f.Name), Block: -1, Problem: "size of the file", Want: fmt.Sprint(f.Size), Got: fmt.Sprint(got)}
	}
	return err
}

// leftovers returns the checkpoints that ended before and still have files. all has
// those of this collection.
func (c *collector) leftovers(ctx context.Context, t retention.Trial, all []Collected) (more []Collected, err error) {
	var dirs map[string]bool
	if c.refs != nil {
		if dirs, err = c.store.Data.Directories(ctx, checkpoint.RefOf(t.Run, t.Name, "")); err != nil {
			return nil, err
		}
	}
	now := map[string]bool{}
	for _, x := range all {
		now[x.ID] = now[x.ID] || x.Trial == t.Name && x.Action == Delete
	}
	for _, row := range t.Checkpoints {
		if row.State != projections.Aborted && row.State != projections.Deleted || now[row.ID] {
			continue
		}
		if c.opts.Apply && c.store.locked.has(RefOf(row)) {
			continue
		}
		// Most of these were removed long ago.
		has := dirs[RefOf(row).Checkpoint]
		if c.refs == nil {
			files, err := c.store.hasFiles(ctx, RefOf(row))
			has = files || err != nil
		}
		if has || len(c.uploads[RefOf(row)]) > 0 {
			more = append(more, collected(row, Sweep, leftBy(row.State)))
		}
	}
	return more, nil
}

// leftBy returns the reason to sweep the files of a checkpoint that ended before.
func leftBy(was projections.State) string {
	if was == projections.Aborted {
		return "left by an aborted checkpoint"
	}
	return "left by a deleted checkpoint"
}

// discard removes the uploads of a checkpoint that has ended.
func (c *collector) discard(ctx context.Context, ref checkpoint.Ref) (err error) {
	for _, u := range c.uploads[ref] {
		err = errors.Join(err, c.store.Data.Discard(ctx, ref, u))
	}
	return err
}

// free removes the files of a checkpoint chosen for removal, and computes the bytes
// freed; without Apply it only computes them. trials were read after the decisions.
func (c *collector) free(ctx context.Context, x *Collected, trials []retention.Trial) error {
	freed, left, kept, err := c.measure(ctx, x.row)
	if err != nil {
		return err
	}
	if !c.opts.Apply || kept.All {
		x.Left = left
		c.freed(ctx, x, freed)
		return nil
	}
	for _, t := range trials {
		if t.Name == x.Trial && slices.Contains(t.Loading, x.ID) {
			x.Left = "a restore that began meanwhile reads it"
			return nil
		}
	}
	if err := c.opts.at("remove " + x.ID); err != nil {
		return err
	}
	uploads := c.discard(ctx, RefOf(x.row))
	if x.State == projections.Aborted {
		err = c.store.Data.Remove(ctx, RefOf(x.row))
	} else {
		err = c.store.Data.RemoveExcept(ctx, RefOf(x.row), kept.Keeps)
	}
	var taken *data.TakenError
	var locked *object.LockedError
	switch {
	case errors.As(err, &taken):
		x.Left = taken.Error()
		return uploads
	case errors.As(err, &locked):
		x.Left = whyLeft(locked, kept)
		if uploads == nil {
			c.store.locked.add(RefOf(x.row), locked)
		}
		c.freed(ctx, x, max(freed-locked.Bytes, 0))
		return uploads
	case errors.Join(uploads, err) != nil:
		err = errors.Join(uploads, err)
		x.Left = err.Error()
		return err
	}
	x.Left = left
	c.freed(ctx, x, freed)
	return nil
}

// freed notes the bytes that the removal of a checkpoint's files frees, or will free. If the bucket
// does not tell which, the caller of Collect learns that from Unfreed too.
func (c *collector) freed(ctx context.Context, x *Collected, bytes int64) {
	x.Freed = bytes
	if why, _ := c.store.Data.Unfreed(ctx); why != nil {
		x.Waits = bytes
	}
}

// measure returns the bytes that the removal of a checkpoint's files frees, why others stay, and
// those that must stay for others. A dry run asks for locks; otherwise the removal meets them.
func (c *collector) measure(ctx context.Context, row projections.Checkpoint) (freed int64, left string, kept refs.Kept, err error) {
	if c.refs == nil {
		freed, err = c.exclusive(RefOf(row))
		return freed, "", kept, err
	}
	var locked *object.LockedError
	kept = c.refs.kept(row)
	if !kept.All {
		freed, locked, err = c.store.Data.Frees(ctx, RefOf(row), kept.Keeps, !c.opts.Apply)
	}
	return freed, whyLeft(locked, kept), kept, err
}

// exclusive returns the size in bytes of a checkpoint's files whose links are all in its
// directory and in directories removed before it. A missing directory has none.
func (c *collector) exclusive(ref checkpoint.Ref) (bytes int64, err error) {
	files, err := linkedFiles(c.store.dataDir(), filepath.Join(c.store.dataDir(), ref.String()))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return 0, err
	}
	for id, f := range files {
		if f.links+c.gone[id] >= f.all {
			bytes += f.size
		}
		if !c.opts.Apply && f.all > f.links {
			c.gone[id] += f.links
		}
	}
	return bytes, nil
}

// Withdraw takes committed checkpoints of one run out of its line and deletes them, on
// behalf of the program that saved them or a user. It returns the outcome for each
// checkpoint. A checkpoint that is held, such as by a pin, keeps its files until the
// first collection after the hold ends. Deletions that had to wait before are done too.
func (s *Store) Withdraw(ctx context.Context, all []projections.Checkpoint, reason string) ([]Collected, error) {
	if len(all) == 0 {
		return nil, nil
	}
	for _, c := range all {
		_, err := s.mark(ctx, c.Run+"/"+c.Trial+"@"+c.ID, func(now projections.Checkpoint) (events.Body, error) {
			if now.Withdrawn {
				return nil, nil
			}
			return &events.CheckpointSuperseded{Checkpoint: now.ID, Reason: reason}, nil
		})
		if err != nil {
			return nil, err
		}
	}
	done, err := s.Collect(ctx, CollectOptions{Runs: []string{all[0].Run}, Policy: retention.Policy{}, Apply: true})
	return slices.DeleteFunc(done.Checkpoints, func(c Collected) bool {
		return !slices.ContainsFunc(all, func(one projections.Checkpoint) bool { return one.Trial == c.Trial && one.ID == c.ID })
	}), err
}

// Stays returns what holds the files of a deleted checkpoint, or "" if they are gone.
func (c Collected) Stays() string {
	if c.Action == Keep {
		return c.Reason
	}
	return c.Left
}

// whyLeft returns why files of a checkpoint stay: they are locked, or others name them.
func whyLeft(locked *object.LockedError, kept refs.Kept) string {
	switch named := stays(kept); {
	case locked == nil:
		return named
	case named == "":
		return locked.Error()
	default:
		return locked.Error() + "; " + named
	}
}

// lockedFiles are the checkpoints of which this process could remove no more, because a bucket locks
// the rest until a time. A trainer that collects after each commit would otherwise ask the bucket
// for each file of each of them, again and again. A legal hold has no time, nor has a refusal.
type lockedFiles struct {
	mu    sync.Mutex
	until map[checkpoint.Ref]time.Time
}

// lockedAtMost is how long a checkpoint is left alone: locks of some of its files may end earlier.
const lockedAtMost = time.Hour

func (l *lockedFiles) add(ref checkpoint.Ref, locked *object.LockedError) {
	if locked.Hold || locked.Refused != nil {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.until == nil {
		l.until = map[checkpoint.Ref]time.Time{}
	}
	l.until[ref] = locked.Until
	if soon := time.Now().Add(lockedAtMost); soon.Before(locked.Until) {
		l.until[ref] = soon
	}
}

// has reports whether a checkpoint is still left alone.
func (l *lockedFiles) has(ref checkpoint.Ref) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	until, is := l.until[ref]
	if is && !time.Now().Before(until) {
		delete(l.until, ref)
		is = false
	}
	return is
}
