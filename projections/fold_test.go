package projections

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/ckptstore/ckptstore/events"
)

// scene is a log under construction and the rows that follow from it.
type scene struct {
	t        *testing.T
	run      string
	trial    string
	rows     *Memory
	recorded []events.Recorded
}

func newScene(t *testing.T) *scene {
	return &scene{t: t, run: "demo", trial: DefaultTrial, rows: NewMemory()}
}

var epoch = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

func recorded(seq uint64, scope events.Scope, kind events.Kind, body string) events.Recorded {
	return events.Recorded{
		Event: events.Event{
			ID: fmt.Sprintf("e%d", seq), Kind: kind, Version: 1, Source: "test",
			Time: epoch.Add(time.Duration(seq) * time.Second), Scope: scope, Data: json.RawMessage(body),
		},
		Sequence: seq,
	}
}

// add applies "actor kind body" and returns the fold's error.
func (s *scene) add(line string) error {
	parts := strings.SplitN(strings.TrimSpace(line), " ", 3)
	if len(parts) != 3 {
		s.t.Fatalf("bad event %q", line)
	}
	scope := events.Scope{Run: s.run, Trial: s.trial, Actor: events.Actor(parts[0])}
	kind := events.Kind(parts[1])
	switch kind.Family() {
	case "job", "search":
		scope.Trial = events.None
	case "store":
		scope.Run, scope.Trial = events.None, events.None
	}
	r := recorded(uint64(len(s.recorded)+1), scope, kind, parts[2])
	s.recorded = append(s.recorded, r)
	return Apply(s.rows, r)
}

// dump returns every row in a readable form.
func dump(t *testing.T, r Reader) map[string]string {
	t.Helper()
	rows := map[string]string{}
	err := r.Scan(nil, nil, func(k, value []byte) error {
		if !json.Valid(value) && k[0] != keyRollup {
			t.Errorf("row %q is not JSON: %q", k, value)
		}
		rows[describe(t, k)] = string(value)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

// grammar is the layout of keys: names, numbers, complements, a rest.
var grammar = map[byte]string{
	's': "", 'r': "s", 'j': "ss", 't': "ss", 'a': "ssn", 'w': "ssnn", 'l': "ssnn", 'm': "ssnc",
	'c': "ssc", 'i': "ssr", 'o': "ssc", 'g': "sss", 'p': "sssn", 'b': "sssc", 'q': "ssnn", 'e': "ssnnn", 'h': "ssc", 'd': "ssnr", 'u': "ssnr",
	'k': "ssn", 'f': "ssn", 'z': "ss", 'x': "ss", 'y': "s",
}

func describe(t *testing.T, k []byte) string {
	t.Helper()
	shape, ok := grammar[k[0]]
	if !ok {
		t.Fatalf("key %q has an unknown kind", k)
	}
	words := []string{string(k[:1])}
	rest := k[1:]
	for _, part := range shape {
		switch part {
		case 's':
			n, size := binary.Uvarint(rest)
			words = append(words, string(rest[size:size+int(n)]))
			rest = rest[size+int(n):]
		case 'n', 'c':
			n := binary.BigEndian.Uint64(rest)
			if part == 'c' {
				n = ^n
			}
			words = append(words, fmt.Sprint(n))
			rest = rest[8:]
		case 'r':
			words = append(words, string(rest))
			rest = nil
		}
	}
	if len(rest) != 0 {
		t.Fatalf("key %q has %d bytes too many", k, len(rest))
	}
	return strings.Join(words, "/")
}

// diff names the rows that were added, changed and removed.
func diff(before, after map[string]string) string {
	var b strings.Builder
	names := slices.Concat(slices.Collect(maps.Keys(before)), slices.Collect(maps.Keys(after)))
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		old, had := before[name]
		now, has := after[name]
		switch {
		case !had:
			fmt.Fprintf(&b, "+ %s %s\n", name, now)
		case !has:
			fmt.Fprintf(&b, "- %s\n", name)
		case old != now:
			fmt.Fprintf(&b, "~ %s %s\n", name, now)
		}
	}
	if b.Len() == 0 {
		return "nothing changed\n"
	}
	return b.String()
}

func encode(t *testing.T, v any) string {
	t.Helper()
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	if err := e.Encode(v); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// show returns the answer of a query.
func (s *scene) show(d *datadriven.TestData) string {
	var v any
	var err error
	switch d.Cmd {
	case "store":
		v, _, err = load[Store](s.rows, key(keyStore))
	case "runs":
		v, err = Runs(s.rows)
	case "jobs":
		v, err = Jobs(s.rows, s.run)
	case "trial":
		v, err = GetTrial(s.rows, s.run, s.trial)
	case "trials":
		v, err = Trials(s.rows, s.run)
	case "newest": // committed by an attempt
		var attempt int
		d.ScanArgs(s.t, "attempt", &attempt)
		var a Attempt
		a, _, err = load[Attempt](s.rows, attemptKey(s.run, s.trial, attempt))
		v = a.Committed
	case "workers":
		var attempt int
		d.ScanArgs(s.t, "attempt", &attempt)
		v, err = Workers(s.rows, s.run, s.trial, attempt)
	case "checkpoints", "ids":
		rows, failed := Checkpoints(s.rows, s.run, d.HasArg("all"))
		v, err = rows, failed
		if d.Cmd == "ids" {
			words := names(rows, func(c Checkpoint) string {
				word := c.ID + " " + string(c.State)
				if c.Superseded {
					word += " superseded"
				}
				return word + " after " + fmt.Sprintf("%q", c.Parent)
			})
			return strings.Join(append(words, ""), "\n")
		}
	case "open":
		rows, failed := OpenCheckpoints(s.rows, s.run, s.trial)
		v, err = names(rows, func(c Checkpoint) string { return c.ID }), failed
	case "metrics":
		rows, failed := Reports(s.rows, s.run, s.trial)
		if failed != nil {
			return failed.Error()
		}
		var b strings.Builder
		for _, m := range rows {
			fmt.Fprintf(&b, "%d: attempt %d iteration %d step %d %v\n", m.LineIteration, m.Attempt, m.Iteration, m.Step, m.Metrics)
		}
		return b.String()
	case "resolve":
		var b strings.Builder
		for ref := range strings.Lines(d.Input) {
			ref = strings.TrimSpace(ref)
			c, err := Resolve(s.rows, ref)
			if err != nil {
				fmt.Fprintf(&b, "%s: %v\n", ref, err)
				continue
			}
			fmt.Fprintf(&b, "%s: %s/%s@%s\n", ref, c.Run, c.Trial, c.ID)
		}
		return b.String()
	default:
		d.Fatalf(s.t, "unknown command %s", d.Cmd)
	}
	if err != nil {
		return err.Error() + "\n"
	}
	return encode(s.t, v)
}

func TestFolds(t *testing.T) {
	datadriven.Walk(t, "testdata/folds", func(t *testing.T, path string) {
		s := newScene(t)
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			switch d.Cmd {
			case "scope":
				d.MaybeScanArgs(t, "run", &s.run)
				d.MaybeScanArgs(t, "trial", &s.trial)
				return ""
			case "fold":
				before := dump(t, s.rows)
				for line := range strings.Lines(d.Input) {
					if err := s.add(line); err != nil {
						return err.Error() + "\n"
					}
				}
				if d.HasArg("quiet") {
					return ""
				}
				after := dump(t, s.rows)
				if !d.HasArg("time") { // these rows change with nearly every event
					for _, rows := range []map[string]string{before, after} {
						maps.DeleteFunc(rows, func(name, _ string) bool { return name[0] == keyUsage || name[0] == keyTally })
					}
				}
				return diff(before, after)
			}
			return s.show(d)
		})
		s.repeatFacts(t)
	})
}

// repeatFacts repeats every fact, as after a retry outside the log's duplicate window:
// the same event at a new sequence.
func (s *scene) repeatFacts(t *testing.T) {
	want, err := Digest(s.rows)
	if err != nil {
		t.Fatal(err)
	}
	next := uint64(len(s.recorded))
	for _, r := range s.recorded {
		if !r.Kind.Known() || r.Kind.Decides() || r.Scope.Actor == events.Server {
			continue
		}
		before := dump(t, s.rows)
		next++
		r.Sequence = next
		if err := Apply(s.rows, r); err != nil {
			t.Fatal(err)
		}
		got, err := Digest(s.rows)
		if err != nil {
			t.Fatal(err)
		}
		if got != want {
			t.Fatalf("%s %s repeated changed:\n%s", r.Kind, r.Data, diff(before, dump(t, s.rows)))
		}
	}
}

// TestNewer checks that an unknown event makes its run not understood, leaves other
// runs understood, and takes its place in the lane.
func TestNewer(t *testing.T) {
	scope := events.Scope{Run: "demo", Trial: "main", Actor: events.Server}
	for name, of := range map[string]struct {
		scope   events.Scope
		kind    events.Kind
		version int
	}{
		"unknown decision": {scope, "checkpoint.teleported", 1},
		"unknown fact":     {events.Scope{Run: "demo", Trial: "main", Actor: events.Rank(0)}, "report.dreams", 1},
		"newer version":    {scope, "checkpoint.begun", 2},
		"of the store":     {events.Scope{Actor: events.Server}, "access.dreamed", 1},
	} {
		m := NewMemory()
		for i, run := range []string{"other", "demo"} {
			r := recorded(uint64(i+1), events.Scope{Run: run, Trial: "main", Actor: events.Server}, "group.started", `{"attempt":1,"world_size":1,"ranks":[{}]}`)
			if err := Apply(m, r); err != nil {
				t.Fatal(err)
			}
		}
		for seq := uint64(3); seq < 5; seq++ { // the first is kept
			r := recorded(seq, of.scope, of.kind, `{}`)
			r.Version = of.version
			if err := Apply(m, r); err != nil {
				t.Fatal(err)
			}
		}
		err := Understood(m, "demo")
		if !errors.Is(err, events.ErrNewer) || !strings.Contains(err.Error(), "has event 3, "+string(of.kind)) {
			t.Errorf("%s: %v", name, err)
		}
		if err := Understood(m, "other"); (err != nil) != (of.scope.Run == events.None) {
			t.Errorf("%s: the other run: %v", name, err)
		}
		if all, err := AllNewer(m); err != nil || len(all) != 1 || all[0].Known() {
			t.Errorf("%s: %+v, %v", name, all, err)
		}
		want := uint64(2)
		if of.scope == scope {
			want = 4
		}
		if trial, err := GetTrial(m, "demo", "main"); err != nil || trial.LaneSeq != want {
			t.Errorf("%s: the lane ends at %d, want %d, %v", name, trial.LaneSeq, want, err)
		}
	}
}

// TestVoid checks that an invalid message creates no run, takes its place in a lane,
// and stays open until the store's own lane records it.
func TestVoid(t *testing.T) {
	m := NewMemory()
	apply := func(r events.Recorded) {
		t.Helper()
		if err := Apply(m, r); err != nil {
			t.Fatal(err)
		}
	}
	apply(recorded(1, events.Scope{Run: "demo", Trial: "main", Actor: events.Server}, "group.started", `{"attempt":1,"world_size":1,"ranks":[{}]}`))
	apply(recorded(2, events.Scope{Run: "unknown", Trial: "main", Actor: events.Server}, "checkpoint.begun", `"text"`))
	apply(events.Recorded{Sequence: 3, Event: events.NewVoid(events.Message{Subject: "ckpt.demo.main.s.x"}, 3, time.Unix(0, 0), errors.New("short"))})
	if runs, err := Runs(m); err != nil || len(runs) != 1 {
		t.Errorf("the runs are %+v, %v", runs, err)
	}
	if trial, err := GetTrial(m, "demo", "main"); err != nil || trial.LaneSeq != 3 {
		t.Errorf("the lane ends at %d, %v", trial.LaneSeq, err)
	}
	voids := func(open bool) (list []Void, err error) {
		err = Voids(m, 0, func(v Void) error {
			if !open || v.RecordedSeq == 0 {
				list = append(list, v)
			}
			return nil
		})
		return list, err
	}
	all, err := voids(true)
	if err != nil || len(all) != 2 || all[0].Sequence != 2 || all[1].Sequence != 3 || all[1].Why != "short" {
		t.Fatalf("%+v, %v", all, err)
	}
	open := func(want int, why string) {
		t.Helper()
		if left, err := voids(true); err != nil || len(left) != want {
			t.Errorf("%s: %d are open, want %d, %v", why, len(left), want, err)
		}
	}
	say := func(seq uint64, scope events.Scope, of uint64, digest string) {
		apply(recorded(seq, scope, "log.voided", fmt.Sprintf(`{"sequence":%d,"digest":%q,"why":"x"}`, of, digest)))
	}
	own := events.Scope{Actor: events.Server}
	say(4, own, 3, "another")
	open(2, "another digest")
	say(5, events.Scope{Run: "demo", Trial: "main", Actor: events.Server}, 3, all[1].Digest)
	open(2, "the lane of a run")
	say(6, own, 99, all[1].Digest)
	open(2, "another message")
	say(7, own, 3, all[1].Digest)
	open(1, "recorded")
	say(8, own, 3, all[1].Digest)
	if all, err := voids(false); err != nil || len(all) != 2 || all[1].RecordedSeq != 7 {
		t.Errorf("%+v, %v", all, err)
	}
}

// Every kind that package events knows has a fold or is listed as having no row.
func TestEveryKindIsFolded(t *testing.T) {
	kinds := []events.Kind{
		"store.created", "job.started", "job.node_joined", "job.node_left", "job.ended",
		"group.started", "group.training_started", "group.worker_exited", "group.stopped",
		"trial.created", "trial.stop_requested", "trial.paused", "trial.completed", "trial.errored",
		"report.metrics", "plan.local", "plan.global", "plan.load",
		"write.sealed", "write.completed", "write.failed",
		"checkpoint.begun", "checkpoint.staged", "checkpoint.committed", "checkpoint.aborted",
		"checkpoint.superseded", "checkpoint.pinned", "checkpoint.unpinned", "checkpoint.tagged", "checkpoint.untagged",
		"checkpoint.attached", "checkpoint.deleted",
		"restore.begun", "restore.completed", "restore.failed", "gpu.unhealthy", "gpu.recovered", "log.voided",
		"search.begun", "search.assigned",
	}
	for _, kind := range kinds {
		actors := []events.Actor{events.Node(0)}
		if kind.Decides() {
			actors = []events.Actor{events.Server, events.Rank(0)}
		}
		for _, actor := range actors {
			r := recorded(1, events.Scope{Run: "demo", Trial: "main", Actor: actor}, kind, `{"attempt":1}`)
			m := NewMemory()
			if err := Apply(m, r); err != nil {
				t.Errorf("%s by %s: %v", kind, actor, err)
			}
			if kind.Decides() && actor != events.Server && m.Len() != 0 {
				t.Errorf("%s by %s decided something: %v", kind, actor, dump(t, m))
			}
		}
	}
}
