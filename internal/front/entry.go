package front

import (
	"strings"

	"github.com/ckptstore/ckptstore/events"
)

// Write is a write to an entry of a bucket, conditional on the entry's sequence.
type Write struct {
	Bucket string
	Key    string
	Remove bool   // with empty Data
	After  uint64 // sequence of the entry as the client has seen it; 0: none
	Data   []byte
	Whose
	Grant Grant
}

// Stamp identifies the owner of an entry.
type Stamp struct {
	Session   string
	Principal string
}

const (
	headerOperation = "KV-Operation"
	operationRemove = "DEL"
)

var entryHeaders = map[string]bool{headerAfter: true, headerOperation: true}

// longEntry is the maximum size of an entry in bytes.
const longEntry = 16 << 10

// entry passes on a write to a bucket: $KV.<bucket>.<key>.
func (s *session) entry(f frame, h header) error {
	bucket, key, ok := strings.Cut(strings.TrimPrefix(f.subject, entries), ".")
	if !ok || strings.Contains(key, ".") || !contains(s.f.o.Buckets, bucket) {
		return s.deny(f.subject, f.reply)
	}
	if s.judge.grant.LogAlone {
		return s.refuse(f, refuse(CodeDenied, "the owner of the store lets this client read the log, and write no entry of %s: ask its operator for another role", bucket))
	}
	if other, ok := h.only(entryHeaders); !ok {
		return s.refuse(f, refuse(CodeDenied, "the owner of the store does not let clients send the header %s", other))
	}
	operation := h.get(headerOperation)
	after, err := events.ParseSequence(h.get(headerAfter))
	switch {
	case err != nil:
		return s.refuse(f, refuse(CodeEntry, "an entry of %s is written on the condition that it did not move, by the header %s", bucket, headerAfter))
	case operation != "" && operation != operationRemove, operation != "" && len(f.payload) > 0:
		return s.refuse(f, refuse(CodeDenied, "clients cannot do %q with an entry", operation))
	case len(f.payload) > longEntry:
		return s.refuse(f, refuse(CodeTooLarge, "an entry of %s has %d bytes, at most %d are allowed", bucket, len(f.payload), longEntry))
	}
	ctx, cancel, err := s.looking()
	defer cancel()
	var stamp Stamp
	if err == nil {
		stamp, err = s.f.o.Log.Check(ctx, Write{
			Bucket: bucket, Key: key, Remove: operation == operationRemove, After: after, Data: f.payload,
			Whose: s.whose(f.reply), Grant: s.door.Grant,
		})
	}
	if err != nil {
		return s.refuse(f, refusal(err))
	}
	if after == 0 && operation == "" { // a new entry
		why := s.admit()
		if why == nil {
			why = s.door.quota.take(h.size() + len(f.payload))
		}
		if why != nil {
			return s.refuse(f, why)
		}
	}
	if stamp.Principal != "" {
		h = h.set(events.HeaderActor, stamp.Principal)
	}
	if stamp.Session != "" {
		h = h.set(HeaderSession, stamp.Session)
	}
	return s.passNow(f.subject, f.reply, h, f.payload)
}
