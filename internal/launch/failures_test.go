package launch

import (
	"strings"
	"testing"
)

// Each kind of failure has a budget of its own, and preemptions have none.
func TestBudgets(t *testing.T) {
	const w, i, p = WorkerFailure, InfrastructureFailure, PreemptionFailure
	for _, c := range []struct {
		name                    string
		workers, infrastructure int
		failures                []FailureKind
		refused                 int // number of the failure that is refused, from 1; 0: none
		restarts                int // TORCHELASTIC_RESTART_COUNT of the last attempt
	}{
		{"none is allowed", 0, 0, []FailureKind{w}, 1, 0},
		{"N are tolerated", 2, 0, []FailureKind{w, w, w}, 3, 2},
		{"the zero value is the worker's", 1, 0, []FailureKind{"", ""}, 2, 1},
		{"any number", -1, 0, []FailureKind{w, w, w, w, w, w}, 0, 6},
		{"one does not pay for the other", 1, 2, []FailureKind{i, w, i, i}, 4, 1},
		{"the worker's is used up", 1, 10, []FailureKind{i, w, i, w}, 4, 1},
		{"infrastructure without end", 0, -1, []FailureKind{i, i, i, i, w}, 5, 0},
		{"preemptions are free", 0, 0, []FailureKind{p, p, p, p}, 0, 0},
		{"preemptions between failures", 1, 1, []FailureKind{p, w, p, i, p, w}, 6, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := budgets{workers: c.workers, infrastructure: c.infrastructure}
			refused := 0
			for n, kind := range c.failures {
				if !b.charge(kind) && refused == 0 {
					refused = n + 1
				}
			}
			if refused != c.refused || b.used(WorkerFailure) != c.restarts || b.used(PreemptionFailure) != 0 {
				t.Errorf("failure %d is refused, and the workers see %d restarts; want %d and %d", refused, b.used(WorkerFailure), c.refused, c.restarts)
			}
		})
	}
}

func TestFailedErrorNamesItsBudget(t *testing.T) {
	e := &FailedError{Attempt: 12, Restarts: 10, Kind: InfrastructureFailure, Cause: "a device is lost", Advice: "look at it"}
	if got := e.Error(); !strings.Contains(got, "no restart for failures of the infrastructure is left (10 used): a device is lost; look at it") {
		t.Error(got)
	}
}
