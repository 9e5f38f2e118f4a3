package projections

import (
	"fmt"
	"testing"

	"github.com/ckptstore/ckptstore/events"
)

// counted is a table that counts operations.
type counted struct {
	Table
	written, bytes, read int
}

// Set implements Table.
func (c *counted) Set(key, value []byte) error {
	c.written++
	c.bytes += len(key) + len(value)
	return c.Table.Set(key, value)
}

// Get implements Table.
func (c *counted) Get(key []byte) ([]byte, error) {
	c.read++
	return c.Table.Get(key)
}

// Scan implements Table.
func (c *counted) Scan(lo, hi []byte, visit func(key, value []byte) error) error {
	return c.Table.Scan(lo, hi, func(key, value []byte) error {
		c.read++
		return visit(key, value)
	})
}

// A report costs the same work among thousands of trials as alone: the state of the
// others is not written again.
func TestReportCostsTheSameAmongThousandsOfTrials(t *testing.T) {
	cost := func(trials int) counted {
		rows := &counted{Table: NewMemory()}
		seq := uint64(0)
		add := func(trial string, actor events.Actor, kind events.Kind, body string) {
			seq++
			r := recorded(seq, events.Scope{Run: "sweep", Trial: trial, Actor: actor}, kind, body)
			if err := Apply(rows, r); err != nil {
				t.Fatal(err)
			}
		}
		report := func(trial string, iteration int) {
			add(trial, "n0", "report.metrics", fmt.Sprintf(`{"attempt":1,"iteration":%d,"step":%d,"metrics":{"loss":0.5}}`, iteration, iteration))
		}
		for n := range trials {
			trial := fmt.Sprintf("t%04d", n)
			add(trial, "s", "trial.created", `{"config":{"lr":0.1}}`)
			add(trial, "s", "group.started", `{"attempt":1,"job":"j","world_size":1,"ranks":[{"rank":0}]}`)
			report(trial, 1)
		}
		*rows = counted{Table: rows.Table}
		report("t0000", 2)
		rows.Table = nil
		return *rows
	}
	alone, among := cost(1), cost(3000)
	const digits = 8 // of a later sequence
	if alone.written != 1 || among.written != 1 || among.read != alone.read || among.bytes > alone.bytes+digits {
		t.Errorf("a report writes and reads %+v alone, and %+v among 3000 trials", alone, among)
	}
}
