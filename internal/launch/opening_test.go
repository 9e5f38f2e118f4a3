package launch_test

import (
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/process"
)

// A node that has joined, and hangs before it has opened the store, is in no group: another one takes its
// place.
func TestNodeThatHangsAtStart(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, busyFor...)
	j.coordinate(1, 1)
	port, err := launch.HoldPort()
	if err != nil {
		t.Fatal(err)
	}
	hanging := config(j.cfg.Run, 1, j.cfg.Command, newTranscript(), newTranscript())
	hanging.Port = port
	link := j.join(1, hanging, &process.Contact{})
	defer link.Close()
	j.follow(2, 1)
	j.must()
	for _, g := range bodiesOf[events.GroupStarted](t, runOf(t)) {
		var of []int
		for _, run := range g.Nodes {
			for n := range run.Nodes {
				of = append(of, run.Node+n)
			}
		}
		if !slices.Equal(of, []int{0, 2}) {
			t.Errorf("attempt %d has the nodes %v", g.Attempt, of)
		}
	}
}
