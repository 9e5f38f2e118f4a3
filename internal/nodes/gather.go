package nodes

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// Gather waits until Max nodes are ready, or enough if that is not 0, or until Min nodes
// have been ready for lastCall, and makes all that are ready a group. It returns the members
// in the order of their places:
// a node keeps its place, which is its index at first, and a spare takes the place of
// the node that it replaces. All other nodes are spares. After limit it makes a group of
// what is ready, or returns a [TooFewError] if these are fewer than Min.
func (e *Endpoint) Gather(ctx context.Context, limit, lastCall time.Duration, enough int) ([]Member, error) {
	deadline := time.NewTimer(limit)
	defer deadline.Stop()
	if enough == 0 {
		enough = e.c.Max
	}
	var least *time.Timer
	var last <-chan time.Time
	called, late := false, false
	for {
		e.mu.Lock()
		group := e.roster.choose()
		if len(group) >= enough || (called || late) && len(group) >= e.c.Min {
			e.roster.activate(group)
			members, now := make([]Member, len(group)), e.c.Now()
			for i, c := range group {
				members[i] = e.roster.member(now, c.entry, nil)
			}
			e.mu.Unlock()
			return members, nil
		}
		changed, over := e.changed, e.over
		e.mu.Unlock()
		switch {
		case over != nil:
			return nil, problem.Errorf(problem.Unavailable, "gather nodes: the job has ended: %s", over.Reason)
		case late:
			return nil, e.tooFew(limit)
		case len(group) < e.c.Min:
			least, last, called = nil, nil, false
		case least == nil:
			least = time.NewTimer(lastCall)
			defer least.Stop()
			last = least.C
		}
		select {
		case <-changed:
		case <-last:
			called = true
		case <-deadline.C:
			late = true
		case <-ctx.Done():
			return nil, fmt.Errorf("gather nodes: %w", context.Cause(ctx))
		}
	}
}

// AwaitAdmission has [Endpoint.Gather] take admitted nodes only: see [Endpoint.Admit].
func (e *Endpoint) AwaitAdmission() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.roster.admits = true
}

// Admit lets groups have a node, by its joining: it has told the caller that it has all it needs.
// A node that joins again is another one.
func (e *Endpoint) Admit(node int, joining uint64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.roster.admit(e.c.Now(), node, joining)
	e.announce()
}

// TooFewError reports that a group did not come together in time.
type TooFewError struct{ text string }

func (e *TooFewError) Error() string { return e.text }

// ProblemKind returns [problem.Late].
func (*TooFewError) ProblemKind() problem.Kind { return problem.Late }

// tooFew describes what Gather lacks.
func (e *Endpoint) tooFew(limit time.Duration) error {
	ready, suspects := map[int]bool{}, ""
	e.mu.Lock()
	group, members, excluded := e.roster.choose(), e.roster.members(e.c.Now()), e.roster.excluded
	for _, c := range group {
		ready[c.place] = true
	}
	var missing []string
	for place := range e.c.Min {
		if !ready[place] {
			missing = append(missing, fmt.Sprint(e.roster.lastAt(place)))
		}
	}
	e.mu.Unlock()
	for _, m := range members {
		switch m.State {
		case StateLost, StateSuspect:
			suspects += fmt.Sprintf("; node %d on %s is %s: %s", m.Index, m.Host, m.State, m.Why)
		case StateOpening:
			suspects += fmt.Sprintf("; node %d on %s has joined, and has not opened the store yet", m.Index, m.Host)
		}
	}
	for _, x := range excluded {
		suspects += "; excluded: " + x.String()
	}
	if n := len(missing); n > 16 {
		missing = append(missing[:16], fmt.Sprintf("and %d more", n-16))
	}
	return &TooFewError{fmt.Sprintf("gather nodes: %d of at least %d nodes are ready after %v, missing: index %s%s; start the missing agents with the endpoint %s, or lower the minimum",
		len(group), e.c.Min, limit, strings.Join(missing, ", "), suspects, e.c.Address)}
}

// Growth returns how many nodes more than the running group the next one would have, and for how
// long all of these have been members without a doubt.
func (e *Endpoint) Growth() (more int, settled time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.roster.growth(e.c.Now())
}

// Activate makes nodes a group that is running already, with their places by index: another
// coordinator has gathered it. It returns its members, and the indexes of nodes that are no members.
func (e *Endpoint) Activate(places map[int]int) (members []Member, gone []int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var group []chosen
	for index, place := range places {
		e.roster.holds(place, index)
		m := e.roster.entries[index]
		if m == nil || m.lost != "" || m.self || m.active {
			gone = append(gone, index)
			continue
		}
		group = append(group, chosen{m, place})
	}
	e.roster.activate(group)
	for _, c := range group {
		members = append(members, e.roster.member(e.c.Now(), c.entry, nil))
	}
	return members, gone
}
