package jetlog

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
	"github.com/nats-io/nats.go"
)

// TestGoldenLogsAreSealed checks that the logs recorded with the folds are the same in
// an archive as in a stream: event by event, and by their rows as of any event.
func TestGoldenLogsAreSealed(t *testing.T) {
	files, err := filepath.Glob("../../projections/testdata/golden-log-*.jsonl")
	if err != nil || len(files) < 3 {
		t.Fatalf("%d golden logs, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			var golden []events.Recorded
			for line := range bytes.Lines(text) {
				var r events.Recorded
				if err := json.Unmarshal(line, &r); err != nil {
					t.Fatal(err)
				}
				golden = append(golden, r)
			}
			l := connectTo(t, Options{Dial: dial(startServer(t, t.TempDir()))})
			if err := l.Create(t.Context(), events.Decision{Event: golden[0].Event}); err != nil {
				t.Fatal(err)
			}
			lanes := map[events.Scope]uint64{golden[0].Scope: 1}
			for _, r := range golden[1:] {
				var seq uint64
				if r.Kind == (events.Void{}).Kind() {
					var v events.Void
					if err := json.Unmarshal(r.Data, &v); err != nil {
						t.Fatal(err)
					}
					// The message behind a void is not recorded. This one takes its
					// place.
					seq, err = l.publish(t.Context(), &nats.Msg{Subject: v.Subject, Data: []byte("junk")})
					lanes[r.Scope] = seq
				} else if r.Scope.Actor == events.Server {
					seq, err = l.Decide(t.Context(), events.Decision{Event: r.Event}, lanes[r.Scope])
					lanes[r.Scope] = seq
				} else {
					// One event was recorded twice, long after the server had forgotten
					// its ID.
					m := message(r.Event)
					m.Header.Del(events.HeaderMsgID)
					seq, err = l.publish(t.Context(), m)
				}
				if err != nil || seq != r.Sequence {
					t.Fatalf("event %d has sequence %d, %v", r.Sequence, seq, err)
				}
			}
			was, rows := readAll(t, l, 1, uint64(len(golden))), rowsAsOf(t, l, len(golden))
			store := l.store
			next, dir, link := cutLog(t, l, store)
			n := connectTo(t, Options{Dial: dial(next), Archive: dir})
			if _, _, err := n.Open(t.Context()); err != nil {
				t.Fatal(err)
			}
			if link.Last != uint64(len(golden)) {
				t.Fatalf("%d of %d events are sealed", link.Last, len(golden))
			}
			for i, e := range readAll(t, n, 1, link.Last) {
				if golden[i].Kind == (events.Void{}).Kind() {
					golden[i] = was[i]
				}
				if e.ID != golden[i].ID || string(e.Data) != string(golden[i].Data) || e.Scope != golden[i].Scope || e.Kind != golden[i].Kind || !e.Stored.Equal(was[i].Stored) {
					t.Fatalf("event %d is %+v, want %+v", i+1, e, golden[i])
				}
			}
			for as, digest := range rowsAsOf(t, n, len(golden)) {
				if digest != rows[as] {
					t.Errorf("the rows as of event %d differ", as)
				}
			}
		})
	}
}

// rowsAsOf returns the digests of the rows as of some events of a log, including the
// last.
func rowsAsOf(t *testing.T, l *Log, last int) map[int]string {
	t.Helper()
	all := map[int]string{}
	for as := last; as > 0; as -= max(1, last/7) {
		rows, err := viewdb.Replay(t.Context(), l, uint64(as))
		if err != nil {
			t.Fatal(err)
		}
		sum, err := projections.Digest(rows)
		if err != nil {
			t.Fatal(err)
		}
		all[as] = string(sum[:])
	}
	return all
}
