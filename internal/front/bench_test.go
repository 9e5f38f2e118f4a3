package front

import (
	"bytes"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// benchFrame is one message of a batch, as a client of this module sends it.
func benchFrame(tb testing.TB) []byte {
	fact, err := events.NewFact(events.Stamp{ID: "01936b2e-8f3a-7c41-9d52-6e0b3a7c1f84", Source: "trainer/job", Time: time.Unix(1700000000, 123456789)},
		events.Scope{Run: "run", Trial: "main", Actor: events.Rank(7)}, &events.Metrics{
			Attempt: 1, Iteration: 1000, Step: 1000, Seconds: 0.25,
			Metrics: map[string]any{"loss": 0.123456789, "lr": 0.001, "grad_norm": 1.5},
		})
	if err != nil {
		tb.Fatal(err)
	}
	m := events.Encode(fact.Event)
	var h header
	for name, values := range m.Header {
		h = append(h, field{name, values[0]})
	}
	h = append(h, field{headerBatch, "K8JH5QTFVQ1JXN4Z0L7YHB"}, field{headerBatchNumber, "128"})
	return appendPub(nil, m.Subject, "", h, m.Data)
}

// BenchmarkEvent measures what the front adds to an event of a batch.
func BenchmarkEvent(b *testing.B) {
	limits, err := Limits{}.withDefaults()
	if err != nil {
		b.Fatal(err)
	}
	wire := benchFrame(b)
	var memory header
	parsed := func(r *reader) (frame, header) {
		f, err := r.next()
		if err != nil {
			b.Fatal(err)
		}
		h, err := parseHeader(f.header, memory)
		if err != nil {
			b.Fatal(err)
		}
		memory = h
		return f, h
	}
	b.Run("read", func(b *testing.B) {
		from := bytes.NewReader(wire)
		r := newReader(from, limits)
		b.ReportAllocs()
		for b.Loop() {
			from.Reset(wire)
			r.in.Reset(from)
			parsed(r)
		}
	})
	b.Run("judge", func(b *testing.B) {
		f, h := parsed(newReader(bytes.NewReader(wire), limits))
		j := judge{largest: limits.Payload}
		b.ReportAllocs()
		for b.Loop() {
			if _, why := j.event(f.subject, h, f.payload); why != nil {
				b.Fatal(why)
			}
		}
	})
	b.Run("write", func(b *testing.B) {
		f, h := parsed(newReader(bytes.NewReader(wire), limits))
		var to []byte
		b.ReportAllocs()
		for b.Loop() {
			to = appendPub(to[:0], f.subject, "", h, f.payload)
		}
	})
}
