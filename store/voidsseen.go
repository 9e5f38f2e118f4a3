package store

import (
	"fmt"

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

// see looks at one event. What is recorded of a message must be true of it.
func (v *voidsSeen) see(e events.Recorded, body events.Body) (problems []string) {
	switch b := body.(type) {
	case *events.Void:
		v.digests[e.Sequence] = b.Digest
		if len(v.list) < voidsListed {
			v.list = append(v.list, LogVoid{Sequence: e.Sequence, Void: *b})
		}
	case *events.LogVoided:
		if !(events.Aggregate{}).Owns(e.Event) {
			return nil
		}
		switch digest, void := v.digests[b.Sequence]; {
		case !void:
			return []string{fmt.Sprintf("it says that message %d is no event, but it is one", b.Sequence)}
		case digest != b.Digest:
			return []string{fmt.Sprintf("it says that message %d has the digest %s, but it has %s", b.Sequence, b.Digest, digest)}
		case v.recorded[b.Sequence] == 0:
			v.recorded[b.Sequence] = e.Sequence
		}
	}
	return nil
}

// tell puts them into the outcome.
func (v *voidsSeen) tell(out *ReadLog) {
	out.Voids, out.VoidCount, out.Unrecorded = v.list, len(v.digests), len(v.digests)-len(v.recorded)
	for i := range out.Voids {
		out.Voids[i].RecordedSeq = v.recorded[out.Voids[i].Sequence]
	}
}
