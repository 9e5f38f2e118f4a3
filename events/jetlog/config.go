package jetlog

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/nats-io/nats.go/jetstream"
)

// Stream is the name of the stream that holds the log.
const Stream = "CKPT"

// MaxMessage is the largest size of an event in bytes, headers and body.
const MaxMessage = 1 << 20

// duplicates is how long the server remembers the IDs of messages.
const duplicates = 2 * time.Minute

// streamConfig is the configuration that [Log.Create] requests. It has no MaxBytes:
// DiscardNew makes a full stream refuse every append alike, and the log could not even
// record why saves are aborted. Instead, [Options.Admit] lets the store refuse facts by
// name while the disk still has room for decisions. DiscardNew protects a log whose
// operator sets a limit anyway: appends then end with the server's refusal, and no old
// event is dropped.
//
// The stream is not compressed: for replicated streams see [safeCompression]; the old
// part of any other log is compressed when it is sealed.
func streamConfig(replicas int) jetstream.StreamConfig {
	return jetstream.StreamConfig{
		Name:               Stream,
		Description:        "events of a checkpoint store",
		Subjects:           []string{events.Filter},
		Storage:            jetstream.FileStorage,
		Retention:          jetstream.LimitsPolicy,
		Discard:            jetstream.DiscardNew,
		MaxMsgs:            -1,
		MaxBytes:           -1,
		MaxMsgsPerSubject:  -1,
		MaxConsumers:       -1,
		MaxMsgSize:         MaxMessage,
		Replicas:           replicas,
		Duplicates:         duplicates,
		Compression:        jetstream.NoCompression,
		DenyDelete:         true,
		DenyPurge:          true,
		AllowDirect:        true,
		AllowAtomicPublish: true,
	}
}

// safeCompression reports whether the server can recover the stream after a host crash.
// When a replica restarts, nats-server 2.15.2 truncates a damaged block to its last
// good message, and fails to do so in a compressed block. The replica then logs
// "smb.truncate: ... s2: corrupt input" and never joins again. After the second such
// replica of three, the log has no leader.
func safeCompression(c jetstream.StreamConfig) bool {
	return c.Replicas <= 1 || c.Compression == jetstream.NoCompression
}

// guards lists the problems of a stream's configuration: every setting by which it
// could lose an event, store one twice, or refuse ours.
func guards(c jetstream.StreamConfig) []string {
	var wrong []string
	for _, g := range []struct {
		ok   bool
		what string
	}{
		{slices.Equal(c.Subjects, []string{events.Filter}), "its subjects are not " + events.Filter},
		{c.Storage == jetstream.FileStorage, "it is kept in memory"},
		{c.PersistMode == jetstream.DefaultPersistMode, "it acknowledges before it persists"},
		{c.Retention == jetstream.LimitsPolicy, "its retention follows interest"},
		{c.Discard == jetstream.DiscardNew, "it discards old messages when full"},
		{c.MaxAge == 0, "its messages expire"},
		{c.MaxMsgsPerSubject <= 0, "it limits messages per subject"},
		{c.MaxMsgSize < 0 || c.MaxMsgSize >= MaxMessage, fmt.Sprintf("it refuses messages of %d bytes", MaxMessage)},
		{c.Duplicates >= duplicates, "it remembers duplicates for less than two minutes"},
		{c.DenyDelete, "it allows deletion"},
		{c.DenyPurge, "it allows purging"},
		{!c.AllowRollup, "it allows rollups"},
		{!c.AllowMsgTTL, "it allows messages to expire"},
		{!c.AllowMsgCounter && !c.AllowMsgSchedules, "it rewrites or schedules messages"},
		{c.AllowAtomicPublish, "it has no atomic batches"},
		{!c.NoAck, "it acknowledges nothing"},
		{!c.Sealed, "it is sealed"},
		{c.Mirror == nil && len(c.Sources) == 0, "it copies another stream"},
		{c.SubjectTransform == nil, "it changes subjects"},
		{safeCompression(c), fmt.Sprintf("it is compressed and has %d copies, and the server loses such a stream when hosts crash (copy it, run `nats stream edit %s --compression none`, and restart the servers one by one, each when the one before has caught up: blocks from then on are not compressed)", c.Replicas, Stream)},
	} {
		if !g.ok {
			wrong = append(wrong, g.what)
		}
	}
	return wrong
}

func unsafeStream(name string, wrong []string) error {
	return fmt.Errorf("%w: stream %s cannot be trusted with events: %s; restore its configuration", ErrUnsafe, name, strings.Join(wrong, ", "))
}
