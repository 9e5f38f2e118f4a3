package planner

import (
	"fmt"
	"strings"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// Apply folds one event of the log, in sequence order. Blobs must have been resolved to their
// inline form. An unresolved blob, or another fact that no rank can have sent, fails its
// save. Apply ignores events of other trials and attempts, except that a newer attempt fences
// this one. The error is an [events.ErrNewer].
func (c *Coordinator) Apply(r events.Recorded) error {
	if r.Scope.Run != c.cfg.Run || r.Scope.Trial != c.cfg.Trial || c.fenced > 0 {
		return nil
	}
	body, err := r.Body()
	if err != nil {
		return err
	}
	switch b := body.(type) {
	case *events.GroupStarted:
		if b.Attempt > c.cfg.Attempt {
			c.fenced = b.Attempt
			clear(c.saves)
			clear(c.refused)
			clear(c.adopted)
			c.changed, c.waiting = nil, nil
		}
	case *events.LocalPlan:
		if b.Attempt == c.cfg.Attempt {
			c.localPlan(r.Sequence, b)
		}
	case *events.NodePlan:
		if b.Attempt == c.cfg.Attempt {
			c.nodePlan(r.Sequence, b)
		}
	case *events.GroupCoordinator:
		if b.Attempt == c.cfg.Attempt {
			c.by = events.Node(b.Node)
		}
	case *events.WorkerExited:
		// A coordinator that was replaced may have been paused while it recorded the ranks that it took for lost.
		replaced := b.Unseen && c.by != "" && r.Scope.Actor != c.by
		if b.Attempt == c.cfg.Attempt && !replaced {
			c.exited[b.Rank] = exited(b)
			c.exits = append(c.exits, b.Rank)
			c.changeAll()
		}
	case *events.CheckpointBegun:
		if b.Attempt == c.cfg.Attempt {
			s := c.open(b.Checkpoint, r.Sequence)
			s.begun, s.name, s.step = true, b.Name, b.Step
			if now := ranksOf(b.Participants, b.WorldSize); !s.participants.equal(now) {
				s.involve(now)
			}
			for _, rank := range c.adopted[b.Checkpoint] {
				s.seal(rank)
			}
			delete(c.adopted, b.Checkpoint)
		}
	case *events.CheckpointCommitted:
		c.end(b.Checkpoint)
	case *events.CheckpointAborted:
		c.end(b.Checkpoint)
	default:
		c.progress(body)
	}
	return nil
}

// progress folds facts that concern only open saves; facts about a save that has ended change
// nothing.
func (c *Coordinator) progress(body events.Body) {
	switch b := body.(type) {
	case *events.GlobalPlan:
		if s := c.change(b.Checkpoint); s != nil {
			c.globalPlan(s, b)
		}
	case *events.WriteSealed:
		if s := c.change(b.Checkpoint); s != nil {
			s.seal(b.Rank)
		}
	case *events.NodeSeal:
		if s := c.change(b.Checkpoint); s != nil {
			for of := range b.Each() {
				s.seal(of.Rank)
			}
		}
	case *events.CheckpointStaged:
		if s := c.change(b.Checkpoint); s != nil {
			s.staged = true
		}
	case *events.WriteCompleted:
		if s := c.change(b.Checkpoint); s != nil {
			s.completed(b)
		}
	case *events.NodeWrite:
		if s := c.change(b.Checkpoint); s != nil {
			for of := range b.Each() {
				s.completed(of)
			}
		}
	case *events.WriteFailed:
		c.failed(b)
	}
}

// failed folds the failure of a rank in a save. A failure before any plan of that save is
// kept for the plan that opens it.
func (c *Coordinator) failed(b *events.WriteFailed) {
	if b.Attempt != c.cfg.Attempt || c.ended[b.Checkpoint] {
		return
	}
	s := c.change(b.Checkpoint)
	switch {
	case s == nil:
		c.refused[b.Checkpoint] = append(c.refused[b.Checkpoint], b)
	case !s.participants.has(b.Rank): // it saves another checkpoint under this name, or none
	case s.writes[b.Rank] != checkpoint.Digest{}: // its files are complete, whatever became of its node
	case s.sealed[b.Rank]:
		s.fail(fmt.Sprintf("rank %d could not be written: %s", b.Rank, b.Error), b.Rank)
	default:
		s.fail(fmt.Sprintf("rank %d could not save: %s", b.Rank, b.Error), b.Rank)
	}
}

func (c *Coordinator) open(id string, seq uint64) *save {
	s := c.saves[id]
	if s == nil {
		s = &save{
			id: id, seq: seq, offers: map[int]offer{}, sealed: map[int]bool{},
			writes: map[int]checkpoint.Digest{}, asked: map[string]bool{}, written: map[int]bool{},
		}
		c.saves[id] = s
	}
	return c.change(id)
}

// end closes a save for good: a later plan does not reopen it.
func (c *Coordinator) end(id string) {
	if s := c.saves[id]; s != nil {
		s.over = true
	}
	delete(c.saves, id)
	delete(c.refused, id)
	delete(c.adopted, id)
	c.ended[id] = true
}

// exited describes how a worker ended, for the reason of an abort.
func exited(b *events.WorkerExited) string {
	if b.Unseen { // how is unknown
		return fmt.Sprintf("rank %d was gone before it had sealed its bytes: %s", b.Rank, b.Message)
	}
	if b.Signal != "" {
		return fmt.Sprintf("rank %d was killed by %s before it had sealed its bytes", b.Rank, b.Signal)
	}
	return fmt.Sprintf("rank %d exited with code %d before it had sealed its bytes", b.Rank, b.Code)
}

// maxReason bounds the reason of an abort in bytes: an event has to fit the log, and a line
// for each of a hundred thousand shards is useless.
const maxReason = 16 << 10

// shorten cuts a list of problems, one per line, to maxReason.
func shorten(problems string) string {
	if len(problems) <= maxReason {
		return problems
	}
	cut := strings.LastIndexByte(problems[:maxReason], '\n')
	if cut < 0 {
		return strings.ToValidUTF8(problems[:maxReason], "") + "…"
	}
	return fmt.Sprintf("%s\n… and %d more problems", problems[:cut], strings.Count(problems[cut:], "\n"))
}
