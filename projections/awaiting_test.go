package projections

import (
	"fmt"
	"testing"

	"github.com/ckptstore/ckptstore/events"
)

// costs counts what a fold does to a table: each read, write and visited row.
type costs struct {
	*Memory
	n int
}

func (c *costs) Get(key []byte) ([]byte, error) {
	c.n++
	return c.Memory.Get(key)
}

func (c *costs) Scan(lo, hi []byte, visit func(key, value []byte) error) error {
	c.n++
	return c.Memory.Scan(lo, hi, func(key, value []byte) error {
		c.n++
		return visit(key, value)
	})
}

func (c *costs) Set(key, value []byte) error {
	c.n++
	return c.Memory.Set(key, value)
}

func (c *costs) Delete(key []byte) error {
	c.n++
	return c.Memory.Delete(key)
}

// TestFoldCostIsFlat checks that an event costs as much after hundreds of saves as in the
// beginning, whatever the steps of saves and reports are, and that the sets of awaiting
// checkpoints have a row for each of them.
func TestFoldCostIsFlat(t *testing.T) {
	const saves, reports = 400, 5 // reports after each save
	same := func(i int) int { return i }
	for name, run := range map[string]struct {
		save, report func(i int) int // steps
		order        func(i int) int // iterations, from 1
		silent       bool
		deletes      bool // each save but the newest
	}{
		"same steps":                  {save: same, report: same},
		"silent":                      {save: same, silent: true},
		"reports are ahead":           {save: func(i int) int { return i / reports }, report: same},
		"saves are ahead":             {save: func(i int) int { return 1e6 + i }, report: same},
		"saves are ahead and deleted": {save: func(i int) int { return 1e6 + i }, report: same, deletes: true},
		"saves are ahead, falling":    {save: func(i int) int { return 1e6 - i }, report: same},
		"one step":                    {save: func(int) int { return 0 }, report: func(int) int { return 0 }},
		"one step and deleted":        {save: func(int) int { return 0 }, report: func(int) int { return 0 }, deletes: true},
		"reports stay behind":         {save: same, report: func(int) int { return 0 }},
		"reports in pairs, reversed":  {save: func(i int) int { return 1e6 + i }, report: same, order: func(i int) int { return (i - 1) ^ 1 + 1 }},
		"reports fall":                {save: func(i int) int { return 1e6 + i }, report: func(i int) int { return 1e6 - i }},
	} {
		t.Run(name, func(t *testing.T) {
			rows := &costs{Memory: NewMemory()}
			sequence := uint64(0)
			var each []int // costs of the events about one save
			add := func(actor events.Actor, kind events.Kind, format string, a ...any) {
				t.Helper()
				sequence++
				scope := events.Scope{Run: "demo", Trial: DefaultTrial, Actor: actor}
				if err := Apply(rows, recorded(sequence, scope, kind, fmt.Sprintf(format, a...))); err != nil {
					t.Fatal(err)
				}
			}
			add(events.Server, "group.started", `{"attempt":1,"world_size":1,"ranks":[{}]}`)
			for i := range saves {
				before := rows.n
				if !run.silent {
					for j := range reports {
						n := i*reports + j + 1
						if run.order != nil {
							n = run.order(n)
						}
						add(events.Rank(0), "report.metrics", `{"attempt":1,"iteration":%d,"step":%d,"metrics":{"loss":1},"time_this_iter_s":1}`, n, run.report(n))
					}
				}
				step := run.save((i + 1) * reports)
				add(events.Server, "checkpoint.begun", `{"attempt":1,"checkpoint":"s%d.a1","name":"s%d","step":%d,"world_size":1,"participants":[0]}`, i, i, step)
				add(events.Server, "checkpoint.committed", `{"attempt":1,"checkpoint":"s%d.a1","manifest":"m","bytes":1}`, i)
				if run.deletes && i > 0 {
					add(events.Server, "checkpoint.deleted", `{"checkpoint":"s%d.a1","reason":"retention"}`, i-1)
				}
				each = append(each, rows.n-before)
			}
			sum := func(list []int) (n int) {
				for _, c := range list {
					n += c
				}
				return n
			}
			early, late := sum(each[saves/8:saves/4]), sum(each[saves-saves/8:])
			if 4*late > 5*early {
				t.Errorf("%d saves cost %d reads and writes in the beginning, and %d in the end", saves/8, early, late)
			}
			held, sets := 0, 0
			for k := range dump(t, rows) {
				if k[0] == keyHeld {
					held++
				}
			}
			err := rows.Memory.Scan([]byte{keyAwait}, []byte{keyAwait + 1}, func(k, value []byte) error {
				var a awaiting
				err := decode(k, value, &a)
				sets += a.Fresh.N + a.Equal.N + a.Above.N
				return err
			})
			if err != nil || held != sets {
				t.Errorf("%d rows of checkpoints are in sets of %d, %v", held, sets, err)
			}
		})
	}
}
