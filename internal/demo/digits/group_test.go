package digits

import (
	"bytes"
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/ckptstore/ckptstore/tensor"
)

// meeting is an Exchange among goroutines: the last rank of a round releases
// the others.
type meeting struct {
	world int
	mu    sync.Mutex
	round *round
}

type round struct {
	parts [][]byte
	here  int
	done  chan struct{}
}

func newMeeting(world int) *meeting { return &meeting{world: world, round: newRound(world)} }

func newRound(world int) *round {
	return &round{parts: make([][]byte, world), done: make(chan struct{})}
}

func (m *meeting) of(rank int) Exchange {
	return ExchangeFunc(func(ctx context.Context, own []byte) ([][]byte, error) {
		m.mu.Lock()
		r := m.round
		r.parts[rank] = bytes.Clone(own)
		if r.here++; r.here == m.world {
			m.round = newRound(m.world)
			close(r.done)
		}
		m.mu.Unlock()
		select {
		case <-r.done:
			return slices.Clone(r.parts), nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	})
}

// group is one model sharded over goroutines.
type group struct {
	models []*Model
	meet   *meeting
}

func newGroup(world int, seed uint64) *group {
	g := &group{meet: newMeeting(world)}
	for rank := range world {
		g.models = append(g.models, New(rank, world, seed))
	}
	return g
}

// each calls do for all ranks at once and fails the test on any error.
func (g *group) each(t *testing.T, do func(ctx context.Context, m *Model, x Exchange) error) {
	t.Helper()
	if err := g.try(t, do); err != nil {
		t.Fatal(err)
	}
}

func (g *group) try(t *testing.T, do func(ctx context.Context, m *Model, x Exchange) error) error {
	t.Helper()
	limit, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ranks, ctx := errgroup.WithContext(limit)
	for rank, m := range g.models {
		ranks.Go(func() error { return do(ctx, m, g.meet.of(rank)) })
	}
	return ranks.Wait()
}

// train takes steps and returns the losses; all ranks must see the same ones.
func (g *group) train(t *testing.T, steps int) []float64 {
	t.Helper()
	losses := make([][]float64, len(g.models))
	g.each(t, func(ctx context.Context, m *Model, x Exchange) error {
		for range steps {
			loss, err := m.Step(ctx, x)
			if err != nil {
				return err
			}
			losses[m.rank] = append(losses[m.rank], loss)
		}
		return nil
	})
	for rank := range losses {
		if !slices.Equal(losses[rank], losses[0]) {
			t.Fatalf("rank %d saw other losses than rank 0", rank)
		}
	}
	return losses[0]
}

func (g *group) digest(t *testing.T) string {
	t.Helper()
	digests := make([]string, len(g.models))
	g.each(t, func(ctx context.Context, m *Model, x Exchange) (err error) {
		digests[m.rank], err = m.Digest(ctx, x)
		return err
	})
	for rank, d := range digests {
		if d != digests[0] || len(d) != 64 {
			t.Fatalf("rank %d has digest %q, rank 0 %q", rank, d, digests[0])
		}
	}
	return digests[0]
}

func (g *group) accuracy(t *testing.T) float64 {
	t.Helper()
	got := make([]float64, len(g.models))
	g.each(t, func(ctx context.Context, m *Model, x Exchange) (err error) {
		got[m.rank], err = m.Accuracy(ctx, x)
		return err
	})
	if slices.Min(got) != slices.Max(got) {
		t.Fatalf("ranks disagree on the accuracy: %v", got)
	}
	return got[0]
}

// load copies all tensors of from into g by boxes, whatever the world sizes.
func (g *group) load(t *testing.T, from *group) {
	t.Helper()
	for _, m := range g.models {
		for _, to := range m.Tensors() {
			copied := int64(0)
			for _, source := range from.models {
				for _, s := range source.Tensors() {
					if s.FQN != to.FQN {
						continue
					}
					region, ok := to.Box.Intersect(s.Box)
					if len(to.Global) == 0 {
						region, ok = to.Box, true
					}
					if ok && copied < to.Box.Volume() {
						tensor.CopyRegion(to.Data, to.Box, s.Data, s.Box, region, to.DType.Size())
						copied += region.Volume()
					}
				}
			}
			if copied != to.Box.Volume() {
				t.Fatalf("rank %d: %s %v: %d of %d elements found", m.rank, to.FQN, to.Box, copied, to.Box.Volume())
			}
		}
	}
}
