package session

import (
	"context"
	"errors"
	"slices"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session/replica"
	"github.com/ckptstore/ckptstore/internal/session/restore"
)

// newLoader returns the loader of an attempt. In the coordinating process of several
// nodes it also sets the meeting of all loaders.
func (j *Job) newLoader(g *Group) *restore.Loader {
	cfg := restore.Config{
		Run: j.cfg.Run, Trial: j.cfg.Trial, Attempt: g.Number, World: g.cfg.World(), Resume: g.Resume,
		Store: restore.Store{Resolve: j.store.Views.Resolve, Foreign: j.store.Foreign, Data: j.store.Data, Reader: j.store.Reader},
		Log:   loads{j.decisions}, Arenas: j.arenas, Spare: g.slots.Spare, Limit: j.store.calls.Timeout, Work: g.work, Logger: j.log,
		Coordinator: g.Loads, Local: g.cfg.Local(), Node: g.cfg.Node, Peer: g.PeerAt,
		Kind: func(err error) problem.Kind { return httpkit.DetailsOf(err).Kind },
	}
	if of := g.Replicas; of != nil && len(of.To) > 0 && j.keeper != nil {
		cfg.Fetch = func(ctx context.Context, checkpoint string, ranks []int, hurry <-chan struct{}) {
			j.fetch(ctx, of.To, checkpoint, ranks, hurry)
		}
	}
	if g.PeerClient != nil {
		cfg.Shares, cfg.PeerClient = j.shares, g.PeerClient
	}
	if g.Peer == nil && g.cfg.apart() {
		g.meeting = restore.NewMeeting(cfg, g.cfg.Nodes, g.cfg.Collective)
		cfg.Coordinator = g.meeting.Local(g.cfg.Node)
	}
	return restore.New(cfg)
}

// fetch copies slots of ranks from the first node that has them.
func (j *Job) fetch(ctx context.Context, from []replica.Partner, checkpoint string, ranks []int, hurry <-chan struct{}) {
	for _, at := range from {
		j.keeper.Fetch(ctx, at, checkpoint, ranks, hurry)
		if ctx.Err() != nil {
			return
		}
		held, release := j.arenas.Hold(checkpoint)
		release()
		if ranks = slices.DeleteFunc(slices.Clone(ranks), func(rank int) bool { return held[rank] != nil }); len(ranks) == 0 {
			return
		}
	}
}

// Meeting returns where the loads of all nodes meet, or nil unless this is the
// coordinating process of several nodes. The processes of the other nodes reach it
// through [Attempt].Loads.
func (g *Group) Meeting() *restore.Meeting { return g.meeting }

// endLoads frees the ranks that wait for a rank in a load.
func (g *Group) endLoads(rank int, why error) {
	g.loader.End(rank, why)
	if g.meeting != nil {
		g.meeting.End(why)
	}
}

// closeLoads stops the loads, and reports whether they have ended.
func (g *Group) closeLoads() bool {
	ended := g.meeting == nil || g.meeting.Close(g.cfg.DrainTimeout)
	return g.loader.Close(g.cfg.DrainTimeout) && ended
}

// loads appends the events of loads to the log.
type loads struct{ decisions *decisionLog }

// Begun implements [restore.Log].
func (l loads) Begun(ctx context.Context, b *events.RestoreBegun) error {
	_, err := l.decisions.decide(ctx, b)
	return err
}

// Failed implements [restore.Log].
func (l loads) Failed(ctx context.Context, b *events.RestoreFailed) error {
	b.Error = Beginning(b.Error, MaxMessage)
	return l.decisions.record(ctx, b)
}

// Completed implements [restore.Log]: the facts of all ranks are one batch.
func (l loads) Completed(ctx context.Context, plans []*events.LoadPlan, b *events.RestoreCompleted) error {
	facts := make([]events.Fact, 0, len(plans)+1)
	add := func(actor events.Actor, body events.Body) error {
		f, err := l.decisions.fact(l.decisions.trial, actor, body)
		facts = append(facts, f)
		return err
	}
	var errs []error
	for _, p := range plans {
		errs = append(errs, add(events.Rank(p.Rank), p))
	}
	errs = append(errs, add(l.decisions.node, b))
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return l.decisions.append(ctx, facts...)
}

func (s *rankServer) onLoad(ctx context.Context, req client.LoadRequest) (client.LoadReply, error) {
	ranks, err := s.participants(req.Participants)
	if err != nil {
		return client.LoadReply{}, err
	}
	req.Refused = Beginning(req.Refused, MaxMessage)
	return s.loader.Load(ctx, s.rank, ranks, req, s.cfg.Collective)
}

// onLoaded releases the memory that a worker was lent. It answers when all ranks
// that verify their copies have reported the results.
func (s *rankServer) onLoaded(ctx context.Context, req client.LoadedRequest) (struct{}, error) {
	req.Damaged, req.Failed = Beginning(req.Damaged, MaxMessage), Beginning(req.Failed, MaxMessage)
	return struct{}{}, s.loader.Loaded(ctx, s.rank, req, s.cfg.Collective)
}
