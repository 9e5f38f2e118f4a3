package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// factLog is a log that takes facts.
type factLog struct {
	err error

	mu    sync.Mutex
	facts []events.Fact
}

// Append takes facts, or refuses them.
func (l *factLog) Append(_ context.Context, facts ...events.Fact) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.facts = append(l.facts, facts...)
	return l.err
}

// text returns the facts so far, in short.
func (l *factLog) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for _, f := range l.facts {
		text := fmt.Sprint(f.Scope.Actor, " ", f.Kind)
		if strings.Contains(string(f.Data), `"digest":"`) {
			text += " same"
		}
		out = append(out, text)
	}
	l.facts = nil
	return strings.Join(out, ", ")
}

// fact mints a fact of the trial.
func fact(actor events.Actor, body events.Body) (events.Fact, error) {
	return events.NewFact(events.Stamp{ID: "id", Source: "test", Time: time.Now()}, events.Scope{Run: "run", Trial: "main", Actor: actor}, body)
}

func newTestJoining(t *testing.T, local ...int) (*Joining, *factLog) {
	log := &factLog{}
	return Join(t.Context(), Config{Local: local, Node: events.Node(3), Fact: fact, Append: log.Append}), log
}

func shortPlan(id string, rank int) *events.LocalPlan {
	return &events.LocalPlan{Attempt: 1, Checkpoint: id, Name: "x", Rank: rank, Fingerprint: strings.Repeat(fmt.Sprintf("%02x", rank), 32)}
}

// Facts of all ranks of a node become one event at once. Those of some become one after a
// while, and those of a single rank stay its own.
func TestFactsOfNodeAreJoined(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j, log := newTestJoining(t, 8, 9, 10)
		record := func(after time.Duration, rank int, body events.Body) {
			go func() {
				<-time.After(after)
				if err := j.Record(t.Context(), rank, body); err != nil {
					t.Error(err)
				}
			}()
		}
		want := func(step, want string) {
			t.Helper()
			synctest.Wait()
			if got := log.text(); got != want {
				t.Errorf("%s: %s, want %s", step, got, want)
			}
		}
		pass := func(d time.Duration) { <-time.After(d) }
		seal := func(id string, rank int) events.Body {
			return &events.WriteSealed{Attempt: 1, Checkpoint: id, Rank: rank}
		}
		for _, rank := range []int{9, 8, 10} {
			record(0, rank, shortPlan("x.a1", rank))
		}
		want("all plan", "n3 plan.node")
		record(0, 8, seal("x.a1", 8))
		record(0, 10, seal("x.a1", 10))
		want("two seal", "")
		pass(windows[sealed])
		want("the window of two seals has passed", "n3 seal.node")
		record(0, 9, seal("x.a1", 9))
		want("the last seals", "r9 write.sealed")
		for _, rank := range []int{8, 9, 10} {
			record(0, rank, shortPlan("y.a1", rank))
		}
		want("all plan again", "n3 plan.node same")
		record(0, 8, shortPlan("z.a1", 8))
		record(0, 9, shortPlan("z.a1", 9))
		pass(windows[planned])
		want("two plan", "n3 plan.node")
		full := shortPlan("w.a1", 8)
		full.Plan, full.Participants = events.InlineBlob([]byte("plan")), []int{0, 8, 10}
		record(0, 8, full)
		want("a full plan", "r8 plan.local")
		record(0, 8, seal("w.a1", 8))
		record(0, 10, seal("w.a1", 10))
		want("both participants of the node seal", "n3 seal.node")
		record(0, 8, &events.WriteFailed{Attempt: 1, Checkpoint: "w.a1", Rank: 8})
		want("a failure", "r8 write.failed")
		differs := shortPlan("v.a1", 9)
		differs.Step = 7
		record(0, 8, shortPlan("v.a1", 8))
		record(0, 9, differs)
		record(0, 10, shortPlan("v.a1", 10))
		want("plans that differ", "r8 plan.local, r9 plan.local, r10 plan.local")
	})
}

// Each rank learns that the log refused its fact. The coordinator may not have the
// fingerprints then, so they are listed again.
func TestFactsOfNodeRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j, log := newTestJoining(t, 0, 1)
		plan := func(id string) (failed int) {
			done := make(chan error)
			for rank := range 2 {
				go func() { done <- j.Record(t.Context(), rank, shortPlan(id, rank)) }()
			}
			for range 2 {
				if err := <-done; errors.Is(err, errFactRefused) {
					failed++
				}
			}
			return failed
		}
		log.err = errFactRefused
		if n := plan("x.a1"); n != 2 {
			t.Errorf("%d of 2 ranks have the error", n)
		}
		log.err = nil
		if n := plan("y.a1"); n != 0 || strings.Contains(log.text(), "same") {
			t.Errorf("%d ranks have an error, or the digest stands for fingerprints that the log lacks", n)
		}
	})
}

var errFactRefused = errors.New("no room")

// A fact that comes after the end of its save leaves nothing behind.
func TestJoiningForgets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j, _ := newTestJoining(t, 0, 1)
		for i := range 1000 {
			id := fmt.Sprint("x", i, ".a1")
			for rank := range 2 {
				go func() { _ = j.Record(t.Context(), rank, shortPlan(id, rank)) }()
			}
			synctest.Wait()
			j.Forget(id) // aborted
			for rank := range 2 {
				go func() { _ = j.Record(t.Context(), rank, &events.WriteSealed{Attempt: 1, Checkpoint: id, Rank: rank}) }()
			}
			synctest.Wait()
			<-time.After(time.Second)
		}
		if n := len(j.saves); n > 0 {
			t.Errorf("%d saves that have ended are kept", n)
		}
	})
}
