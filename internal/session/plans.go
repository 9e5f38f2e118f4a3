package session

import (
	"context"
	"encoding/hex"
	"errors"
	"slices"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/planner"
)

// knownPlans is how many plans of a rank are cached: those of a full checkpoint,
// of one without the optimizer, and their predecessors.
const knownPlans = 4

// localPlans caches the plans by which one rank has saved in this attempt, so
// that a plan is sent only once: a token stands for the items on the socket, a
// fingerprint for the plan in the log.
type localPlans struct {
	plans []*localPlan // the last one is the most recently added
	said  map[string]bool
}

// localPlan holds the items of a save, without checks, and values derived from
// them. A save by a known plan costs nothing per item.
type localPlan struct {
	token   string // the digest of the encoded plan
	bare    checkpoint.Local
	encoded []byte
	slot    *staging.Layout

	// Participants of the last save by this plan.
	participants []int
	print        checkpoint.Digest
}

// local returns the plan of a request and, if the worker sent the plan's items,
// the plan with the worker's checks.
//
// With StrictReplicas it knows no plan by its token, so that the checks come with each
// save: replicas that were equal in one save may differ in the next.
func (s *rankServer) local(ctx context.Context, req client.SaveRequest) (known *localPlan, checked *checkpoint.Local, err error) {
	if req.Plan != "" && s.cfg.StrictReplicas && s.cfg.World() > 1 {
		return nil, nil, problem.Wrap(problem.UnknownPlan, errUnknownPlan)
	}
	if req.Plan != "" {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, p := range s.plans.plans {
			if p.token == req.Plan {
				return p, nil, nil
			}
		}
		return nil, nil, problem.Wrap(problem.UnknownPlan, errUnknownPlan)
	}
	local := checkpoint.Local{Rank: s.rank}
	seen := map[string]bool{}
	for _, it := range req.Items {
		p, err := planItem(it)
		if err != nil {
			return nil, nil, err
		}
		if seen[staging.Key(p)] {
			return nil, nil, badRequest("%q is saved twice", it.FQN)
		}
		seen[staging.Key(p)] = true
		local.Items = append(local.Items, p)
	}
	local, err = s.saver.writer(s.store.Data.Writer(s.saver.ref(req.Name))).PrepareLocalPlan(ctx, local)
	if err != nil {
		return nil, nil, badRequest("%w", err)
	}
	bare := checkpoint.Local{Rank: local.Rank, Items: slices.Clone(local.Items)}
	for i := range bare.Items {
		bare.Items[i].Check = checkpoint.Check{}
	}
	made := &localPlan{bare: bare, encoded: checkpoint.EncodeLocal(bare)}
	made.token, made.slot = checkpoint.Sum(made.encoded).String(), staging.LayOut(bare.Items, made.encoded)
	s.mu.Lock()
	defer s.mu.Unlock()
	p := &s.plans
	p.plans = slices.DeleteFunc(p.plans, func(old *localPlan) bool { return old.token == made.token })
	if len(p.plans) == knownPlans {
		p.plans = slices.Delete(p.plans, 0, 1)
	}
	p.plans = append(p.plans, made)
	return made, &local, nil
}

// errUnknownPlan answers a token that is not cached.
var errUnknownPlan = errors.New("this plan is not known: send the items")

// saying is the event of a rank's plan: in full the first time in this attempt,
// then only by its fingerprint.
type saying struct {
	said, full *events.LocalPlan
	print      checkpoint.Digest
}

func (s *rankServer) says(id string, req client.SaveRequest, participants []int, p *localPlan, checked *checkpoint.Local) saying {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Equal(p.participants, participants) {
		p.participants, p.print = participants, planner.Fingerprint(p.bare, s.cfg.World(), participants)
	}
	full := &events.LocalPlan{
		Attempt: s.Number, Checkpoint: id, Name: req.Name, Step: req.Step, Rank: s.rank,
		Participants: events.Listed(participants, s.cfg.World()), Fingerprint: p.print.String(), Plan: events.InlineBlob(p.encoded),
	}
	if checked != nil {
		full.Plan = events.InlineBlob(checkpoint.EncodeLocal(*checked))
	}
	if checked == nil && s.plans.said[full.Fingerprint] {
		short := *full
		short.Plan = events.Blob{}
		return saying{&short, full, p.print}
	}
	s.plans.said[full.Fingerprint] = true
	return saying{full, full, p.print}
}

// parseCheck decodes a check from the client's hexadecimal form.
func parseCheck(text string) (c checkpoint.Check, err error) {
	raw, err := hex.DecodeString(text)
	if err != nil || len(raw) != len(c) && len(raw) != 0 {
		return c, badRequest("check %q is not %d bytes in hexadecimal", text, len(c))
	}
	copy(c[:], raw)
	return c, nil
}
