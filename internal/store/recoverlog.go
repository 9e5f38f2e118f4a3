package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/redact"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// recoverBackend is the backend in the attempt of a recovery, in place of the backend of
// workers.
const recoverBackend = "recover"

// attemptOf matches the attempt in the ID of a checkpoint.
var attemptOf = regexp.MustCompile(`\.a([0-9]{1,9})(\.[0-9]+)?$`)

// examine returns the checkpoints to recover, in the order of their commits, and reports the
// others.
func (r *recovery) examine(ctx context.Context) (found []data.Examined, err error) {
	r.newest, r.report.Checkpoints, r.report.Rejected = map[string]int{}, nil, []Rejected{}
	err = r.root.Examine(ctx, func(x data.Examined) error {
		// No ID is assigned twice, not even that of an interrupted save.
		trial := filepath.Join(x.Ref.Run, x.Ref.Trial)
		if m := attemptOf.FindStringSubmatch(x.Ref.Checkpoint); m != nil {
			n, err := strconv.Atoi(m[1])
			if err != nil {
				return err
			}
			r.newest[trial] = max(r.newest[trial], n)
		}
		if rejected := r.reject(x); rejected != nil {
			r.report.Rejected = append(r.report.Rejected, *rejected)
			return nil
		}
		r.newest[trial] = max(r.newest[trial], x.Receipt.Attempt)
		found = append(found, x)
		return nil
	})
	if err != nil {
		return nil, err
	}
	// The oldest identity comes first, as its log did.
	slices.SortStableFunc(found, func(a, b data.Examined) int {
		return cmp.Or(cmp.Compare(slices.Index(r.report.Formerly, b.Receipt.Store), slices.Index(r.report.Formerly, a.Receipt.Store)),
			cmp.Compare(a.Receipt.Sequence, b.Receipt.Sequence))
	})
	for _, x := range found {
		r.report.Checkpoints = append(r.report.Checkpoints, RecoveredCheckpoint{
			Run: x.Receipt.Run, Trial: x.Receipt.Trial, Checkpoint: x.Receipt.Checkpoint, Step: x.Receipt.Step, Attempt: x.Receipt.Attempt,
			Bytes: x.Manifest.Layout.Bytes(), Manifest: x.Receipt.Manifest.String(), CommittedAt: x.Receipt.CommittedAt,
			Formerly: x.Receipt.Store, Was: x.Receipt.Sequence,
		})
	}
	return found, nil
}

// reject returns why a directory does not become a checkpoint, or nil if it does.
func (r *recovery) reject(x data.Examined) *Rejected {
	why := func(kind, reason string) *Rejected {
		return &Rejected{Path: r.root.Path(x.Ref), Kind: kind, Reason: reason}
	}
	name := events.Scope{Run: x.Receipt.Run, Trial: x.Receipt.Trial, Actor: events.Server}.Validate()
	switch {
	case errors.Is(x.Err, data.ErrNotCommitted):
		return why("uncommitted", "it has no receipt: a save that was not committed, or a copy")
	case x.Receipt.Store != "" && !slices.Contains(r.report.Formerly, x.Receipt.Store):
		return why("foreign", fmt.Sprintf("its receipt is that of store %s: use it there, or name that store with --of", x.Receipt.Store))
	case x.Err != nil:
		return why("damaged", x.Err.Error())
	case name != nil:
		return why("damaged", name.Error())
	}
	return nil
}

// writeLog makes the log of the new store in dir and reads it back.
func (r *recovery) writeLog(ctx context.Context, dir string) error {
	server, err := jetlog.StartServer(ctx, jetlog.ServerOptions{Dir: dir, Logger: serverLogger(r.Logger)})
	if err != nil {
		return err
	}
	defer server.Shutdown()
	log, err := jetlog.Connect(ctx, server.OwnerOptions())
	if err != nil {
		return err
	}
	defer log.Close()
	w := &relog{recovery: r, log: log, job: NewID(), lanes: map[events.Aggregate]uint64{}}
	if err := create(ctx, log, &events.StoreCreated{Store: r.report.Store, Data: "data", Bucket: r.bucket, Formerly: r.report.Formerly}); err != nil {
		return err
	}
	if err := w.commits(ctx); err != nil {
		return err
	}
	if err := w.attempts(ctx); err != nil {
		return err
	}
	if r.report.Sequence, err = log.Last(ctx); err != nil {
		return err
	}
	return w.check(ctx)
}

// relog writes events from receipts.
type relog struct {
	*recovery
	log   *jetlog.Log
	job   string
	order []events.Aggregate // in the order of their first commits
	heads []RecoveredCheckpoint
	lanes map[events.Aggregate]uint64
}

// decide appends decisions. No other process decides in this log.
func (w *relog) decide(ctx context.Context, agg events.Aggregate, at time.Time, bodies ...events.Body) error {
	for _, b := range bodies {
		d, err := events.NewDecision(events.Stamp{ID: NewID(), Source: "recover/" + w.job, Time: at}, agg, b)
		if err != nil {
			return err
		}
		if w.lanes[agg], err = w.log.Decide(ctx, d, w.lanes[agg]); err != nil {
			return err
		}
	}
	return nil
}

func (w *relog) say(ctx context.Context, agg events.Aggregate, body events.Body) error {
	f, err := events.NewFact(Stamp("recover/"+w.job), events.Scope{Run: agg.Run, Trial: agg.Trial, Actor: events.Node(0)}, body)
	if err == nil {
		_, err = w.log.Append(ctx, f)
	}
	return err
}

// commits commits every checkpoint again. The events have the times of the receipts.
func (w *relog) commits(ctx context.Context) error {
	jobs := map[string]bool{}
	for _, c := range w.report.Checkpoints {
		agg := events.Aggregate{Run: c.Run, Trial: c.Trial}
		at := slices.Index(w.order, agg)
		if at < 0 {
			if !jobs[c.Run] {
				jobs[c.Run] = true
				host, err := os.Hostname()
				if err != nil {
					return err
				}
				if err := w.say(ctx, events.Aggregate{Run: c.Run}, &events.JobStarted{
					Job: w.job, Host: host, PID: os.Getpid(), Command: redact.Names{}.Args(w.Command), NNodes: 1, Resume: "none",
				}); err != nil {
					return err
				}
			}
			if err := w.decide(ctx, agg, time.Now(), &events.TrialCreated{}); err != nil {
				return err
			}
			at = len(w.order)
			w.order, w.heads = append(w.order, agg), append(w.heads, c)
		}
		w.heads[at] = c
		if err := w.step("commit " + c.Run + "@" + c.Checkpoint); err != nil {
			return err
		}
		m, err := w.manifest(ctx, c)
		if err != nil {
			return err
		}
		err = w.decide(ctx, agg, c.CommittedAt, &events.CheckpointBegun{
			Attempt: c.Attempt, Checkpoint: c.Checkpoint, Name: m.name, Step: c.Step, WorldSize: m.world, Participants: m.ranks,
		})
		for _, write := range m.writes { // a collection must know which files of others it names
			if err == nil {
				err = w.say(ctx, agg, write)
			}
		}
		if err == nil {
			err = w.decide(ctx, agg, c.CommittedAt, &events.CheckpointCommitted{Attempt: c.Attempt, Checkpoint: c.Checkpoint, Manifest: c.Manifest, Bytes: c.Bytes})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

type summary struct {
	name  string
	world int
	ranks []int

	writes []*events.WriteCompleted // of the ranks that name files of other checkpoints, with these
}

// manifest reads the parts of a manifest that the report leaves out, so that thousands of
// manifests are not kept in memory.
func (w *relog) manifest(ctx context.Context, c RecoveredCheckpoint) (s summary, err error) {
	reader := w.root.Reader(checkpoint.RefOf(c.Run, c.Trial, c.Checkpoint))
	m, err := reader.ReadMetadata(ctx)
	if err != nil {
		return s, err
	}
	s = summary{name: m.Name, world: m.WorldSize}
	for _, r := range m.Ranks {
		s.ranks = append(s.ranks, r.Rank)
	}
	if w.root.HasLinks() {
		return s, nil
	}
	if err := reader.SetUp(ctx, m, true); err != nil {
		return s, err
	}
	named, err := reader.Named(ctx)
	for _, r := range m.Ranks {
		if len(named[r.Rank]) == 0 {
			continue
		}
		w := &events.WriteCompleted{Attempt: c.Attempt, Checkpoint: c.Checkpoint, Rank: r.Rank, IndexDigest: r.Index.String()}
		for _, f := range named[r.Rank] {
			w.Files = append(w.Files, events.File{Name: f.Name, Size: f.Size, From: fromName(f.From)})
		}
		s.writes = append(s.writes, w)
	}
	return s, err
}

// fromName returns the name of a checkpoint in events.
func fromName(ref checkpoint.Ref) (name events.CheckpointRef) {
	name.Run, name.Trial, name.Checkpoint = ref.Names()
	return name
}

// attempts gives each trial an attempt of the recovery, with a number above all attempts in its
// directories. The next attempt is above that, so no ID of a lost attempt is assigned again.
func (w *relog) attempts(ctx context.Context) error {
	ended := map[string]bool{}
	for i, agg := range w.order {
		head := w.heads[i]
		ref := checkpoint.RefOf(head.Run, head.Trial, head.Checkpoint)
		n := w.newest[filepath.Join(ref.Run, ref.Trial)] + 1
		reason := "the store was recovered from receipts"
		err := w.decide(ctx, agg, time.Now(), &events.GroupStarted{Attempt: n, Job: w.job, Backend: recoverBackend, Resume: head.Checkpoint})
		if err == nil {
			err = w.say(ctx, agg, &events.GroupStopped{Attempt: n, Reason: reason})
		}
		if err == nil {
			err = w.decide(ctx, agg, time.Now(), &events.TrialPaused{Attempt: n, Reason: reason})
		}
		if err == nil && !ended[agg.Run] {
			ended[agg.Run] = true
			err = w.say(ctx, events.Aggregate{Run: agg.Run}, &events.JobEnded{Job: w.job, Reason: reason})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// check folds the new log and checks that it has every checkpoint.
func (w *relog) check(ctx context.Context) error {
	rows, err := viewdb.Replay(ctx, w.log, 0)
	if err != nil {
		return err
	}
	runs, err := projections.Runs(rows)
	if err != nil {
		return err
	}
	have := map[checkpoint.Ref]projections.Checkpoint{}
	for _, run := range runs {
		list, err := projections.Checkpoints(rows, run.Name, true)
		if err != nil {
			return err
		}
		for _, c := range list {
			have[RefOf(c)] = c
		}
	}
	for _, c := range w.report.Checkpoints {
		row := have[checkpoint.RefOf(c.Run, c.Trial, c.Checkpoint)]
		if row.State != projections.Committed || row.Manifest != c.Manifest || row.Superseded {
			return fmt.Errorf("in the new log, %s@%s is %s with manifest %s, superseded: %v", c.Run, c.Checkpoint, row.State, row.Manifest, row.Superseded)
		}
	}
	return nil
}

// syncTree syncs dir and every file and directory below it. A server that was shut down may still
// be removing files.
func syncTree(dir string) error {
	return filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err == nil {
			err = durable.SyncDir(path) // also syncs a file
		}
		if path != dir && errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
}
