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
