package traces

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/projections"
)

// Ranks of a trace.
const (
	mostRanks    = 64 // all are shown up to this number
	slowestRanks = 32 // of more, this many
)

// End is the event that ended a save.
type End struct {
	Sequence uint64
	Stored   time.Time // when the log stored it
	Aborted  bool
	Reason   string // of the abort
}

// OfSave returns the trace of a save that has ended. Facts about ranks that the log has after the
// end are left out, so the trace does not depend on when it is made.
func OfSave(store string, s projections.Save, end End) Trace {
	c := s.Checkpoint
	b := newBuilder("save", end.Stored, "save", store, c.Run, c.Trial, c.ID, c.BegunSeq)
	root := b.root()
	if begun := c.BegunStored; !begun.IsZero() && begun.Before(end.Stored) {
		root.From = begun
	}
	root.Attributes = []Attribute{
		text("ckptstore.run", c.Run), text("ckptstore.trial", c.Trial), text("ckptstore.checkpoint", c.ID), text("ckptstore.checkpoint.name", c.Name),
		number("ckptstore.step", c.Step), number("ckptstore.attempt", c.Attempt), number("ckptstore.world_size", c.WorldSize),
		number("ckptstore.sequence", c.BegunSeq),
	}
	if end.Aborted {
		root.Attributes = append(root.Attributes, text("ckptstore.result", "aborted"))
		root.Failed = Text(cmp.Or(end.Reason, "aborted"))
	} else {
		root.Attributes = append(root.Attributes, text("ckptstore.result", "committed"), number("ckptstore.bytes", c.Bytes),
			number("ckptstore.bytes_written", c.BytesWritten), number("ckptstore.bytes_reused", c.BytesReused))
	}
	if at := c.StagedStored; !at.IsZero() && !at.Before(root.From) && !at.After(end.Stored) {
		root.Moments = append(root.Moments, Moment{"staged", at})
	}

	parts := make([]part, 0, len(s.Writes))
	for _, w := range s.Writes {
		if p := partOf(w, end.Sequence); p.known() {
			parts = append(parts, p)
		}
	}
	shown := slowest(parts)
	if omitted := len(parts) - len(shown); omitted > 0 {
		root.Attributes = append(root.Attributes, number("ckptstore.ranks_omitted", omitted))
	}
	for _, p := range shown {
		b.rank(p)
	}
	if took := length(c.ManifestTook); !end.Aborted && took > 0 {
		b.add("commit", "commit", end.Stored.Add(-took), end.Stored)
	}
	return b.trace
}

// part is what one rank did for a save, up to its end.
type part struct {
	projections.SaveWrite
	sealed, completed, failed bool
}

// partOf returns the part of a rank as of a sequence.
func partOf(w projections.SaveWrite, until uint64) part {
	had := func(seq uint64) bool { return seq > 0 && seq <= until }
	return part{SaveWrite: w, sealed: had(w.SealedSeq), completed: had(w.CompletedSeq), failed: had(w.FailedSeq)}
}

func (p part) known() bool { return p.sealed || p.completed || p.failed }

// copying and writing are the lengths of the phases before and after the seal.

func (p part) copying() time.Duration {
	if !p.sealed {
		return 0
	}
	return length(p.Waited) + length(p.Copied)
}

func (p part) writing() time.Duration {
	if !p.completed {
		return 0
	}
	return length(p.Queued) + length(p.Digest) + length(p.SaveWrite.Write.Write) + length(p.Sync)
}

// slowest returns the parts that a trace shows, by rank. Those that failed come first.
func slowest(parts []part) []part {
	if len(parts) <= mostRanks {
		return parts
	}
	slices.SortFunc(parts, func(x, y part) int {
		if x.failed != y.failed {
			if x.failed {
				return -1
			}
			return 1
		}
		return cmp.Or(cmp.Compare(y.copying()+y.writing(), x.copying()+x.writing()), cmp.Compare(x.Rank, y.Rank))
	})
	shown := parts[:slowestRanks]
	slices.SortFunc(shown, func(x, y part) int { return cmp.Compare(x.Rank, y.Rank) })
	return shown
}

// sealedAt returns when a rank's copy was complete, as the clock of the log shows it. The fact may
// be stored later than it happened. If the write's phases are known from the seal on, they bound it.
func (p part) sealedAt() (at time.Time) {
	if p.sealed {
		at = p.SealedStored
	}
	if p.completed && p.Queued != nil {
		if begun := p.CompletedStored.Add(-p.writing()); !p.sealed || begun.Before(at) {
			at = begun
		}
	}
	return at
}

// rank adds the spans of a rank.
func (b *builder) rank(p part) {
	path := fmt.Sprintf("rank %d", p.Rank)
	seal := p.sealedAt() // zero if it is unknown
	var from, until time.Time
	switch {
	case !seal.IsZero():
		from, until = seal.Add(-p.copying()), seal
	case p.completed:
		from, until = p.CompletedStored.Add(-p.writing()), p.CompletedStored
	default:
		from, until = p.FailedStored, p.FailedStored
	}
	// The span lasts until the log has the last fact about the rank.
	if p.completed && p.CompletedStored.After(until) {
		until = p.CompletedStored
	}
	if p.failed && p.FailedStored.After(until) {
		until = p.FailedStored
	}
	rank := b.add(path, path, from, until)
	phase := func(name string, at time.Time, took time.Duration) (time.Time, int) {
		if took <= 0 {
			return at, -1
		}
		return at.Add(took), b.below(rank, path+"/"+name, name, at, at.Add(took))
	}
	if p.sealed {
		at, _ := phase("wait", from, length(p.Waited))
		phase("copy", at, length(p.Copied))
	}
	if p.completed {
		at := seal
		if seal.IsZero() || p.Queued == nil { // another process may have written what the rank had sealed
			at = p.CompletedStored.Add(-p.writing())
		}
		at, _ = phase("queue", at, length(p.Queued))
		at, write := phase("write", at, length(p.Digest)+length(p.SaveWrite.Write.Write))
		if write >= 0 {
			s := &b.trace.Spans[write]
			s.Attributes = seconds(seconds(s.Attributes, "ckptstore.digest_s", p.Digest), "ckptstore.disk_s", p.SaveWrite.Write.Write)
		}
		at, _ = phase("sync", at, length(p.Sync))
		phase("report", at, p.CompletedStored.Sub(at))
	}
	s := &b.trace.Spans[rank]
	s.Attributes = []Attribute{number("ckptstore.rank", p.Rank)}
	if p.Node >= 0 {
		s.Attributes = append(s.Attributes, number("ckptstore.node", p.Node))
	}
	if p.completed {
		s.Attributes = append(s.Attributes, number("ckptstore.bytes_written", p.BytesWritten), number("ckptstore.bytes_reused", p.BytesReused))
	}
	if p.failed {
		s.Failed = Text(cmp.Or(p.Error, "failed"))
	}
	if p.sealed {
		s.Moments = append(s.Moments, Moment{"sealed", seal})
	}
}
