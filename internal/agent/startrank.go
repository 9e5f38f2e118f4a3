package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/store"
)

// Rank is a rank of a launch over several machines.
type Rank struct {
	Launch string // the key of the launch, the same on all its ranks
	Rank   int
	Master string // host that the launcher names: rank 0's, as other machines reach it
	Limit  time.Duration
}

// StartRank returns the agent that serves a rank of a launch over several machines, and
// starts it if necessary. For rank 0 it is the agent of the store on this machine, as
// [Start] returns it; it coordinates the launch. For others on that machine it is the
// same; on every other machine it is a follower for this launch.
//
// Only rank 0 knows which machine is its own. So the others wait for whichever comes
// first: an agent here that coordinates the launch, or an invitation from elsewhere.
// locate finds the store; only rank 0 creates it.
func StartRank(ctx context.Context, location string, r Rank, o StartOptions, locate func(context.Context) (store.Whereabouts, error)) (Card, bool, error) {
	if r.Rank == 0 {
		at, err := locate(ctx)
		if err != nil {
			return Card{}, false, err
		}
		c, started, err := Start(ctx, at, o)
		if err != nil {
			return c, started, err
		}
		return c, started, call(ctx, c, "launch", LaunchRequest{r.Launch, r.Master}, new(struct{}))
	}
	s := &search{rank: r, options: o, location: location}
	limit, cancel := context.WithTimeout(ctx, r.Limit)
	defer cancel()
	for {
		c, started, found, err := s.look(limit, locate)
		if found || err != nil {
			return c, started, err
		}
		select {
		case <-time.After(searchEvery):
		case <-limit.Done():
			if ctx.Err() != nil {
				return Card{}, false, ctx.Err()
			}
			return Card{}, false, s.missing()
		}
	}
}

// searchEvery is the pause between looks for the coordinating agent.
const searchEvery = 100 * time.Millisecond

// search is the search of one rank for its agent.
type search struct {
	rank     Rank
	options  StartOptions
	location string

	at      *store.Whereabouts // nil: the store does not exist yet
	invited *nodes.Invitation  // the last that was seen
	err     error              // why the agent that invites could not be reached
}

// look looks once.
func (s *search) look(ctx context.Context, locate func(context.Context) (store.Whereabouts, error)) (c Card, started, found bool, err error) {
	if s.at == nil {
		// Not by name: a name that was looked up too early stays absent for a while.
		if !store.IsURL(s.location) && (!nodes.Listed(s.location) || !nodes.Listed(filepath.Join(s.location, "store.json"))) {
			return c, false, false, nil
		}
		at, err := locate(ctx)
		if err != nil {
			return c, false, false, err
		}
		s.at = &at
	}
	invitation, found, err := nodes.Invited(joinDir(s.at.Dir), invited(s.rank.Launch))
	if err != nil {
		return c, false, false, err
	}
	// After the invitation: the agent here counts the launch as its own before it invites.
	if c, err := readCard(s.at.Runtime, ""); err == nil {
		if status, err := Ask(ctx, c, true); err == nil && slices.Contains(status.Launches, s.rank.Launch) {
			return c, false, true, nil
		}
	}
	if !found {
		return c, false, false, nil
	}
	s.invited = &invitation
	if _, s.err = invitation.Reach(ctx, joinDir(s.at.Dir)); s.err != nil {
		return c, false, false, nil // of an agent that was killed: another one will invite
	}
	o := s.options
	o.Launch, o.Args = s.rank.Launch, append([]string{"--launch=" + s.rank.Launch}, o.Args...)
	if c, started, err = Start(ctx, *s.at, o); err != nil {
		if _, s.err = invitation.Reach(ctx, joinDir(s.at.Dir)); s.err != nil {
			return c, false, false, nil // it has stopped meanwhile
		}
	}
	return c, started, err == nil, err
}

// missing describes what the search has not found.
func (s *search) missing() error {
	host, err := os.Hostname()
	if err != nil {
		host = "this machine"
	}
	shared := fmt.Sprintf("%s on %s must be the directory of rank 0's machine (%s): mount one shared directory there on all machines, or use a nats:// URL", s.location, host, s.rank.Master)
	switch {
	case s.at == nil:
		return problem.Errorf(problem.NoStore, "rank %d on %s: there is no store in %s after %v, and the agent of rank 0 creates it: every rank must use the store at the same time, and %s",
			s.rank.Rank, host, s.location, s.rank.Limit, shared)
	case s.invited == nil:
		return problem.Errorf(problem.Late, "rank %d on %s: after %v no agent coordinates this launch in the store %s: rank 0 must use the store too, and at the same time; and %s",
			s.rank.Rank, host, s.rank.Limit, s.at.Name, shared)
	}
	return problem.Errorf(problem.Late, "rank %d on %s: the agent of rank 0's machine, %s, cannot be reached after %v: open its ports to the other machines: %w",
		s.rank.Rank, host, s.invited.Host, s.rank.Limit, s.err)
}

// JoinLaunch connects an agent to the coordinating agent of a launch.
func JoinLaunch(ctx context.Context, at store.Whereabouts, cfg Config, launch string) (*nodes.Link, error) {
	cfg = cfg.withDefaults()
	dir := joinDir(at.Dir)
	invitation, found, err := nodes.Invited(dir, invited(launch))
	if err != nil {
		return nil, err
	}
	if !found {
		return nil, problem.Errorf(problem.NotFound, "no agent coordinates launch %s in the store %s: it has stopped meanwhile", launch, at.Name)
	}
	address, err := invitation.Reach(ctx, dir)
	if err != nil {
		return nil, err
	}
	link, err := nodes.Join(ctx, nodes.JoinConfig{
		Address: address, Dir: dir, Wait: followWait * cfg.Silence, Logger: cfg.Logger,
		Self: nodes.Node{Index: -1, Version: cfg.Version, Store: at.ID},
	})
	if errors.Is(err, nodes.ErrNoContact) {
		err = fmt.Errorf("%w: the agent on %s", err, invitation.Host)
	}
	if err != nil {
		return nil, err
	}
	if err := link.ProveShared(ctx, dir); err != nil {
		LeaveLaunch(link)
		return nil, err
	}
	return link, nil
}

// LeaveLaunch ends the link of a follower, after its store is closed.
func LeaveLaunch(link *nodes.Link) {
	ctx, cancel := context.WithTimeout(context.Background(), min(leaveLimit, link.Timeout()))
	defer cancel()
	_ = link.Leave(ctx, "the agent has stopped") // otherwise silence tells it
}

// leaveLimit bounds the last words to the coordinating agent.
const leaveLimit = 5 * time.Second

// followWait is how many times the silence timeout a follower tries to reach the
// coordinating agent.
const followWait = 3
