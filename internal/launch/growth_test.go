package launch

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/session"
)

// The ranks are asked to save and end as long as the group is to grow. A request to the job comes
// first. An attempt has ended to grow only if its ranks were asked, and did not continue after that.
func TestAskedToGrow(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		do   string // t: a report is answered, g: the group is to grow, b: not any more, e: the ranks that got that must have ended, p: the job is preempted
		told string // the answers
		grew bool
	}{
		"not asked":                 {"tt", "..", false},
		"asked, no report":          {"tg", ".", false},
		"asked":                     {"tgt", ".g", true},
		"taken back, no report":     {"tgtb", ".g", true},
		"taken back, one continues": {"tgtbt", ".g.", true}, // while another saves and ends
		"taken back, they continue": {"tgtbet", ".g.", false},
		"the job is preempted":      {"gpt", "p", false},
		"preempted after that":      {"gtpt", "gp", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			h := &stopState{orders: newOrders()}
			told := ""
			for _, do := range c.do {
				switch do {
				case 't':
					told += map[string]string{"": ".", client.Preempt: "p", session.Grow: "g"}[h.Tell()]
				case 'g':
					h.ask(&growth{from: 2, to: 3, joined: "node 2 on c"})
				case 'b':
					h.takeBack(time.Now().Add(time.Hour))
				case 'e':
					h.takeBack(time.Now().Add(-time.Hour))
				case 'p':
					h.orders.give(StopRequest{Preempt: true})
				}
			}
			if grew := h.grew() != nil; told != c.told || grew != c.grew {
				t.Errorf("told %s, grew %v; want %s, %v", told, grew, c.told, c.grew)
			}
		})
	}
}

// An attempt whose workers failed when they were asked to end grows too; an attempt that lost a node does not.
func TestGrows(t *testing.T) {
	t.Parallel()
	j := &job{}
	if j.grows(nil) {
		t.Error("a group that was not asked grows")
	}
	j.grew = &growth{from: 2, to: 3, joined: "node 2 on c"}
	failed := &FailedError{Cause: "rank 1 exited with code 1"}
	if !j.grows(nil) || !j.grows(failed) || j.grows(&FailedError{Kind: blame.Infrastructure}) {
		t.Error("wrong")
	}
	j.finished = true
	if j.grows(nil) || !j.grows(failed) {
		t.Error("a training that is done starts again, or a rank that failed after its last report is passed over")
	}
	if got := j.grew.ending(failed); !strings.HasPrefix(got, "grown from 2 to 3 nodes: node 2 on c joined") || !strings.HasSuffix(got, failed.Cause) {
		t.Error(got)
	}
}

// doubtful is a group that can grow by a node, except at the checks that it lists.
type doubtful struct {
	checks  int
	suspect map[int]bool
}

func (d *doubtful) Growth() (int, time.Duration) {
	if d.checks++; d.suspect[d.checks] {
		return 0, 0
	}
	return 1, time.Hour
}

func (d *doubtful) Timeout() time.Duration { return time.Second }

func (d *doubtful) Members() []nodes.Member {
	return []nodes.Member{{Node: nodes.Node{Index: 2, Host: "c"}, State: nodes.StateSpare}}
}

// A node is suspect for a moment while the log is read: the group grows after that, in the same attempt.
func TestGrowsAfterDoubt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		w := &watch{job: &job{log: slog.New(slog.DiscardHandler)}, stop: &stopState{}, group: &session.Group{}}
		w.cfg.Nodes, w.cfg.GrowInterval = session.Nodes{{0}, {1}}, time.Second
		w.stop.open.Store(true)
		heads := 0
		head := func(context.Context) (string, bool) {
			heads++
			return strings.Repeat("c", heads), true
		}
		d := &doubtful{suspect: map[int]bool{5: true}}
		if g := w.growable(ctx, d, head); g == nil || g.to != 3 || g.joined != "node 2 on c" {
			t.Errorf("growth %+v", g)
		}
	})
}

// A larger group that fails before it has committed a checkpoint excludes the new nodes, unless ranks of an old node
// alone failed by themselves: then its next failure does.
func TestUnjoin(t *testing.T) {
	t.Parallel()
	failed := func(rank int, nodes ...int) *FailedError {
		e := &FailedError{Rank: rank, Cause: "exited with code 1", failed: map[int]bool{}}
		for _, index := range nodes {
			e.failed[index] = true
		}
		return e
	}
	for name, c := range map[string]struct {
		causes   []*FailedError
		progress bool
		later    bool   // the new node comes after the first failure
		want     string // x: the new node is excluded
	}{
		"the new node":                   {[]*FailedError{failed(1, 1)}, false, false, "x"},
		"the old node":                   {[]*FailedError{failed(0, 0)}, false, false, "-"},
		"the old node twice":             {[]*FailedError{failed(0, 0), failed(0, 0)}, false, false, "-x"},
		"the old node, then the new one": {[]*FailedError{failed(0, 0), failed(1, 1)}, false, false, "-x"},
		"both":                           {[]*FailedError{failed(0, 0, 1)}, false, false, "x"},
		"a hang":                         {[]*FailedError{failed(-1)}, false, false, "x"},
		"a commit in between":            {[]*FailedError{failed(1, 1)}, true, false, "-"},
		"the infrastructure":             {[]*FailedError{{Rank: -1, Kind: blame.Infrastructure}, failed(1, 1)}, false, false, "--"},
		"the old node, then a spare":     {[]*FailedError{failed(0, 0), failed(1, 1)}, false, true, "--"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			e, err := nodes.Listen(t.Context(), nodes.EndpointConfig{
				Address: "127.0.0.1:0", Dir: dir, Job: "job", Run: "run", Store: "store", Version: "test", Min: 1, Max: 2,
				Self: nodes.Node{Index: 0, Key: "0", Procs: 1},
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = e.Close() })
			link, err := nodes.Join(t.Context(), nodes.JoinConfig{
				Address: e.Addr().String(), Dir: dir, Wait: 30 * time.Second,
				Self: nodes.Node{Index: 1, Key: "1", Host: "other", Procs: 1, Version: "test", Store: "store"},
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(link.Close)
			j := &job{log: slog.New(slog.DiscardHandler)}
			j.cfg.Nodes = session.Nodes{{0}, {1}}
			members := e.Members()
			f := &fleet{job: j, endpoint: e, members: members, before: members[:1]}
			if c.later {
				f.members = members[:1]
			}
			got := ""
			for _, cause := range c.causes {
				if f.unjoin(cause, c.progress) {
					got += "x"
				} else {
					got += "-"
				}
				f.members = members
			}
			if got != c.want {
				t.Errorf("%s, want %s", got, c.want)
			}
		})
	}
}
