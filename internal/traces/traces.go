// Package traces turns a save or a load into a trace: a tree of spans for distributed tracing.
//
//	save                      from checkpoint.begun, or a rank's earlier request, to its end
//	├── rank 0                one for each rank; of more than 64 ranks, the 32 slowest
//	│   ├── wait              for a slot in shared memory
//	│   ├── copy              into the slot; the rank's moment "sealed" is its end
//	│   ├── queue             until its write begins
//	│   ├── write             to the disk or the bucket, with the digests
//	│   ├── sync              until the files and their names are durable
//	│   └── report            until the log has the rank's completion
//	└── commit                the files of all ranks checked, the manifest durable
//
//	load
//	├── resolve               the checkpoint found and opened
//	├── read                  until the slowest node has read its part
//	└── check                 until the slowest node's ranks have verified theirs
//
// Lengths are durations that the process measured which did the work, by its monotonic clock. They
// are placed by the times at which the log stored the events, which are all of one clock: the clocks
// of two nodes are never compared. All IDs follow from the store and the save, so a trace that is
// made again, by any process, is the same trace.
package traces

import (
	"crypto/sha256"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// Trace is a save or a load that has ended.
type Trace struct {
	ID    [16]byte
	Spans []Span // the first is the root; a parent precedes its children
}

// Span is a part of a trace. Its children are within its time.
type Span struct {
	ID         [8]byte
	Parent     [8]byte // zero for the root
	Name       string
	From       time.Time
	Until      time.Time // not before From
	Failed     string    // why it failed; empty: it did not
	Attributes []Attribute
	Moments    []Moment
}

// Attribute describes a span. The value is a string, an int64 or a float64.
type Attribute struct {
	Key   string
	Value any
}

// Moment is a point of time within a span.
type Moment struct {
	Name string
	At   time.Time
}

// maxText bounds a text in a trace, in bytes: an error may quote the output of a program.
const maxText = 1024

// Text returns a text that a trace can have: valid UTF-8 of bounded length.
func Text(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= maxText {
		return s
	}
	end := maxText
	for !utf8.RuneStart(s[end]) {
		end--
	}
	return s[:end] + "…"
}

func text(key, value string) Attribute { return Attribute{key, Text(value)} }
func number[T ~int | ~int64 | ~uint64](key string, value T) Attribute {
	return Attribute{key, int64(value)} //nolint:gosec // sequences and sizes fit
}

// seconds adds a measured duration; an unknown one adds nothing.
func seconds(to []Attribute, key string, value *float64) []Attribute {
	if value == nil {
		return to
	}
	return append(to, Attribute{key, *value})
}

// identity returns the ID of a trace. The parts name what it is about.
func identity(parts ...any) (id [16]byte) {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%v\x00", p)
	}
	copy(id[:], h.Sum(nil))
	return id
}

// builder collects the spans of a trace.
type builder struct {
	trace Trace
}

func newBuilder(root string, at time.Time, parts ...any) *builder {
	b := &builder{Trace{ID: identity(parts...)}}
	b.trace.Spans = []Span{{ID: b.id(root), Name: root, From: at, Until: at}}
	return b
}

// id returns the ID of the span with a path.
func (b *builder) id(path string) (id [8]byte) {
	sum := sha256.Sum256(append(b.trace.ID[:], path...))
	copy(id[:], sum[:])
	return id
}

// root returns the root, until the next span is added.
func (b *builder) root() *Span { return &b.trace.Spans[0] }

// add adds a span below the root and returns its place. The path is unique in the trace.
func (b *builder) add(path, name string, from, until time.Time) int {
	return b.below(0, path, name, from, until)
}

// below adds a child of a span and extends the spans above it to cover it.
func (b *builder) below(parent int, path, name string, from, until time.Time) int {
	if until.Before(from) {
		until = from
	}
	all := b.trace.Spans
	for _, above := range []int{0, parent} {
		if from.Before(all[above].From) {
			all[above].From = from
		}
		if until.After(all[above].Until) {
			all[above].Until = until
		}
	}
	b.trace.Spans = append(all, Span{ID: b.id(path), Parent: all[parent].ID, Name: name, From: from, Until: until})
	return len(all)
}

// length converts a measured duration; unknown and impossible ones are 0.
func length(s *float64) time.Duration {
	if s == nil || !(*s > 0) || *s > maxLength.Seconds() {
		return 0
	}
	return time.Duration(*s * float64(time.Second))
}

// maxLength is the longest duration that is believed.
const maxLength = 365 * 24 * time.Hour
