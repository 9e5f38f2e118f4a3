package projections

import (
	"github.com/ckptstore/ckptstore/events"
)

// voided keeps that a message is no event. It says nothing of its run, but has its
// place in the lane of decisions that it lies in.
func (f *fold) voided(b *events.Void) error {
	err := store(f.t, voidKey(f.r.Sequence), Void{Sequence: f.r.Sequence, At: f.r.Stored.UTC(), Void: *b})
	if err != nil {
		return err
	}
	return f.takesPlace()
}

// recordedVoid notes that the owner of the store has seen a void message.
func (f *fold) recordedVoid(b *events.LogVoided) error {
	row, found, err := load[Void](f.t, voidKey(b.Sequence))
	if err != nil || !found || row.RecordedSeq != 0 || row.Digest != b.Digest {
		return err
	}
	row.RecordedSeq = f.r.Sequence
	return store(f.t, voidKey(b.Sequence), row)
}

// newer keeps the first event of a run that this version does not know: what the
// rows of the run say is not all that is true of it.
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
