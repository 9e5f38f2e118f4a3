package rpc

import (
	"context"
	"errors"
	"fmt"

	"github.com/ckptstore/ckptstore/internal/collective"
)

// groupAgent is an agent of PROCESS_GROUP. It sends and receives through one
// messenger, so a large message delays those behind it.
type groupAgent struct {
	*engine
	group *collective.Group
	by    Messenger
	ranks map[string]int
	links []*link          // by rank; nil for this one
	out   []chan addressed // one per sending thread; all messages to a rank use the same one, to stay in order
}

var _ Agent = (*groupAgent)(nil)

type addressed struct {
	to   int
	data []byte
}

// initProcessGroup is the handler of PROCESS_GROUP.
func initProcessGroup(ctx context.Context, s Setup) (Agent, error) {
	by, ok := s.Store.(Messenger)
	if !ok {
		return nil, &TypeError{"store", "a Messenger", s.Store}
	}
	o, err := s.Options.(*ProcessGroupOptions).checked()
	if err != nil {
		return nil, err
	}
	if by.Rank() != s.Rank || by.Size() != s.World {
		return nil, fmt.Errorf("the messenger is that of rank %d of %d, the group's is rank %d of %d", by.Rank(), by.Size(), s.Rank, s.World)
	}
	all, err := collective.AllGatherObject(ctx, s.Group, devices{Name: s.Name})
	if err != nil {
		return nil, fmt.Errorf("announce the name to the other ranks: %w", err)
	}
	if err := checkDevices(all); err != nil {
		return nil, err
	}
	a := &groupAgent{
		engine: newEngine(Peer{s.Name, s.Rank}, o.Timeout, o.MaxBytes, o.SendRecvThreads),
		group:  s.Group, by: by, ranks: map[string]int{},
	}
	for rank, d := range all {
		a.ranks[d.Name] = rank
		a.links = append(a.links, a.newLink(Peer{d.Name, rank}, a.sender(rank)))
	}
	for range o.SendRecvThreads {
		out := make(chan addressed)
		a.out = append(a.out, out)
		a.spawn(func() { a.forward(out) })
	}
	a.spawn(a.receive)
	return a, nil
}

// sender returns a function that queues frames for a rank.
func (a *groupAgent) sender(to int) func(context.Context, frame) error {
	return func(ctx context.Context, f frame) error {
		select {
		case a.out[to%len(a.out)] <- addressed{to, f.encode()[4:]}: // a message has its own length
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-a.life.Done():
			return ErrClosed
		}
	}
}

func (a *groupAgent) forward(out <-chan addressed) {
	for {
		select {
		case m := <-out:
			if err := a.by.Send(a.life, m.to, m.data); err != nil && a.life.Err() == nil {
				a.links[m.to].end(fmt.Errorf("send to it: %w", err))
			}
		case <-a.life.Done():
			return
		}
	}
}

func (a *groupAgent) receive() {
	for {
		m, err := a.by.Recv(a.life)
		if err != nil {
			for _, l := range a.links {
				l.end(fmt.Errorf("%w: the messenger of %s has ended: %w", ErrGone, a.self, err))
			}
			return
		}
		l := a.links[m.From]
		if m.Gone {
			l.end(ErrGone)
			continue
		}
		f, err := decodeFrame(m.Data)
		if err == nil && len(f.body) > a.limit {
			err = fmt.Errorf("a body of %d bytes is larger than the limit of %d", len(f.body), a.limit)
		}
		if err != nil {
			l.end(fmt.Errorf("invalid message from it: %w", err))
			continue
		}
		l.take(f)
	}
}

// Call implements Agent.
func (a *groupAgent) Call(ctx context.Context, to, function string, body []byte) ([]byte, error) {
	rank, ok := a.ranks[to]
	if !ok {
		return nil, &PeerError{Peer{Name: to, Rank: AnyRank}, function, ErrUnknownPeer}
	}
	l := a.links[rank]
	return a.make(ctx, l.peer, function, body, func(context.Context) (*link, error) { return l, nil })
}

// Shutdown implements Agent; see [Pipe.Shutdown].
func (a *groupAgent) Shutdown(ctx context.Context) error {
	return errors.Join(a.join(ctx, a.group), a.Close())
}

// Close implements Agent.
func (a *groupAgent) Close() error {
	if !a.close() {
		return nil
	}
	for _, l := range a.links {
		l.end(ErrClosed)
	}
	err := a.by.Close()
	a.work.Wait()
	return err
}
