package projections

import (
	"fmt"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Void is a message of the log that is not a valid event.
type Void struct {
	Sequence uint64    `json:"sequence"`
	At       time.Time `json:"at"` // when it was stored
	events.Void
	RecordedSeq uint64 `json:"recorded_seq,omitempty"` // of the owner's log.voided; 0 before it
}

// Voids calls visit for the voids after a sequence, in the order of the log, up to the
// first error, which it returns.
func Voids(r Reader, behind uint64, visit func(Void) error) error {
	return r.Scan(voidKey(behind+1), after(key(keyVoid)), func(k, value []byte) error {
		var v Void
		if err := decode(k, value, &v); err != nil {
			return err
		}
		return visit(v)
	})
}

// Newer is the first event of a run that this version of the program does not know.
type Newer struct {
	Run      string      `json:"run"` // [events.None] if it concerns the store
	Sequence uint64      `json:"sequence"`
	Kind     events.Kind `json:"kind"`
	Version  int         `json:"version"`
}

// Known reports whether this version of the program knows such an event.
func (n Newer) Known() bool { return events.Event{Kind: n.Kind, Version: n.Version}.Known() }

// NewerError reports that a run, or the store, has an event which this version does not
// know. Its state is therefore unknown. It matches [events.ErrNewer].
type NewerError struct{ Newer }

// Error implements error.
func (e *NewerError) Error() string {
	of := fmt.Sprintf("run %q has", e.Run)
	if e.Run == events.None {
		of = "the store has"
	}
	return fmt.Sprintf("%s event %d, %s.v%d, which was %v: upgrade this program", of, e.Sequence, e.Kind, e.Version, events.ErrNewer)
}

// ProblemKind returns [problem.Newer].
func (*NewerError) ProblemKind() problem.Kind { return problem.Newer }

// Is makes every NewerError an [events.ErrNewer].
func (e *NewerError) Is(target error) bool { return target == events.ErrNewer }

// AllNewer returns the first unknown event of each run that has one.
func AllNewer(r Reader) ([]Newer, error) { return all[Newer](r, key(keyNewer)) }

// Understood returns a [*NewerError] if an event of a run, or of the store, is unknown.
// Its rows are then unreliable.
func Understood(r Reader, run string) error {
	for _, name := range []string{events.None, run} {
		n, found, err := load[Newer](r, key(keyNewer, name))
		switch {
		case err != nil:
			return err
		case found:
			return &NewerError{n}
		}
	}
	return nil
}

// voided records an invalid message. The message carries no information about its run,
// but has its place in its lane of decisions.
func (f *fold) voided(b *events.Void) error {
	err := store(f.t, voidKey(f.r.Sequence), Void{Sequence: f.r.Sequence, At: f.r.Stored.UTC(), Void: *b})
	if err != nil {
		return err
	}
	return f.takesPlace()
}

// recordedVoid notes that the owner of the store has recorded a void message.
func (f *fold) recordedVoid(b *events.LogVoided) error {
	row, found, err := load[Void](f.t, voidKey(b.Sequence))
	if err != nil || !found || row.RecordedSeq != 0 || row.Digest != b.Digest {
		return err
	}
	row.RecordedSeq = f.r.Sequence
	return store(f.t, voidKey(b.Sequence), row)
}

// newer stores the first event of a run that this version does not know: from then on
// the rows of the run may be incomplete.
func (f *fold) newer(e *events.NewerError) error {
	_, found, err := load[Newer](f.t, key(keyNewer, f.run))
	if err == nil && !found {
		err = store(f.t, key(keyNewer, f.run), Newer{Run: f.run, Sequence: f.r.Sequence, Kind: e.Kind, Version: e.Version})
	}
	if err == nil && f.run != events.None {
		err = f.seeRun()
	}
	if err != nil {
		return err
	}
	return f.takesPlace()
}

// takesPlace moves the end of the trial's lane to this event, if it lies there.
func (f *fold) takesPlace() error {
	if f.r.Scope.Actor != events.Server {
		return nil
	}
	trial, found, err := load[Trial](f.t, trialKey(f.run, f.name))
	if err != nil || !found {
		return err
	}
	trial.LaneSeq = f.r.Sequence
	return store(f.t, trialKey(f.run, f.name), trial)
}
