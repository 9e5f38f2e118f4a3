package collective

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

type object struct {
	Rank int
	Text string
}

func Test31NotInitialised(t *testing.T) {
	g := New(nil, Options{})
	if g.Initialized() || g.Rank() != 0 || g.Size() != 1 {
		t.Errorf("initialised %v, rank %d, world %d", g.Initialized(), g.Rank(), g.Size())
	}
	all, err := AllGatherObject(t.Context(), g, "x")
	if err != nil || !slices.Equal(all, []string{"x"}) {
		t.Errorf("gather gave %v, %v", all, err)
	}
	one, err := BroadcastObject(t.Context(), g, 0, "x")
	if err != nil || one != "x" {
		t.Errorf("broadcast gave %v, %v", one, err)
	}
	raw, err := g.AllGatherBytes(t.Context(), []byte("x"))
	if err != nil || len(raw) != 1 || string(raw[0]) != "x" {
		t.Errorf("gather of bytes gave %q, %v", raw, err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := AllGatherObject(ended, g, 1); !errors.Is(err, context.Canceled) {
		t.Errorf("gather with an ended context: %v", err)
	}
}

func Test32AllGatherInRankOrderOnEveryRank(t *testing.T) {
	r := newRanks(4, Options{})
	noErrors(t, r.each(t.Context(), func(ctx context.Context, rank int, g *Group) error {
		all, err := AllGatherObject(ctx, g, object{rank, strings.Repeat("x", 10*rank)})
		if err != nil {
			return err
		}
		for from, o := range all {
			if o.Rank != from || len(o.Text) != 10*from {
				return fmt.Errorf("rank %d got %+v from rank %d", rank, o, from)
			}
		}
		if len(all) != 4 {
			return fmt.Errorf("rank %d got %d objects", rank, len(all))
		}
		return nil
	}))
	for _, m := range r.members {
		if len(m.sent) != 2 || len(m.sent[0]) != 8 || len(m.sent[1]) != len(r.members[3].sent[1]) {
			t.Errorf("rank %d sent %q", m.rank, m.sent)
		}
	}
}

func Test33PaddingIsZero(t *testing.T) {
	r := newRanks(2, Options{})
	noErrors(t, r.each(t.Context(), func(ctx context.Context, rank int, g *Group) error {
		own := []byte{1, 2, 3, 4, 5, 6}[:2+4*rank]
		all, err := g.AllGatherBytes(ctx, own)
		if err == nil && (len(all[0]) != 2 || cap(all[0]) != 2 || len(all[1]) != 6) {
			err = fmt.Errorf("not cut to size: %v", all)
		}
		return err
	}))
	if got := r.members[0].sent[1]; !bytes.Equal(got, []byte{1, 2, 0, 0, 0, 0}) {
		t.Errorf("rank 0 sent %v", got)
	}
}

func Test34ZeroLengthsAndWorldOne(t *testing.T) {
	r := newRanks(3, Options{})
	noErrors(t, r.each(t.Context(), func(ctx context.Context, rank int, g *Group) error {
		all, err := AllGatherObject(ctx, g, []byte(nil))
		if err == nil && (len(all) != 3 || all[2] == nil || len(all[2]) != 0) {
			err = fmt.Errorf("gather gave %v", all)
		}
		if err != nil {
			return err
		}
		one, err := BroadcastObject(ctx, g, 1, []byte{})
		if err == nil && len(one) != 0 {
			err = fmt.Errorf("broadcast gave %v", one)
		}
		return err
	}))
	for _, m := range r.members {
		if len(m.sent) != 2 {
			t.Errorf("rank %d made %d collectives, want one each: there is nothing to move", m.rank, len(m.sent))
		}
	}
	r = newRanks(3, Options{})
	noErrors(t, r.each(t.Context(), func(ctx context.Context, rank int, g *Group) error {
		all, err := g.AllGatherBytes(ctx, make([]byte, rank%2))
		if err == nil && (len(all[0]) != 0 || len(all[1]) != 1 || len(all[2]) != 0) {
			err = fmt.Errorf("gather gave %v", all)
		}
		return err
	}))

	alone := newRanks(1, Options{})
	noErrors(t, alone.each(t.Context(), func(ctx context.Context, _ int, g *Group) error {
		all, err := AllGatherObject(ctx, g, 5)
		if err == nil && !slices.Equal(all, []int{5}) {
			err = fmt.Errorf("gather gave %v", all)
		}
		return err
	}))
	if len(alone.members[0].sent) != 0 {
		t.Error("a rank alone used its transport")
	}
}

// liar is a transport whose peer announces any size.
type liar struct{ member }

func (l *liar) AllGather(_ context.Context, own []byte) ([][]byte, error) {
	l.sent = append(l.sent, own)
	return [][]byte{bytes.Clone(own), {0, 0, 0, 0, 0, 0, 0, 0x40}}, nil
}

func (l *liar) Broadcast(_ context.Context, _ int, _ []byte) ([]byte, error) {
	l.sent = append(l.sent, nil)
	return []byte{0, 0, 0, 0, 0, 0, 0, 0x40}, nil
}

func Test35SizesAreCappedBeforeAllocation(t *testing.T) {
	l := &liar{member{rank: 0, size: 2}}
	g := New(l, Options{})
	_, err := AllGatherObject(t.Context(), g, "x")
	if err == nil || !strings.Contains(err.Error(), "object of rank 1 has 4611686018427387904 bytes, at most 1073741824") {
		t.Errorf("gather: error %v", err)
	}
	_, err = BroadcastObject(t.Context(), g, 1, "x")
	if err == nil || !strings.Contains(err.Error(), "object of rank 1 has 4611686018427387904 bytes") {
		t.Errorf("broadcast: error %v", err)
	}
	if len(l.sent) != 2 {
		t.Errorf("%d collectives, want 2: none after a bad size", len(l.sent))
	}

	r := newRanks(3, Options{MaxBytes: 10})
	for round := range 2 { // the second shows that the group is still in step
		for rank, err := range r.each(t.Context(), func(ctx context.Context, rank int, g *Group) error {
			_, err := g.AllGatherBytes(ctx, make([]byte, 9+rank))
			return err
		}) {
			if err == nil || !strings.Contains(err.Error(), "object of rank 2 has 11 bytes") {
				t.Errorf("round %d: rank %d: error %v", round, rank, err)
			}
		}
	}
	noErrors(t, r.each(t.Context(), func(ctx context.Context, _ int, g *Group) error {
		_, err := g.AllGatherBytes(ctx, make([]byte, 10))
		return err
	}))
}

func Test36BroadcastDecodesWithTheBroadcastSize(t *testing.T) {
	for root := range 3 {
		r := newRanks(3, Options{})
		noErrors(t, r.each(t.Context(), func(ctx context.Context, rank int, g *Group) error {
			// Some ranks' own objects are larger than the root's, some smaller.
			own := object{rank, strings.Repeat("y", 100*((rank+root)%3))}
			got, err := BroadcastObject(ctx, g, root, own)
			if want := (object{root, strings.Repeat("y", 100*((2*root)%3))}); err == nil && got != want {
				err = fmt.Errorf("rank %d got %+v", rank, got)
			}
			return err
		}))
		for _, m := range r.members {
			if len(m.sent) != 2 || len(m.sent[0]) != 8 || len(m.sent[1]) != len(r.members[root].sent[1]) {
				t.Errorf("root %d: rank %d used buffers %q", root, m.rank, m.sent)
			}
		}
	}
	if _, err := BroadcastObject(t.Context(), New(nil, Options{}), 1, 0); err == nil {
		t.Error("a root outside the group was accepted")
	}
}

// A metric over a data set of 10 whose samples are dealt to the ranks in turn,
// the last ranks repeating samples: ranks interleave, the rest is cut, rank 0
// computes, all get its value.
func Test37Metric(t *testing.T) {
	metric := func(ctx context.Context, g *Group, own []int) (int, error) {
		all, err := AllGatherObject(ctx, g, own)
		if err != nil {
			return 0, err
		}
		value := 0
		if g.Rank() == 0 {
			var samples []int
			for i := range all[0] {
				for _, part := range all {
					samples = append(samples, part[i])
				}
			}
			for i, s := range samples[:10] {
				value += (i + 1) * s
			}
		}
		return BroadcastObject(ctx, g, 0, value)
	}
	want, err := metric(t.Context(), New(nil, Options{}), []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9})
	if err != nil {
		t.Fatal(err)
	}
	noErrors(t, newRanks(4, Options{}).each(t.Context(), func(ctx context.Context, rank int, g *Group) error {
		own := []int{rank, rank + 4, (rank + 8) % 10}
		got, err := metric(ctx, g, own)
		if err == nil && got != want {
			err = fmt.Errorf("rank %d got %d, want %d", rank, got, want)
		}
		return err
	}))
}
