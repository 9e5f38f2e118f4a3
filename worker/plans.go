package worker

import (
	"encoding/hex"
	"errors"
	"net/http"
	"slices"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/worker/client"
)

// knownPlans is how many plans of a rank are remembered: those of a full
// checkpoint, of one without the optimizer, and of their predecessors.
const knownPlans = 4

// localPlans are what one rank has saved by in this attempt. What was sent
// once need not be sent again: a token stands for the items on the socket, a
// fingerprint for the plan in the log.
type localPlans struct {
	plans []localPlan // the last one is the most recently added
	said  map[string]bool
}

// localPlan is the items of a save, without checks, and their token.
type localPlan struct {
	token string
	local plan.Local
}

// local is the plan of a request, and the token that stands for it. Its items
// have checks if the worker has sent any.
func (s *rankServer) local(req client.SaveRequest) (local plan.Local, token string, err error) {
	if req.Plan != "" {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, p := range s.plans.plans {
			if p.token == req.Plan {
				return p.local, p.token, nil
			}
		}
		return plan.Local{}, "", &problem{http.StatusPreconditionFailed, errUnknownPlan}
	}
	local.Rank = s.rank
	seen := map[string]bool{}
	for _, it := range req.Items {
		p, err := planItem(it)
		if err != nil {
			return plan.Local{}, "", err
		}
		if seen[itemKey(p)] {
			return plan.Local{}, "", badRequest("%q is saved twice", it.FQN)
		}
		seen[itemKey(p)] = true
		local.Items = append(local.Items, p)
	}
	bare := plan.Local{Rank: local.Rank, Items: slices.Clone(local.Items)}
	for i := range bare.Items {
		bare.Items[i].Check = plan.Check{}
	}
	token = plan.Sum(plan.EncodeLocal(bare)).String()
	s.mu.Lock()
	defer s.mu.Unlock()
	p := &s.plans
	p.plans = slices.DeleteFunc(p.plans, func(old localPlan) bool { return old.token == token })
	if len(p.plans) == knownPlans {
		p.plans = slices.Delete(p.plans, 0, 1)
	}
	p.plans = append(p.plans, localPlan{token, bare})
	return local, token, nil
}

// errUnknownPlan answers a token that stands for nothing here.
var errUnknownPlan = errors.New("this plan is not known: send the items")

// says is the event of a rank's plan: in full the first time that this
// attempt sees it, by its fingerprint alone after that.
func (s *rankServer) says(id string, req client.SaveRequest, participants []int, local plan.Local) (said, full *events.LocalPlan) {
	full = &events.LocalPlan{
		Attempt: s.attempt, Checkpoint: id, Name: req.Name, Step: req.Step, Rank: s.rank,
		Participants: participants, Fingerprint: planner.Fingerprint(local, s.cfg.NProc, participants).String(),
		Plan: events.InlineBlob(plan.EncodeLocal(local)),
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if req.Plan != "" && s.plans.said[full.Fingerprint] {
		short := *full
		short.Plan = events.Blob{}
		return &short, full
	}
	s.plans.said[full.Fingerprint] = true
	return full, full
}

// parseCheck is the inverse of the client's hexadecimal form.
func parseCheck(text string) (c plan.Check, err error) {
	raw, err := hex.DecodeString(text)
	if err != nil || len(raw) != len(c) && len(raw) != 0 {
		return c, badRequest("check %q is not %d bytes in hexadecimal", text, len(c))
	}
	copy(c[:], raw)
	return c, nil
}
