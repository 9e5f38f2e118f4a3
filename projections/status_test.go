package projections

import (
	"encoding/json"
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/events"
)

// statusTable is the table in the comment of [Status], with the events in the same
// order.
var statusTable = map[Status][6]Status{
	Pending:   {Pending, Stopping, Running, Paused, Completed, Errored},
	Running:   {Running, Stopping, Running, Paused, Completed, Errored},
	Stopping:  {Stopping, Stopping, Running, Paused, Completed, Errored},
	Paused:    {Paused, Paused, Running, Paused, Completed, Errored},
	Completed: {Completed, Completed, Running, Paused, Completed, Errored},
	Errored:   {Errored, Errored, Running, Paused, Completed, Errored},
}

// Any sequence of decisions and facts leaves a trial in the status of the table, with a
// reason exactly if the status has one.
func TestStatusFollowsItsTable(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rows, seq := NewMemory(), uint64(0)
		say := func(actor events.Actor, body events.Body) {
			data, err := json.Marshal(body)
			if err != nil {
				t.Fatal(err)
			}
			seq++
			scope := events.Scope{Run: "run", Trial: "main", Actor: actor}
			if err := Apply(rows, recorded(seq, scope, body.Kind(), string(data))); err != nil {
				t.Fatalf("%s: %v", body.Kind(), err)
			}
		}
		want, message, newest, job := Pending, "", 0, ""
		for i := range rapid.IntRange(1, 60).Draw(t, "events") {
			event := rapid.IntRange(0, 8).Draw(t, "event")
			attempt := max(1, newest+rapid.IntRange(-2, 1).Draw(t, "attempt"))
			reason := fmt.Sprint("reason ", i)
			changes := true
			switch event {
			case 0:
				say(events.Server, events.TrialCreated{Config: map[string]any{"i": i}})
			case 1:
				meant := rapid.SampledFrom([]string{"", "J1", "J2"}).Draw(t, "meant for")
				say(events.Server, events.TrialStopRequested{Reason: reason, Job: meant})
				changes = (meant == "" || job == "" || meant == job) && (want == Pending || want == Running)
			case 2:
				of := rapid.SampledFrom([]string{"J1", "J2"}).Draw(t, "job")
				say(events.Server, events.GroupStarted{Attempt: attempt, Job: of, WorldSize: 1})
				if changes = attempt > newest; changes {
					newest, job = attempt, of
				}
			case 3:
				say(events.Server, events.TrialPaused{Attempt: attempt, Reason: reason})
			case 4:
				say(events.Server, events.TrialCompleted{Attempt: attempt})
			case 5:
				say(events.Server, events.TrialErrored{Attempt: attempt, Message: reason})
			case 6: // facts, which decide nothing
				say(events.Node(0), events.JobEnded{Job: "J1", ExitCode: 1})
				continue
			case 7:
				say(events.Rank(0), events.WorkerExited{Attempt: attempt, Code: 1})
				continue
			case 8: // decides nothing, because it is not in the lane
				say(events.Node(0), events.TrialCompleted{Attempt: attempt})
				continue
			}
			if changes && event != 0 {
				want, message = statusTable[want][event], ""
				if want == Stopping || want == Paused || want == Errored {
					message = reason
				}
			}
			trial, err := GetTrial(rows, "run", "main")
			if err != nil {
				t.Fatal(err)
			}
			if _, legal := statusTable[trial.Status]; !legal || trial.Status != want || trial.Message != message || trial.Attempt != newest {
				t.Fatalf("after event %d: status %q %q, attempt %d; want %q %q, attempt %d", i, trial.Status, trial.Message, trial.Attempt, want, message, newest)
			}
		}
	})
}
