package projections

import (
	"math"
	"slices"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// Tally counts what has happened in a run, for metrics: a metrics server wants totals, and no
// row of the run may grow with its history.
type Tally struct {
	Run       string         `json:"run"`
	Attempts  map[string]int `json:"attempts,omitempty"` // that ended, by their failure: none, worker, infrastructure, preemption, lost, other
	Committed int            `json:"committed"`          // saves
	Aborted   int            `json:"aborted"`            // saves
	Written   int64          `json:"written"`            // bytes of committed saves
	Reused    int64          `json:"reused"`             // bytes of committed saves

	Staging  Spread         `json:"staging"`            // of committed saves, from their begin to the last seal, by the clock of the log's server
	Saving   Spread         `json:"saving"`             // of committed saves, from their begin to the commit
	Blocking Spread         `json:"blocking"`           // of committed saves: what they held up the training
	Restores []RestoreTally `json:"restores,omitempty"` // by tier and result

	LastCommit    string          `json:"last_commit,omitempty"` // ID of the newest committed save
	LastCommitSeq uint64          `json:"last_commit_seq,omitempty"`
	LastCommitAt  time.Time       `json:"last_commit_at,omitzero"`
	LastSaving    float64         `json:"last_saving_s,omitempty"` // its seconds from begin to commit
	Slowest       *Worker         `json:"slowest,omitempty"`       // its rank whose copy and write took longest; nil: unknown
	Gaps          []time.Duration `json:"gaps,omitempty"`          // between the newest commits, each of one attempt, the newest last
}

// SpreadBounds are the upper bounds of a [Spread], in seconds.
var SpreadBounds = [...]float64{0.5, 2, 10, 60, 300}

// Spread is how durations are distributed. Counts has one number more than [SpreadBounds]:
// that of the durations above the last bound.
type Spread struct {
	Counts [len(SpreadBounds) + 1]uint64 `json:"counts"`
	Sum    float64                       `json:"sum_s"`
}

// add counts a duration. A negative one, of a clock that jumped, does not count.
func (s *Spread) add(d time.Duration) {
	if d < 0 {
		return
	}
	at, _ := slices.BinarySearch(SpreadBounds[:], d.Seconds()) // the first bound that is not less
	s.Counts[at]++
	s.Sum += d.Seconds()
}

// RestoreTally counts loads with the same sources and result.
type RestoreTally struct {
	Tier   string  `json:"tier"` // as in [events.RestoreCompleted]; none: a load that failed, other: unknown ones
	Failed bool    `json:"failed,omitempty"`
	Count  int     `json:"count"`
	Sum    float64 `json:"sum_s"` // seconds from begin to end
}

// mostGaps bounds [Tally.Gaps].
const mostGaps = 8

// tally changes the row of the run's totals.
func (f *fold) tally(change func(*Tally)) error {
	k := key(keyTally, f.run)
	t, found, err := load[Tally](f.t, k)
	if err != nil {
		return err
	}
	if !found {
		t = Tally{Run: f.run}
	}
	change(&t)
	return store(f.t, k, t)
}

// failures are the values of an attempt's end that are counted by name.
var failures = []string{"worker", "infrastructure", "preemption"}

func (t *Tally) ended(failure string) {
	if t.Attempts == nil {
		t.Attempts = map[string]int{}
	}
	t.Attempts[failure]++
}

// tallyStop counts the end of the newest attempt. That of an older one was counted as lost when
// the next began.
func (f *fold) tallyStop(b *events.GroupStopped) error {
	if u, found, err := load[usageRow](f.t, usageKey(f.run, f.name)); err != nil || !found || u.Attempt != b.Attempt {
		return err
	}
	failure := b.Failure
	switch {
	case failure == "":
		failure = "none"
	case !slices.Contains(failures, failure):
		failure = "other"
	}
	return f.tally(func(t *Tally) { t.ended(failure) })
}

// tallyAttempt counts the attempt before a new one as lost if nothing recorded its end: its
// trainer was killed.
func (f *fold) tallyAttempt(*events.GroupStarted) error {
	before, found, err := load[usageRow](f.t, usageKey(f.run, f.name))
	if err != nil || !found || before.Phase == stopped {
		return err
	}
	return f.tally(func(t *Tally) { t.ended("lost") })
}

// tallyCommit counts a committed save. timed is false if the process that committed the save
// did not begin it: the time between is not that of the save.
func (f *fold) tallyCommit(c Checkpoint, blocked time.Duration, timed bool, slowest *Worker) error {
	gap, err := f.commits(c.Attempt)
	if err != nil {
		return err
	}
	return f.tally(func(t *Tally) {
		t.Committed++
		t.Written += c.BytesWritten
		t.Reused += c.BytesReused
		took := f.at().Sub(c.BegunAt)
		if timed {
			t.Saving.add(took)
			t.Blocking.add(blocked)
			if !c.BegunStored.IsZero() && !c.StagedStored.IsZero() {
				t.Staging.add(c.StagedStored.Sub(c.BegunStored))
			}
		}
		if gap > 0 {
			t.Gaps = append(t.Gaps[max(0, len(t.Gaps)-mostGaps+1):], gap)
		}
		t.Slowest = slowest
		t.LastCommit, t.LastCommitSeq, t.LastCommitAt, t.LastSaving = c.ID, f.r.Sequence, f.at(), 0
		if timed {
			t.LastSaving = max(0, took).Seconds()
		}
	})
}

// tallyAbort counts a save that was aborted. It has held up the training anyway.
func (f *fold) tallyAbort(c Checkpoint) error {
	blocked, _ := blockedBy(c)
	if _, err := f.saveEnds(c.Attempt, blocked); err != nil {
		return err
	}
	return f.tally(func(t *Tally) { t.Aborted++ })
}

// tiers are the sources of a load that are counted by name.
var tiers = []string{"slots", "peers", "files"}

// tallyRestore counts a load that has begun and ended.
func (f *fold) tallyRestore(row Restore) error {
	of := RestoreTally{Failed: row.Error != ""}
	parts := strings.Split(row.Tier, "+")
	known := slices.DeleteFunc(slices.Clone(tiers), func(tier string) bool { return !slices.Contains(parts, tier) })
	switch {
	case of.Failed || row.Tier == "":
		of.Tier = "none"
	case slices.ContainsFunc(parts, func(part string) bool { return !slices.Contains(tiers, part) }):
		of.Tier = "other"
	default:
		of.Tier = strings.Join(known, "+")
	}
	return f.tally(func(t *Tally) {
		at := slices.IndexFunc(t.Restores, func(r RestoreTally) bool { return r.Tier == of.Tier && r.Failed == of.Failed })
		if at < 0 {
			at = len(t.Restores)
			t.Restores = append(t.Restores, of)
		}
		t.Restores[at].Count++
		t.Restores[at].Sum += max(0, row.EndedAt.Sub(row.BegunAt)).Seconds()
	})
}

// getTally returns the totals of a run; zero for a run without any.
func getTally(r Reader, run string) (Tally, error) {
	t, _, err := load[Tally](r, key(keyTally, run))
	t.Run = run
	return t, err
}

// tallySaved counts a save with its commit.
func (f *fold) tallySaved(c Checkpoint) error {
	blocked, known := blockedBy(c)
	timed, err := f.saveEnds(c.Attempt, blocked)
	if err != nil {
		return err
	}
	if !known {
		blocked = -1 // it does not count
	}
	var slowest *Worker
	if p := c.Phases; p != nil && p.Slowest >= 0 {
		w, found, err := load[Worker](f.t, workerKey(f.run, f.name, c.Attempt, p.Slowest))
		if err != nil {
			return err
		}
		if found {
			slowest = &Worker{Attempt: w.Attempt, Rank: w.Rank, Node: w.Node, LocalRank: w.LocalRank, State: w.State}
		}
	}
	return f.tallyCommit(c, blocked, timed, slowest)
}

// blockedBy returns how long a save held up its ranks, at most: the longest wait for a slot and the
// longest copy, which may be those of two ranks. known is false if no rank measured them.
func blockedBy(c Checkpoint) (d time.Duration, known bool) {
	if c.Phases == nil {
		return 0, false
	}
	for _, part := range []*float64{c.Phases.Waited, c.Phases.Copied} {
		if part != nil {
			d, known = d+duration(*part), true
		}
	}
	return d, known
}

// duration returns seconds as a duration; numbers that no clock shows are cut.
func duration(seconds float64) time.Duration {
	const most = 1 << 32
	if !(seconds > 0) { // also NaN
		return 0
	}
	return time.Duration(math.Round(min(seconds, most) * float64(time.Second)))
}
