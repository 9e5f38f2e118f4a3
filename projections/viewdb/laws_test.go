package viewdb_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// The state as of any sequence, folded in memory, equals the views when the log ended
// at that event: the same rows, and the same answers.
func TestAsOfEqualsTheViewsOfThen(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := drawHistory(t, 50)
		n := rapid.IntRange(1, len(h.log)).Draw(t, "as of")
		then, err := viewdb.Replay(context.Background(), newLog(h.log...), uint64(n))
		if err != nil {
			t.Fatal(err)
		}
		db := open(t, vfs.NewMem(), "views")
		defer func() { shut(t, db) }()
		for at := 0; at < n; {
			at = min(at+rapid.IntRange(1, n).Draw(t, "batch"), n)
			if err := db.CatchUp(context.Background(), prefix(h.log, at)); err != nil {
				t.Fatal(err)
			}
		}
		err = db.View(func(r projections.Reader) error {
			if digest(t, r) != digest(t, then) {
				t.Fatalf("the rows as of %d of %d differ", n, len(h.log))
			}
			if now, was := answers(t, r), answers(t, then); now != was {
				t.Fatalf("the answers as of %d of %d are\n%s\nwant\n%s", n, len(h.log), was, now)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		// Continuing from there changes nothing about the end.
		if err := db.CatchUp(context.Background(), newLog(h.log...)); err != nil {
			t.Fatal(err)
		}
		if sum, _, err := db.Digest(); err != nil || sum != digest(t, h.rows) {
			t.Fatalf("the rows at the end differ: %v", err)
		}
	})
}

// answers returns the answers of the queries for all objects.
func answers(t fatal, r projections.Reader) string {
	var b strings.Builder
	show := func(v any, err error) {
		text, jerr := json.Marshal(v)
		if jerr != nil {
			t.Fatal(jerr)
		}
		fmt.Fprintf(&b, "%s %v\n", text, err)
	}
	runs, err := projections.Runs(r)
	show(runs, err)
	for _, run := range runs {
		jobs, err := projections.Jobs(r, run.Name)
		show(jobs, err)
		list, err := projections.Checkpoints(r, run.Name, true)
		show(list, err)
		devices, err := projections.Devices(r, run.Name)
		show(devices, err)
		for _, ref := range []string{run.Name, run.Name + "@best:loss:min", run.Name + "@step-1"} {
			c, err := projections.Resolve(r, ref)
			show(c.ID, err)
		}
		trials, err := projections.Trials(r, run.Name)
		show(trials, err)
		for _, trial := range trials {
			attempts, err := projections.Attempts(r, run.Name, trial.Name)
			show(attempts, err)
			table, err := projections.Metrics(r, projections.MetricsRange{Run: run.Name, Trial: trial.Name, Points: 3, All: true})
			show(table, err)
		}
	}
	return b.String()
}

// Facts of independent ranks may reach the log in any order: the rows are the same
// except for their sequences.
func TestOrderOfIndependentFacts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		h := drawHistory(t, 80)
		log := slices.Clone(h.log)
		swaps := 0
		for range 3 {
			for i := 1; i < len(log); i++ {
				a, b := naturalKey(log[i-1]), naturalKey(log[i])
				if a == "" || b == "" || a == b || rapid.Bool().Draw(t, "stay") {
					continue
				}
				log[i-1], log[i] = log[i], log[i-1]
				log[i-1].Sequence, log[i].Sequence = uint64(i), uint64(i+1)
				swaps++
			}
		}
		rows := projections.NewMemory()
		for _, r := range log {
			if err := projections.Apply(rows, r); err != nil {
				t.Fatal(err)
			}
		}
		want, got := unnumbered(t, h.rows), unnumbered(t, rows)
		for k, v := range want {
			if got[k] != v {
				t.Fatalf("after %d swaps row %q is\n%s\nwant\n%s", swaps, k, got[k], v)
			}
		}
		if len(got) != len(want) {
			t.Fatalf("after %d swaps there are %d rows, want %d", swaps, len(got), len(want))
		}
	})
}

// naturalKey returns the key by which a fact is folded; "" for events that are not
// swapped.
func naturalKey(r events.Recorded) string {
	if r.Scope.Actor == events.Server {
		return ""
	}
	var b struct {
		Attempt, Rank, Iteration int
		Checkpoint               string
	}
	if err := json.Unmarshal(r.Data, &b); err != nil {
		return ""
	}
	switch r.Kind {
	case "write.sealed", "write.completed", "write.failed":
		return fmt.Sprint(r.Scope.Run, "/", r.Scope.Trial, r.Kind, b.Checkpoint, b.Rank)
	case "group.worker_exited":
		// The first failed exit ends the training, at its time: the process that records exits keeps their order.
		return fmt.Sprint(r.Scope.Run, "/", r.Scope.Trial, r.Kind, b.Attempt)
	case "report.metrics":
		return fmt.Sprint(r.Scope.Run, "/", r.Scope.Trial, r.Kind, b.Attempt, b.Iteration)
	}
	return ""
}

// unnumbered returns the rows without the sequences of those facts. The numbers of sets of
// awaiting checkpoints follow from sequences: each is replaced by its first row.
func unnumbered(t fatal, r projections.Reader) map[string]string {
	rows := map[string]string{}
	sets := map[string]string{}
	setOf := func(k []byte) string { return fmt.Sprint(binary.BigEndian.Uint64(k[len(k)-24:])) }
	err := r.Scan([]byte("e"), []byte("f"), func(k, _ []byte) error {
		if set := setOf(k); sets[set] == "" {
			sets[set] = fmt.Sprintf("%x", k[len(k)-16:])
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	err = r.Scan(nil, nil, func(k, value []byte) error {
		if k[0] == 'e' {
			rows[fmt.Sprintf("%s %s %x", k[:len(k)-24], sets[setOf(k)], k[len(k)-16:])] = string(value)
			return nil
		}
		var v any
		if err := json.Unmarshal(value, &v); err != nil {
			return err
		}
		if m, ok := v.(map[string]any); ok {
			for _, name := range []string{"sequence", "sealed_seq", "completed_seq", "failed_seq", "exited_seq"} {
				if _, ok := m[name]; ok {
					m[name] = "once"
				}
			}
			for _, name := range []string{"fresh", "equal", "above"} {
				if set, ok := m[name].(map[string]any); ok {
					set["set"] = sets[fmt.Sprintf("%.0f", set["set"])]
				}
			}
		}
		text, err := json.Marshal(v)
		rows[string(k)] = string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return rows
}
