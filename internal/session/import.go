package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/planner"
)

// ImportBackend is the backend name recorded for an importing attempt, which has
// no workers.
const ImportBackend = "import"

// ImportConfig describes an import: its source and the resulting checkpoint.
type ImportConfig struct {
	Run   string
	Trial string
	Job   string // a UUID
	Step  int64
	From  *data.Foreign
	// Sealed is imported instead of From: files that are already in the store.
	// Name is then the checkpoint's.
	Sealed  *data.Sealed
	Name    string
	InPlace bool     // adopt the files instead of copying them
	Command []string // recorded in the log
	// Reap is [Config.Reap].
	Reap func(ctx context.Context, log *slog.Logger, jobs []string, env ...string) error
	Read func(bytes int64) // called with the size of each copied item; may be nil

	Logger   *slog.Logger
	Now      func() time.Time // default time.Now
	NewID    func() string    // mints UUIDv7s
	ExitCode func(error) int  // for job.ended; default 0 or 1
}

// Imported describes an imported checkpoint.
type Imported struct {
	Checkpoint string // ID
	Attempt    int
	Ranks      int   // ranks that hold data
	Bytes      int64 // of tensors and values
	Written    int64 // of Bytes, those that were copied: neither adopted nor already present
}

// Import imports a checkpoint of another program into a run. It runs as an
// ordinary job with one attempt and one save, whose ranks are those of the other
// program. The run's line continues with the checkpoint, so parts of tensors that
// no file holds are a [data.CorruptError]. The caller holds the run's lease. If
// ctx ends, the save is aborted and the copied data is removed.
func Import(ctx context.Context, cfg ImportConfig, store Store) (Imported, error) {
	if cfg.Sealed != nil {
		cfg.From = cfg.Sealed.Foreign()
	}
	if cfg.Name == "" {
		cfg.Name = planner.DefaultName(cfg.Step)
	}
	m := cfg.From.Manifest()
	if len(m.Ranks) == 0 {
		return Imported{}, fmt.Errorf("import %s: %w: it holds no tensor and no value", cfg.From.Path(), ErrConfig)
	}
	if cfg.Step < 0 {
		return Imported{}, fmt.Errorf("import %s: %w: step %d is negative", cfg.From.Path(), ErrConfig, cfg.Step)
	}
	// A checkpoint with holes cannot be resumed from, and a lone rank's plan may
	// have holes.
	if holes := planner.Holes(m.Layout); len(holes) > 0 {
		problem := holes[0].Error()
		if len(holes) > 1 {
			problem += ", nor other parts"
		}
		return Imported{}, fmt.Errorf("import %s: %w", cfg.From.Path(), &data.CorruptError{File: cfg.From.Path(), Block: -1, Problem: problem})
	}
	bytes := m.Layout.Bytes()
	j := newJob(ctx, Config{
		Run: cfg.Run, Trial: cfg.Trial, Job: cfg.Job, Nodes: OneNode(m.WorldSize),
		Logger: cfg.Logger, Now: cfg.Now, NewID: cfg.NewID, Reap: cfg.Reap,
		// A disk slower than this is considered broken.
		SaveTimeout: 10*time.Minute + time.Duration(bytes>>20)*time.Second/4,
	}, store)
	host, err := os.Hostname()
	if err != nil {
		return Imported{}, fmt.Errorf("hostname: %w", err)
	}
	err = j.AppendOfRun(ctx, &events.JobStarted{
		Job: cfg.Job, Host: host, PID: os.Getpid(), Command: cfg.Command, NProc: len(j.cfg.Local()), NNodes: len(j.cfg.Nodes), Resume: "auto",
	})
	if err != nil {
		return Imported{}, err
	}
	im := &importer{Job: j, cfg: cfg}
	err = im.run(ctx)
	end := context.WithoutCancel(ctx) // as at the end of any job
	ended := &events.JobEnded{Job: cfg.Job}
	if err != nil {
		ended.ExitCode, ended.Reason = 1, err.Error()
	}
	if cfg.ExitCode != nil {
		ended.ExitCode = cfg.ExitCode(err)
	}
	out := Imported{Checkpoint: im.id, Attempt: im.attempt, Ranks: len(m.Ranks), Bytes: bytes}
	if err == nil {
		out.Written = im.written.Load()
	}
	return out, errors.Join(err, j.AppendOfRun(end, ended))
}

// importer is the state of one Import.
type importer struct {
	*Job
	cfg     ImportConfig
	attempt int
	id      string // of the checkpoint
	head    string // newest checkpoint of the line before the import
	written atomic.Int64
}

// run opens an attempt, saves in it, and closes it.
func (im *importer) run(ctx context.Context) error {
	trial, err := im.OpenTrial(ctx, nil)
	if err != nil {
		return err
	}
	if err := im.ReapEarlier(ctx); err != nil {
		return err
	}
	im.attempt, im.head = trial.Attempt+1, trial.Head
	im.id = planner.CheckpointID(im.cfg.Name, im.attempt, 1)
	started, err := im.StartAttempt(ctx, &events.GroupStarted{
		Attempt: im.attempt, Job: im.Job.cfg.Job, WorldSize: im.Job.cfg.World(), Backend: ImportBackend, Resume: trial.Head,
	})
	if err != nil {
		return err
	}
	err = im.save(ctx, started)
	reason := im.id + importedFrom + im.cfg.From.Path()
	if err != nil {
		reason = err.Error()
	}
	// Each of these has its own deadline.
	after := context.WithoutCancel(ctx)
	if stopped := im.Append(after, &events.GroupStopped{Attempt: im.attempt, Reason: reason}); stopped != nil {
		return errors.Join(err, stopped)
	}
	paused := im.Decide(after, &events.TrialPaused{Attempt: im.attempt, Reason: reason})
	return errors.Join(err, paused)
}

// save runs the coordinator's shell until the checkpoint is committed.
func (im *importer) save(ctx context.Context, from uint64) error {
	coord := planner.NewCoordinator(im.coordinator(im.attempt, im.Job.cfg.World()))
	s := newSaver(im.decisions, im.store, coord, im.log, staging.New(nil, im.Job.cfg.staging(im.log)))
	s.permits = make(chan struct{}, 1) // each holds a whole chunk in memory
	s.resume, s.from = im.head, im.cfg.From.Path()
	s.put = func(_ context.Context, c planner.Write) (data.Written, error) { return im.put(ctx, s, c) }
	work, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	if im.cfg.Sealed != nil {
		s.putWhole(im.id, im.cfg.Sealed)
	}
	saving := make(chan error, 1)
	go func() { saving <- s.run(work, from, from) }()

	err := im.offer(ctx)
	var reply client.WaitReply
	if err == nil {
		// Not ctx: an interrupted copy fails its write, and the abort of the save
		// records that in the log.
		reply, err = s.wait(work, im.id, im.cfg.From.Manifest().Ranks[0].Rank, client.Committed)
	}
	if err == nil && reply.State == client.Aborted {
		if err = context.Cause(ctx); err == nil {
			err = errors.New(reply.Reason)
		}
		err = fmt.Errorf("import %s: %w", im.cfg.From.Path(), err)
	}
	end, lastErr := im.store.Log.LastOf(work, im.decisions.agg)
	if lastErr != nil {
		stop()
		return errors.Join(err, lastErr, <-saving)
	}
	s.drain <- drain{"the import ended before the save was complete", end}
	late, cancel := im.store.calls.Timeout(work, im.Job.cfg.DrainTimeout)
	defer cancel()
	select {
	case drained := <-saving:
		return errors.Join(err, drained)
	case <-late.Done():
		return errors.Join(err, fmt.Errorf("%w: the import is not finished in time; the next job of the run ends it", ErrDrain))
	}
}

// offer appends every rank's plan and seal.
func (im *importer) offer(ctx context.Context) error {
	items := im.cfg.From.Items
	if !im.cfg.InPlace && im.cfg.Sealed == nil {
		prepared := map[int][]checkpoint.Item{}
		for _, r := range im.cfg.From.Manifest().Ranks {
			local, err := im.store.Data.Writer(im.ref()).PrepareLocalPlan(ctx, checkpoint.Local{Rank: r.Rank, Items: items(r.Rank)})
			if err != nil {
				return err
			}
			prepared[r.Rank] = local.Items
		}
		items = func(rank int) []checkpoint.Item { return prepared[rank] }
	}
	return offerWhole(ctx, im.decisions, im.store.Blobs, im.attempt, im.id, im.cfg.Name, im.cfg.Step, im.Job.cfg.World(), im.cfg.From.Manifest().Ranks, items)
}

func (im *importer) ref() checkpoint.Ref {
	return checkpoint.RefOf(im.Job.cfg.Run, im.Job.cfg.Trial, im.id)
}

// put copies or adopts one rank's part of the global plan.
func (im *importer) put(ctx context.Context, s *saver, c planner.Write) (data.Written, error) {
	w := im.store.Data.Writer(s.ref(c.Checkpoint))
	if !im.cfg.InPlace && len(s.basesOf(ctx, c.Checkpoint)) > 0 {
		w = s.reusing(ctx, c.Checkpoint) // reads the source more than once
	}
	if err := w.SetUp(ctx, c.Rank == 0); err != nil {
		return data.Written{}, err
	}
	if im.cfg.InPlace {
		return w.AdoptData(ctx, c.Rank, c.Items, im.cfg.From)
	}
	from := data.NewCopySource(ctx, im.cfg.From, c.Rank, c.Items, nil)
	got, err := w.WriteData(ctx, c.Rank, c.Items, &toldSource{Source: from, read: im.cfg.Read, told: map[int]bool{}})
	im.written.Add(got.BytesWritten)
	return got, err
}

// toldSource reports each item once, however often it is read.
type toldSource struct {
	data.Source
	read func(bytes int64) // may be nil
	told map[int]bool
}

// Item implements data.Source.
func (s *toldSource) Item(i int) ([]byte, error) {
	data, err := s.Source.Item(i)
	if err == nil && s.read != nil && !s.told[i] {
		s.told[i] = true
		s.read(int64(len(data)))
	}
	return data, err
}
