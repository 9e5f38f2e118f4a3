package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
)

// Job is one job's hold on its trial, on one node. It appends the facts and
// decisions of the job, owns the shared memory of its ranks, and ends the saves
// that earlier attempts left open. It exists apart from [Group] because it lives
// longer: each attempt of the job has a group of its own.
type Job struct {
	cfg       Config
	store     Store
	log       *slog.Logger
	writer    *eventWriter
	decisions *decisionLog // nil before OpenTrial
	arenas    *staging.Arenas
	runtime   string // directory of this job's sockets
}

// NewJob returns the hold of a job on its trial. The caller holds the run's
// lease. All that the job says and asks waits for a log that does not answer or
// has no room; after ctx has ended, it waits for a bounded time.
func NewJob(ctx context.Context, cfg Config, store Store) *Job {
	j := newJob(ctx, cfg, store)
	j.store = j.store.untilRoom()
	return j
}

// newJob is [NewJob] for a job that does not wait for room.
func newJob(ctx context.Context, cfg Config, store Store) *Job {
	cfg = cfg.WithDefaults()
	store = store.patiently(ctx, cfg.Logger)
	store.limit = cfg.SaveTimeout
	j := &Job{cfg: cfg, store: store, log: cfg.Logger, writer: newEventWriter(cfg, store.Log)}
	j.writer.words = store.words
	return j
}

// Store returns the store of the job, whose calls wait as [NewJob] says.
func (j *Job) Store() Store { return j.store }

// Open makes the directory of the job's sockets and takes its shared memory.
func (j *Job) Open() (err error) {
	j.runtime = filepath.Join(j.store.Runtime, "job-"+j.cfg.Job[len(j.cfg.Job)-8:])
	if err := os.MkdirAll(j.runtime, 0o700); err != nil {
		return fmt.Errorf("make the job's runtime directory: %w", err)
	}
	if j.arenas, err = staging.Open(j.store.Shared, j.store.ID, j.cfg.Run, j.cfg.Node, j.store.Room, j.log); err != nil {
		return errors.Join(err, os.RemoveAll(j.runtime))
	}
	return nil
}

// Close gives back what Open has taken, when the job has ended with err, and
// returns err with its own errors. A writer that hangs may wake up and read what
// it has to write: its memory is left to the end of the process, and to the next
// trainer.
func (j *Job) Close(err error) error {
	if !errors.Is(err, ErrStuck) {
		err = errors.Join(err, j.arenas.Close())
	}
	return errors.Join(err, os.RemoveAll(j.runtime))
}

// OpenTrial finds or creates the trial, and brings to an end what an earlier
// trainer has left open. noted gets the sequence of each decision of the trial
// that the job makes or finds made by others; it may be nil.
func (j *Job) OpenTrial(ctx context.Context, noted func(seq uint64)) (projections.Trial, error) {
	trial, err := j.store.Views.Trial(ctx, j.cfg.Run, j.cfg.Trial)
	created := err == nil
	if err != nil && !errors.Is(err, projections.ErrNotFound) {
		return trial, err
	}
	j.decisions = &decisionLog{
		eventWriter: j.writer, agg: events.Aggregate{Run: j.cfg.Run, Trial: j.cfg.Trial},
		conflict: j.store.Conflict, attempt: trial.Attempt, last: trial.LaneSeq, noted: noted,
	}
	if !created {
		return trial, j.Decide(ctx, &events.TrialCreated{Config: j.cfg.TrialConfig})
	}
	if err := j.recoverSaves(ctx, trial); err != nil {
		return trial, err
	}
	return j.store.Views.Trial(ctx, j.cfg.Run, j.cfg.Trial)
}

// StartAttempt opens an attempt by its group.started, and returns the sequence
// of that. What the job decides from now on is refused once a newer attempt has
// been started: see [ErrFenced].
func (j *Job) StartAttempt(ctx context.Context, started *events.GroupStarted) (uint64, error) {
	j.decisions.attempt = started.Attempt
	r, err := j.decisions.decide(ctx, started)
	return r.Sequence, err
}

// Decide appends a decision about the trial. It returns ErrFenced if a newer
// attempt has been started. It must not be called before OpenTrial.
func (j *Job) Decide(ctx context.Context, body events.Body) error {
	_, err := j.decisions.decide(ctx, body)
	return err
}

// Append appends facts of this node about the trial. They are durable on return.
func (j *Job) Append(ctx context.Context, bodies ...events.Body) error {
	return j.writer.say(ctx, bodies...)
}

// AppendOfRun appends facts of this node about the run. They are durable on
// return.
func (j *Job) AppendOfRun(ctx context.Context, bodies ...events.Body) error {
	return j.writer.sayAs(ctx, events.None, j.writer.node, bodies...)
}

// AppendOfRunNow is AppendOfRun without waiting for room. It returns the facts
// as they were recorded.
func (j *Job) AppendOfRunNow(ctx context.Context, bodies ...events.Body) ([]events.Recorded, error) {
	facts, err := j.writer.facts(events.None, j.writer.node, bodies)
	if err != nil {
		return nil, err
	}
	sequences, err := j.writer.log.Append(ctx, facts...)
	if err != nil {
		return nil, err
	}
	out := make([]events.Recorded, len(facts))
	for i, f := range facts {
		out[i] = events.Recorded{Event: f.Event, Sequence: sequences[i]}
	}
	return out, nil
}

// Hurry ends the job's patience with its log, because of why: calls that are not
// answered now share one deadline.
func (j *Job) Hurry(why error) {
	if j.store.words != nil {
		j.store.words.tell(why)
	}
}

// KeepStaged keeps what the slots that a dead trainer left hold of a checkpoint,
// and frees the others.
func (j *Job) KeepStaged(checkpoint string) error { return j.arenas.KeepLeft(checkpoint, j.log) }

// Staged returns the ranks whose bytes of a checkpoint the slots of this node
// hold.
func (j *Job) Staged(checkpoint string) (ranks []int) {
	copies, release := j.arenas.Hold(checkpoint)
	defer release()
	for rank := range copies {
		ranks = append(ranks, rank)
	}
	return ranks
}

// earlierAttempts is how many attempts back processes are looked for.
const earlierAttempts = 10

// ReapEarlier kills what earlier jobs of the trial have left: their guard may
// have been killed with their trainer, or be still at work.
func (j *Job) ReapEarlier(ctx context.Context) error {
	attempts, err := j.store.Views.Attempts(ctx, j.cfg.Run, j.cfg.Trial)
	if err != nil && !errors.Is(err, projections.ErrNotFound) {
		return err
	}
	slices.SortFunc(attempts, func(a, b projections.Attempt) int { return b.Attempt - a.Attempt })
	var jobs []string
	for _, a := range attempts[:min(len(attempts), earlierAttempts)] {
		if a.Job != "" && a.Job != j.cfg.Job && !slices.Contains(jobs, a.Job) {
			jobs = append(jobs, a.Job)
		}
	}
	if len(jobs) == 0 {
		return nil
	}
	if j.cfg.Reap == nil {
		return fmt.Errorf("%w: end what earlier jobs of the run have left: no Reap is configured", ErrConfig)
	}
	// The log names them, and a client that can append to it can name a live job: of another
	// store or run, or of the store that this one is a copy of.
	own := []string{client.EnvStoreID + "=" + j.store.ID, client.EnvRun + "=" + j.cfg.Run, client.EnvTrial + "=" + j.cfg.Trial}
	if err := j.cfg.Reap(ctx, j.log, jobs, own...); err != nil {
		return fmt.Errorf("end what earlier jobs of the run have left: %w", err)
	}
	return nil
}

func (j *Job) coordinator(attempt, world int) planner.CoordinatorConfig {
	return planner.CoordinatorConfig{
		Store: j.store.ID, Run: j.cfg.Run, Trial: j.cfg.Trial, Attempt: attempt,
		WorldSize: world, Timeout: j.cfg.SaveTimeout, Strict: j.cfg.StrictReplicas,
	}
}

func (j *Job) staging() staging.Config {
	return staging.Config{
		Slots: j.cfg.StagingSlots, Busy: j.cfg.WhenBusy, Ranks: len(j.cfg.Local()),
		Memory: j.cfg.StagingMemory, Log: j.log,
	}
}
