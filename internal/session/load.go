package session

import (
	"context"
	"errors"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session/restore"
)

// newLoader returns the loader of an attempt.
func (j *Job) newLoader(g *Group) *restore.Loader {
	return restore.New(restore.Config{
		Run: j.cfg.Run, Trial: j.cfg.Trial, Attempt: g.Number, World: j.cfg.World(), Resume: g.Resume,
		Store: restore.Store{Resolve: j.store.Views.Resolve, Foreign: j.store.Foreign, Data: j.store.Data, Reader: j.store.Reader},
		Log:   loads{j.decisions}, Arenas: j.arenas, Spare: g.slots.Spare, Limit: j.store.answering, Work: g.work, Logger: j.log,
	})
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
