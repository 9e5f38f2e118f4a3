package session

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session/broadcast"
	"github.com/ckptstore/ckptstore/internal/session/replica"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
)

// Job is one job's hold on its trial, on one node. It appends the facts and
// decisions of the job, owns the shared memory of its ranks, and ends the saves
// that earlier attempts left open. It is separate from [Group] because it lives
// longer: each attempt of the job has its own group.
type Job struct {
	cfg       Config
	store     Store
	log       *slog.Logger
	writer    *eventWriter
	decisions *decisionLog // nil before OpenTrial
	arenas    *staging.Arenas
	runtime   string          // directory of this job's sockets
	world     int             // ranks of the last group
	keeper    *replica.Keeper // of replicas of other nodes; nil: the job has none
	shares    *broadcast.Shares
}

// NewJob returns a job's hold on its trial. The caller holds the run's lease. All
// appends and queries of the job wait for a log that does not answer or has no
// room; once ctx has ended, they wait for a bounded time.
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
	j := &Job{cfg: cfg, store: store, log: cfg.Logger, writer: newEventWriter(cfg, store.Log), shares: broadcast.NewShares(broadcast.Defaults, cfg.Logger)}
	j.writer.calls = store.calls
	return j
}

// Store returns the job's store, whose calls wait as described at [NewJob].
func (j *Job) Store() Store { return j.store }

// Open creates the job's socket directory and takes its shared memory.
func (j *Job) Open() (err error) {
	name := "job-" + j.cfg.Job[len(j.cfg.Job)-8:]
	if j.cfg.Node > 0 { // nodes may share a machine
		name += fmt.Sprint("-n", j.cfg.Node)
	}
	memory := j.cfg.Node
	if j.cfg.Aside {
		name += "-c"
		memory += asideNode
	}
	if j.cfg.Trial != projections.DefaultTrial { // trials may share a job
		name += "-" + events.EncodeName(j.cfg.Trial)
	}
	j.runtime = filepath.Join(j.store.Runtime, name)
	if err := os.MkdirAll(j.runtime, 0o700); err != nil {
		return fmt.Errorf("make the job's runtime directory: %w", err)
	}
	if j.arenas, err = staging.Open(j.store.Shared, j.store.ID, memoryOf(j.cfg), memory, j.store.Room, j.log); err != nil {
		return errors.Join(err, os.RemoveAll(j.runtime))
	}
	if j.cfg.Replicas > 0 && !j.cfg.Aside {
		j.keeper = replica.NewKeeper(j.arenas, j.cfg.StagingMemory, j.log)
	}
	return nil
}

// asideNode is above all indexes of nodes: it tells the directory of a process without ranks from
// that of its node.
const asideNode = 1 << 20

// memoryOf names the shared memory of a trial's ranks on a node. Trials of a run may be
// trained at once. The name of a run has no zero byte, so none has another's trial's name.
func memoryOf(cfg Config) string {
	if cfg.Trial == projections.DefaultTrial {
		return cfg.Run
	}
	return cfg.Run + "\x00" + cfg.Trial
}

// Keeper returns the handler by which another node copies its sealed slots to this one, or
// nil if the job has no replicas. The caller authenticates the requests.
func (j *Job) Keeper() http.Handler {
	if j.keeper == nil {
		return nil
	}
	return j.keeper
}

// Shares returns the handler by which other nodes take what this one reads for them in loads.
// The caller authenticates the requests.
func (j *Job) Shares() http.Handler { return j.shares }

// Close releases what Open took, after the job has ended with err. It returns err
// joined with its own errors. A hung writer may wake up and read its source, so
// its memory is kept until the process ends, for the next trainer.
func (j *Job) Close(err error) error {
	j.shares.Close()
	if j.keeper != nil {
		j.keeper.Close()
	}
	if !errors.Is(err, ErrStuck) {
		err = errors.Join(err, j.arenas.Close())
	}
	return errors.Join(err, os.RemoveAll(j.runtime))
}

// OpenTrial finds or creates the trial and ends the saves that an earlier trainer
// left open. noted receives the sequence of each decision of the trial, by this
// job or others; it may be nil.
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

// JoinAttempt prepares for an attempt that the coordinating process has opened: this
// process appends facts about it, and no decision.
func (j *Job) JoinAttempt(number int) {
	j.decisions = &decisionLog{
		eventWriter: j.writer, agg: events.Aggregate{Run: j.cfg.Run, Trial: j.cfg.Trial},
		conflict: j.store.Conflict, attempt: number,
	}
}

// StartAttempt opens an attempt by appending its group.started, and returns that
// event's sequence. Once a newer attempt has started, the log refuses the job's
// decisions: see [ErrFenced].
func (j *Job) StartAttempt(ctx context.Context, started *events.GroupStarted) (uint64, error) {
	j.decisions.attempt = started.Attempt
	r, err := j.decisions.decide(ctx, started)
	return r.Sequence, err
}

// Term returns the ID of the decision by which this process coordinates its group, for
// [events.GroupStopped]: another process may coordinate the group when the fact comes into the log. It is
// empty before the first attempt.
func (j *Job) Term() string {
	if j.decisions == nil {
		return ""
	}
	j.decisions.mu.Lock()
	defer j.decisions.mu.Unlock()
	return j.decisions.term
}

// JobTerm is [Job.Term] for [events.JobEnded]: the group.coordinator by which this process took the place of another,
// else the group.started of its newest group. Another process may continue the job when the fact comes into the log.
func (j *Job) JobTerm() string {
	if j.decisions == nil {
		return ""
	}
	j.decisions.mu.Lock()
	defer j.decisions.mu.Unlock()
	return cmp.Or(j.decisions.took, j.decisions.term)
}

// Decide appends a decision about the trial. It returns ErrFenced if a newer
// attempt has started. Call it only after OpenTrial.
func (j *Job) Decide(ctx context.Context, body events.Body) error {
	_, err := j.decisions.decide(ctx, body)
	return err
}

// Append appends this node's facts about the trial, durably.
func (j *Job) Append(ctx context.Context, bodies ...events.Body) error {
	return j.writer.record(ctx, bodies...)
}

// AppendCoordinating is [Job.Append] for facts that only the process that coordinates the group may record. It
// reads the lane of the trial first, and returns an [ErrFenced] if another process may decide in place of this one.
func (j *Job) AppendCoordinating(ctx context.Context, bodies ...events.Body) error {
	if err := j.decisions.overtaken(ctx); err != nil {
		return err
	}
	return j.Append(ctx, bodies...)
}

// AppendOfRun appends this node's facts about the run, durably.
func (j *Job) AppendOfRun(ctx context.Context, bodies ...events.Body) error {
	return j.writer.recordAs(ctx, events.None, j.writer.node, bodies...)
}

// AppendOfRunNow is AppendOfRun without waiting for room. It returns the recorded
// facts.
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

// Hurry ends the job's patience with its log, because of why: from now on
// unanswered calls share one deadline.
func (j *Job) Hurry(why error) {
	j.store.calls.Hurry(why)
}

// KeepStaged keeps a checkpoint's data in the slots that a dead trainer left, and
// frees the other slots.
func (j *Job) KeepStaged(checkpoint string) error { return j.arenas.KeepLeft(checkpoint, j.log) }

// Staged returns the ranks whose part of a checkpoint is in the slots of this
// node.
func (j *Job) Staged(checkpoint string) (ranks []int) {
	copies, release := j.arenas.Hold(checkpoint)
	defer release()
	for rank := range copies {
		ranks = append(ranks, rank)
	}
	return ranks
}

// earlierAttempts is the number of past attempts whose processes are looked for.
const earlierAttempts = 10

// ReapEarlier kills the processes that earlier jobs of the trial left behind:
// their guard may have been killed with their trainer, or may still be at work.
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
		return fmt.Errorf("%w: kill processes of earlier jobs of the run: no Reap is configured", ErrConfig)
	}
	// The jobs come from the log, and a client with append access can name a live
	// job of another store or run, or of the store that this one is a copy of.
	own := []string{client.EnvStoreID + "=" + j.store.ID, client.EnvRun + "=" + j.cfg.Run, client.EnvTrial + "=" + j.cfg.Trial}
	if err := j.cfg.Reap(ctx, j.log, jobs, own...); err != nil {
		return fmt.Errorf("kill processes of earlier jobs of the run: %w", err)
	}
	return nil
}

func (j *Job) coordinator(attempt, world int) planner.CoordinatorConfig {
	return planner.CoordinatorConfig{
		Store: j.store.ID, Run: j.cfg.Run, Trial: j.cfg.Trial, Attempt: attempt,
		WorldSize: world, Timeout: j.cfg.SaveTimeout, Strict: j.cfg.StrictReplicas,
	}
}

func (c Config) staging(log *slog.Logger) staging.Config {
	return staging.Config{Slots: c.StagingSlots, Busy: c.WhenBusy, Ranks: len(c.Local()), Peers: len(c.peers), Memory: c.StagingMemory, Log: log}
}
