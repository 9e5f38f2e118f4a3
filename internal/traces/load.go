package traces

import (
	"cmp"
	"time"

	"github.com/ckptstore/ckptstore/projections"
)

// Load is a load that has ended.
type Load struct {
	projections.Restore
	Run    string
	Trial  string
	Stored time.Time // when the log stored its end

	// Parts of its bytes, as in restore.completed.
	Slots  int64
	Peers  int64
	Passed int64
}

// OfLoad returns the trace of a load. It ends when the log stored its end; before that it lasted as
// long as the coordinating trainer's events and its measured phases tell.
func OfLoad(store string, l Load) Trace {
	b := newBuilder("load", l.Stored, "load", store, l.Run, l.Trial, l.Attempt, l.Restore.Load, l.BegunSeq)
	resolve, read, check := length(l.ResolveTook), length(l.ReadTook), length(l.CheckTook)
	begin := l.Stored.Add(-resolve - read - check)
	root := b.root()
	root.From = begin
	if !l.BegunAt.IsZero() && !l.EndedAt.IsZero() {
		between := l.EndedAt.Sub(l.BegunAt).Seconds() // of one process's clock
		if from := l.Stored.Add(-length(&between)); from.Before(begin) {
			root.From = from
		}
	}
	root.Attributes = []Attribute{
		text("ckptstore.run", l.Run), text("ckptstore.trial", l.Trial), text("ckptstore.checkpoint", l.Checkpoint),
		number("ckptstore.attempt", l.Attempt), number("ckptstore.load", l.Restore.Load), number("ckptstore.world_size", l.WorldSize),
		number("ckptstore.sequence", l.BegunSeq),
	}
	if l.From != "" {
		root.Attributes = append(root.Attributes, text("ckptstore.from", l.From))
	}
	if l.Error != "" || l.Tier == "" {
		root.Failed = Text(cmp.Or(l.Error, "failed"))
		root.Attributes = append(root.Attributes, text("ckptstore.result", "failed"))
	} else {
		root.Attributes = append(root.Attributes, text("ckptstore.result", "completed"), text("ckptstore.tier", l.Tier), number("ckptstore.bytes", l.Bytes),
			number("ckptstore.bytes_from_slots", l.Slots), number("ckptstore.bytes_from_peers", l.Peers), number("ckptstore.bytes_passed", l.Passed))
	}
	at := begin
	for _, phase := range []struct {
		name string
		took time.Duration
	}{{"resolve", resolve}, {"read", read}, {"check", check}} {
		if phase.took > 0 {
			b.add(phase.name, phase.name, at, at.Add(phase.took))
			at = at.Add(phase.took)
		}
	}
	return b.trace
}
