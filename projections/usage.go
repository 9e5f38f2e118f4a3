package projections

import (
	"math"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// A trial has one row of its time: how long its attempts ran, and to what use. The row is
// as large after a year as after a minute.
//
//	starting ──▶ training ──▶ ending ──▶ stopped ──▶ starting, of the next attempt
//	    └── restoring, while a load is open ──┘
//
// The time is that of one clock, which belongs to the process that coordinates the attempt:
// only events of that process move it. Between two of them the time counts for the
// phase that the trial was in. A clock that jumps back, or an event that arrives late, adds
// nothing until the clock has passed its latest time: no second counts twice.
//
// Training leads somewhere or not. A checkpoint notes how much training its line has
// when its save begins. A resume from it puts the line back to that amount. The training
// that is not in the line is lost, until a later resume takes it into the line again.

// phase is what an attempt does.
type phase string

const (
	starting phase = "starting" // its ranks have not all connected
	training phase = "training"
	ending   phase = "ending" // a worker has failed: its saves are finished and its processes ended
	stopped  phase = "stopped"
)

// usageRow is the time of a trial, in nanoseconds. The newest attempt has the clock.
type usageRow struct {
	Attempt int          `json:"attempt"`
	Source  string       `json:"source"`         // the process that has the clock
	Node    events.Actor `json:"node,omitempty"` // its actor in facts; unknown before training started
	Phase   phase        `json:"phase"`
	Loads   int          `json:"loads,omitempty"` // open ones
	Last    time.Time    `json:"last"`            // latest time of the clock

	Committed time.Time `json:"committed,omitzero"` // newest commit of a save of the attempt

	Wall      time.Duration `json:"wall"`      // of all attempts
	Trained   time.Duration `json:"trained"`   // training, without what saves blocked
	Line      time.Duration `json:"line"`      // the part of it that led to the present
	Own       time.Duration `json:"own"`       // the part of it of this attempt
	Restoring time.Duration `json:"restoring"` // while a load was open
	Blocked   time.Duration `json:"blocked"`   // in which saves held up the training
}

// advance moves the clock to a time.
func (u *usageRow) advance(to time.Time) {
	d := min(to.Sub(u.Last), math.MaxInt64-u.Wall) // everything else is a part of the wall time
	if d <= 0 {
		return
	}
	u.Last = to
	u.Wall += d
	switch {
	case u.Phase != starting && u.Phase != training:
	case u.Loads > 0:
		u.Restoring += d
	case u.Phase == training:
		u.Trained, u.Line, u.Own = u.Trained+d, u.Line+d, u.Own+d
	}
}

// block takes training that a save held up away from the attempt.
func (u *usageRow) block(d time.Duration) {
	d = max(0, min(d, u.Own, u.Line, u.Trained))
	u.Own, u.Line, u.Trained, u.Blocked = u.Own-d, u.Line-d, u.Trained-d, u.Blocked+d
}

// resume puts the line back to a checkpoint.
func (u *usageRow) resume(trained time.Duration) { u.Line = max(0, min(trained, u.Trained)) }

// usage changes the row of the trial's time for an event of an attempt. It does nothing for
// an event of an older one.
func (f *fold) usage(attempt int, change func(*usageRow) error) error {
	k := usageKey(f.run, f.name)
	u, found, err := load[usageRow](f.t, k)
	if err != nil || !found || u.Attempt != attempt {
		return err
	}
	before := u
	if err := change(&u); err != nil || u == before {
		return err
	}
	return store(f.t, k, u)
}

// tick moves the clock to the event's time, if the event is of the clock's process.
func (f *fold) tick(u *usageRow) (ticked bool) {
	if f.r.Source != u.Source || f.r.Scope.Actor != events.Server && u.Node != "" && f.r.Scope.Actor != u.Node {
		return false
	}
	u.advance(f.at())
	return true
}

// settle moves the clock to the event's time, or else to the newest report of the attempt:
// reports do not move it, since each costs one row only.
func (f *fold) settle(u *usageRow) error {
	if f.tick(u) {
		return nil
	}
	return u.reported(f.t, f.run, f.name)
}

// reported moves the clock of a training to the newest report of its attempt.
func (u *usageRow) reported(r Reader, run, trial string) error {
	if u.Phase != training {
		return nil
	}
	newest, found, err := newestReport(r, run, trial, u.Attempt)
	if err == nil && found {
		u.advance(newest.Time.UTC())
	}
	return err
}

// attemptBegins gives the clock to a new attempt. The time since the stop of the one
// before it counts if one process runs both: a new job may start much later.
func (f *fold) attemptBegins(b *events.GroupStarted) error {
	k := usageKey(f.run, f.name)
	u, found, err := load[usageRow](f.t, k)
	if err != nil {
		return err
	}
	if found && u.Phase != stopped {
		if err := u.reported(f.t, f.run, f.name); err != nil {
			return err
		}
		u.Phase = ending
	}
	if found && u.Source == f.r.Source {
		u.advance(f.at())
	}
	u.Attempt, u.Source, u.Node, u.Phase, u.Loads, u.Own, u.Last = b.Attempt, f.r.Source, "", starting, 0, 0, f.at()
	u.Committed = time.Time{}
	trained, err := f.trainedAt(b.Resume)
	if err != nil {
		return err
	}
	u.resume(trained)
	return store(f.t, k, u)
}

// trainedAt returns the training in the line of one of the trial's own checkpoints; 0 of others.
func (f *fold) trainedAt(id string) (time.Duration, error) {
	c, found, err := f.checkpoint(id)
	if err != nil || !found || c.State != Committed {
		return 0, err
	}
	return duration(c.Trained), nil
}

func (f *fold) trainingBegins(attempt int) error {
	return f.usage(attempt, func(u *usageRow) error {
		if u.Phase != starting {
			return nil
		}
		if f.r.Source == u.Source {
			u.Node = f.r.Scope.Actor
		}
		f.tick(u)
		u.Phase = training
		return nil
	})
}

// workerFailed ends the training of an attempt.
func (f *fold) workerFailed(b *events.WorkerExited) error {
	if b.Code == 0 && b.Signal == "" && !b.Unseen {
		return nil
	}
	return f.usage(b.Attempt, func(u *usageRow) error {
		if u.Phase != starting && u.Phase != training {
			return nil
		}
		err := f.settle(u)
		u.Phase = ending
		return err
	})
}

func (f *fold) attemptStops(attempt int) error {
	return f.usage(attempt, func(u *usageRow) error {
		if u.Phase == stopped {
			return nil
		}
		err := f.settle(u)
		u.Phase, u.Loads = stopped, 0
		return err
	})
}

// loadBegins opens a load. With rewound, the line continues from that checkpoint.
func (f *fold) loadBegins(b *events.RestoreBegun, ended bool) error {
	return f.usage(b.Attempt, func(u *usageRow) error {
		f.tick(u)
		if !ended {
			u.Loads++
		}
		return nil
	})
}

// loadRewinds puts the line back to the checkpoint that a load took.
func (f *fold) loadRewinds(attempt int, checkpoint string) error {
	trained, err := f.trainedAt(checkpoint)
	if err != nil {
		return err
	}
	return f.usage(attempt, func(u *usageRow) error {
		u.resume(trained)
		return nil
	})
}

// loadEnds closes a load that has begun.
func (f *fold) loadEnds(attempt int) error {
	return f.usage(attempt, func(u *usageRow) error {
		f.tick(u)
		u.Loads = max(0, u.Loads-1)
		return nil
	})
}

// saveBegins returns the training in the line of a save that begins, in seconds.
func (f *fold) saveBegins(attempt int) (trained float64, err error) {
	err = f.usage(attempt, func(u *usageRow) error {
		f.tick(u)
		trained = u.Line.Seconds()
		return nil
	})
	return trained, err
}

// saveEnds counts the time in which a save has held up its ranks. blocked is that of the
// rank that was held up longest: the others wait for it in the next step. ticked reports whether
// the event is of the process that runs the attempt.
func (f *fold) saveEnds(attempt int, blocked time.Duration) (ticked bool, err error) {
	err = f.usage(attempt, func(u *usageRow) error {
		ticked = f.tick(u)
		u.block(blocked)
		return nil
	})
	return ticked, err
}

// commits notes a commit of an attempt, and returns the time since the one before it in the same attempt;
// 0 for the first. A restart takes what it takes, so it is no part of the time between two commits.
func (f *fold) commits(attempt int) (gap time.Duration, err error) {
	err = f.usage(attempt, func(u *usageRow) error {
		if !u.Committed.IsZero() {
			gap = f.at().Sub(u.Committed)
		}
		u.Committed = f.at()
		return nil
	})
	return gap, err
}

// Usage is the time of the attempts of a trial, or of all trials of a run, in seconds. Its
// parts but Wall add up to Wall.
type Usage struct {
	Wall      float64 `json:"wall_s"`      // of all attempts, and between the attempts of one job
	Kept      float64 `json:"kept_s"`      // training that led to the present
	Lost      float64 `json:"lost_s"`      // training that a resume has gone behind
	Restoring float64 `json:"restoring_s"` // while a checkpoint was loaded
	Blocked   float64 `json:"blocked_s"`   // in which saves held up the training
	Other     float64 `json:"other_s"`     // starts, ends and restarts
}

// usage returns the row in seconds.
func (u usageRow) usage() Usage {
	out := Usage{
		Wall: u.Wall.Seconds(), Kept: u.Line.Seconds(), Lost: (u.Trained - u.Line).Seconds(),
		Restoring: u.Restoring.Seconds(), Blocked: u.Blocked.Seconds(),
	}
	out.Other = (u.Wall - u.Trained - u.Restoring - u.Blocked).Seconds()
	return out
}

// plus adds the time of another trial.
func (u Usage) plus(o Usage) Usage {
	return Usage{
		Wall: u.Wall + o.Wall, Kept: u.Kept + o.Kept, Lost: u.Lost + o.Lost,
		Restoring: u.Restoring + o.Restoring, Blocked: u.Blocked + o.Blocked, Other: u.Other + o.Other,
	}
}

// trialUsage returns the time of a trial up to its newest event; zero for one without attempts.
func trialUsage(r Reader, run, trial string) (Usage, error) {
	u, found, err := load[usageRow](r, usageKey(run, trial))
	if err != nil || !found {
		return Usage{}, err
	}
	err = u.reported(r, run, trial)
	return u.usage(), err
}
