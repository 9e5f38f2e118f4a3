package blame

import (
	"strings"
	"testing"
	"time"
)

// Each kind of failure has a budget of its own, and preemptions have none.
func TestBudgets(t *testing.T) {
	const w, i, p = Worker, Infrastructure, Preemption
	for _, c := range []struct {
		name                    string
		workers, infrastructure int
		failures                []Kind
		refused                 int // number of the failure that is refused, from 1; 0: none
		restarts                int // TORCHELASTIC_RESTART_COUNT of the last attempt
	}{
		{"none is allowed", 0, 0, []Kind{w}, 1, 0},
		{"N are tolerated", 2, 0, []Kind{w, w, w}, 3, 2},
		{"the zero value is the worker's", 1, 0, []Kind{"", ""}, 2, 1},
		{"any number", -1, 0, []Kind{w, w, w, w, w, w}, 0, 6},
		{"one does not pay for the other", 1, 2, []Kind{i, w, i, i}, 4, 1},
		{"the worker's is used up", 1, 10, []Kind{i, w, i, w}, 4, 1},
		{"infrastructure without end", 0, -1, []Kind{i, i, i, i, w}, 5, 0},
		{"preemptions are free", 0, 0, []Kind{p, p, p, p}, 0, 0},
		{"preemptions between failures", 1, 1, []Kind{p, w, p, i, p, w}, 6, 1},
	} {
		t.Run(c.name, func(t *testing.T) {
			b := Budgets{Workers: c.workers, Infrastructure: c.infrastructure}
			refused := 0
			for n, kind := range c.failures {
				if !b.Charge(kind) && refused == 0 {
					refused = n + 1
				}
			}
			if refused != c.refused || b.Used(Worker) != c.restarts || b.Used(Preemption) != 0 {
				t.Errorf("failure %d is refused, and the workers see %d restarts; want %d and %d", refused, b.Used(Worker), c.refused, c.restarts)
			}
		})
	}
}

// Restarts of workers that a node was to blame for are not charged.
func TestBudgetExcused(t *testing.T) {
	t.Parallel()
	b := Budgets{Workers: 1, Infrastructure: 1}
	if !b.Charge(Worker) {
		t.Fatal("no budget")
	}
	b.Excuse(Worker, 1)
	if !b.Charge(Infrastructure) || !b.Charge(Worker) || b.Charge(Worker) {
		t.Errorf("budgets %+v", b)
	}
	b.Excuse(Worker, 7)
	if b.Used(Worker) != 0 || b.Used(Infrastructure) != 1 {
		t.Errorf("%d and %d used", b.Used(Worker), b.Used(Infrastructure))
	}
	b.Excuse(Infrastructure, -1)
	if b.Used(Infrastructure) != 1 {
		t.Errorf("%d used", b.Used(Infrastructure))
	}
	b.Excuse(Infrastructure, 1)
	if b.Used(Infrastructure) != 0 {
		t.Errorf("%d used", b.Used(Infrastructure))
	}
}

func TestBackoffWaits(t *testing.T) {
	b := Backoff{Enough: 5 * time.Second}
	for i, c := range []struct {
		lived     time.Duration
		committed bool
		want      time.Duration
	}{
		{0, false, 100 * time.Millisecond},
		{time.Second, false, 200 * time.Millisecond},
		{0, false, 400 * time.Millisecond},
		{0, true, 0},
		{0, false, 100 * time.Millisecond},
		{5 * time.Second, false, 0},
		{0, false, 100 * time.Millisecond},
	} {
		if got := b.After(c.lived, c.committed); got != c.want {
			t.Errorf("%d: %v, want %v", i, got, c.want)
		}
	}
	for range 20 {
		b.After(0, false)
	}
	if got := b.After(0, false); got != maxBackoff {
		t.Errorf("at last %v", got)
	}
}

// Attempts fail alike if they resume from the same checkpoint, and nothing is committed between them.
func TestCrashLoop(t *testing.T) {
	t.Parallel()
	type end struct {
		resume string
		stands bool
		rank   int
		cause  string
	}
	for name, c := range map[string]struct {
		ends []end
		want string // the last message begins with it
	}{
		"once":                  {[]end{{"a", true, 1, "x"}}, ""},
		"twice":                 {[]end{{"a", true, 1, "x"}, {"a", true, 1, "x"}}, "attempts 1 and 2 failed alike after resuming from a: "},
		"three times":           {[]end{{"a", true, 1, "x"}, {"a", true, 1, "x"}, {"a", true, 1, "x"}}, "attempts 1 to 3 failed alike after resuming from a: "},
		"from the beginning":    {[]end{{"", true, 1, "x"}, {"", true, 1, "x"}}, "attempts 1 and 2 failed alike, each from the beginning: "},
		"a commit in between":   {[]end{{"a", true, 1, "x"}, {"a", false, 1, "x"}, {"a", true, 1, "x"}}, ""},
		"another rank":          {[]end{{"a", true, 1, "x"}, {"a", true, 2, "x"}}, ""},
		"another cause":         {[]end{{"a", true, 1, "x"}, {"a", true, 1, "y"}}, ""},
		"another checkpoint":    {[]end{{"a", true, 1, "x"}, {"b", true, 1, "x"}}, ""},
		"another one, repeated": {[]end{{"a", true, 1, "x"}, {"b", true, 1, "x"}, {"b", true, 1, "x"}}, "attempts 2 and 3 failed alike after resuming from b: "},
	} {
		loop, got := CrashLoop{Run: "digits"}, ""
		for i, e := range c.ends {
			got = loop.Failed(i+1, e.resume, e.stands, e.rank, e.cause)
		}
		if got == "" != (c.want == "") || !strings.HasPrefix(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}
