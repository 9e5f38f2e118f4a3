package collective

import (
	"bytes"
	"context"
	"errors"

	"golang.org/x/sync/errgroup"
)

// member is a rank's transport over a hub in the same process. It records its
// calls.
type member struct {
	hub        *Hub
	rank, size int
	seq        uint64
	sent       [][]byte
}

var _ Transport = (*member)(nil)

func (m *member) Rank() int { return m.rank }
func (m *member) Size() int { return m.size }

func (m *member) AllGather(ctx context.Context, own []byte) ([][]byte, error) {
	m.sent = append(m.sent, bytes.Clone(own))
	m.seq++
	shared, err := m.hub.Exchange(ctx, m.rank, m.seq, OpAllGather, own)
	var parts [][]byte
	for _, part := range shared {
		parts = append(parts, bytes.Clone(part))
	}
	return parts, err
}

func (m *member) Broadcast(ctx context.Context, root int, data []byte) ([]byte, error) {
	m.sent = append(m.sent, bytes.Clone(data))
	op := OpBroadcast(root, len(data))
	if m.rank != root {
		data = nil
	}
	m.seq++
	shared, err := m.hub.Exchange(ctx, m.rank, m.seq, op, data)
	if err != nil {
		return nil, err
	}
	return bytes.Clone(shared[root]), nil
}

// ranks are the groups of a world whose transports share one hub.
type ranks struct {
	groups  []*Group
	members []*member
}

func newRanks(world int, o Options) *ranks {
	r := &ranks{}
	hub := NewHub(world)
	for rank := range world {
		m := &member{hub: hub, rank: rank, size: world}
		r.members = append(r.members, m)
		r.groups = append(r.groups, New(m, o))
	}
	return r
}

// each calls do on all ranks at once and returns their errors.
func (r *ranks) each(ctx context.Context, do func(ctx context.Context, rank int, g *Group) error) []error {
	errs := make([]error, len(r.groups))
	var all errgroup.Group
	for rank, g := range r.groups {
		all.Go(func() error {
			errs[rank] = do(ctx, rank, g)
			return nil
		})
	}
	_ = all.Wait() // the errors are in errs
	return errs
}

func noErrors(t interface {
	Helper()
	Fatal(args ...any)
}, errs []error,
) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}
