package store

import (
	"github.com/ckptstore/ckptstore/events"
)

// voidsListed is how many messages that are no events a reading of the log lists.
const voidsListed = 1000

// voidsSeen are the messages of a log that are no events, and what the owner has
// recorded of them: a few bytes each.
type voidsSeen struct {
	list     []LogVoid         // the first ones
	digests  map[uint64]string // of all, by sequence
	recorded map[uint64]uint64 // the decisions about them, by sequence
}

// see looks at one event. What is recorded of a message counts if it is true of it:
// otherwise a client of the log's server, or an older version, has said it.
func (v *voidsSeen) see(e events.Recorded, body events.Body) {
	switch b := body.(type) {
	case *events.Void:
		v.digests[e.Sequence] = b.Digest
		if len(v.list) < voidsListed {
			v.list = append(v.list, LogVoid{Sequence: e.Sequence, Void: *b})
		}
	case *events.LogVoided:
		digest, void := v.digests[b.Sequence]
		if (events.Aggregate{}).Owns(e.Event) && void && digest == b.Digest && v.recorded[b.Sequence] == 0 {
			v.recorded[b.Sequence] = e.Sequence
		}
	}
}

// tell puts them into the outcome.
func (v *voidsSeen) tell(out *ReadLog) {
	out.Voids, out.VoidCount, out.Unrecorded = v.list, len(v.digests), len(v.digests)-len(v.recorded)
	for i := range out.Voids {
		out.Voids[i].RecordedSeq = v.recorded[out.Voids[i].Sequence]
	}
}
