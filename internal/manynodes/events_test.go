//go:build testbed || outlive

package main

import (
	"bytes"
	"encoding/json"
	"strings"
)

// event is an event of the log, with the fields that scenarios look at.
type event struct {
	Type     string
	Source   string
	Subject  string
	Sequence uint64
	Data     struct {
		Attempt    int
		Iteration  int
		Resume     string
		Job        string
		Node       int
		Checkpoint string
		Reason     string
		Slots      int64
		Passed     int64
		Wanted     int64
		Lost       bool
		Excluded   bool
		Over       bool
		By         string
		Seconds    float64
		Others     float64  `json:"others_s"`
		Clock      *float64 `json:"clock_s"`
	}
}

// events returns the events of the run. No process may own the store.
func (s *scene) events() (all []event) {
	s.t.Helper()
	out := must[[]byte](s.t)(s.ckptstore(s.ctx, "events", run, "-o", "jsonl"))
	for line := range bytes.Lines(out) {
		var e event
		check(s.t, json.Unmarshal(line, &e))
		all = append(all, e)
	}
	if len(all) == 0 {
		s.t.Fatal("the log has no event")
	}
	return all
}

// of returns the events of a kind, of any version.
func of(all []event, kind string) (some []event) {
	for _, e := range all {
		if strings.HasPrefix(e.Type, "ckpt."+kind+".") {
			some = append(some, e)
		}
	}
	return some
}

// lostNodes returns the departures of nodes that did not leave in order.
func lostNodes(all []event) (some []event) {
	for _, e := range of(all, "job.node_left") {
		if e.Data.Lost {
			some = append(some, e)
		}
	}
	return some
}
