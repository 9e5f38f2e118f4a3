package collective

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

func TestAnySizesArriveWhole(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		world := rapid.IntRange(1, 6).Draw(t, "world")
		payload := rapid.SliceOfN(rapid.Byte(), 0, 40)
		var own [][]byte
		for range world {
			own = append(own, payload.Draw(t, "own"))
		}
		root := rapid.IntRange(0, world-1).Draw(t, "root")
		noErrors(t, newRanks(world, Options{}).each(context.Background(), func(ctx context.Context, rank int, g *Group) error {
			for range 2 {
				all, err := g.AllGatherBytes(ctx, own[rank])
				if err != nil {
					return err
				}
				if !slices.EqualFunc(all, own, bytes.Equal) {
					return fmt.Errorf("rank %d got %v", rank, all)
				}
				one, err := BroadcastObject(ctx, g, root, own[rank])
				if err != nil {
					return err
				}
				if !bytes.Equal(one, own[root]) {
					return fmt.Errorf("rank %d got %v of root %d", rank, one, root)
				}
			}
			return nil
		}))
	})
}

func TestRankThatCannotEncodeIsNamed(t *testing.T) {
	r := newRanks(3, Options{})
	for rank, err := range r.each(t.Context(), func(ctx context.Context, rank int, g *Group) error {
		_, err := AllGatherObject(ctx, g, []float64{1, math.NaN()}[rank%2])
		return err
	}) {
		want := "rank 1 could not encode its object"
		if rank == 1 {
			want = "gather objects on rank 1: encode object: json"
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("gather: rank %d: error %v", rank, err)
		}
	}
	for rank, err := range r.each(t.Context(), func(ctx context.Context, rank int, g *Group) error {
		_, err := BroadcastObject(ctx, g, 1, math.NaN())
		return err
	}) {
		want := "rank 1 could not encode its object"
		if rank == 1 {
			want = "encode object: json"
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("broadcast: rank %d: error %v", rank, err)
		}
	}
	noErrors(t, r.each(t.Context(), func(ctx context.Context, rank int, g *Group) error {
		_, err := AllGatherObject(ctx, g, rank)
		return err
	}))
}

func TestRankWhoseObjectCannotBeDecodedIsNamed(t *testing.T) {
	r := newRanks(2, Options{})
	for _, err := range r.each(t.Context(), func(ctx context.Context, rank int, g *Group) (err error) {
		if rank == 0 {
			_, err = AllGatherObject(ctx, g, 7)
			return err
		}
		_, err = AllGatherObject(ctx, g, "seven")
		return err
	}) {
		if err == nil || !strings.Contains(err.Error(), "decode object of rank") {
			t.Errorf("error %v", err)
		}
	}
}

func TestTimeoutNamesMissingRanksAndBreaksTheGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRanks(4, Options{Timeout: time.Minute})
		began := time.Now()
		for rank, err := range r.each(t.Context(), func(ctx context.Context, rank int, g *Group) error {
			if rank == 1 || rank == 2 {
				return nil
			}
			_, err := AllGatherObject(ctx, g, rank)
			return err
		}) {
			if rank == 1 || rank == 2 {
				continue
			}
			var missing *MissingError
			if !errors.As(err, &missing) || !slices.Equal(missing.Ranks, []int{1, 2}) || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("rank %d: error %v", rank, err)
			}
			if _, again := AllGatherObject(t.Context(), r.groups[rank], rank); !errors.As(again, &missing) {
				t.Errorf("rank %d: a group out of step was used again: %v", rank, again)
			}
		}
		if waited := time.Since(began); waited != time.Minute {
			t.Errorf("waited %v, want 1m", waited)
		}
	})
}

func TestConcurrentCollectivesAreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRanks(2, Options{})
		first := make(chan error)
		go func() {
			_, err := AllGatherObject(t.Context(), r.groups[0], 1)
			first <- err
		}()
		synctest.Wait()
		if _, err := AllGatherObject(t.Context(), r.groups[0], 2); !errors.Is(err, ErrBusy) {
			t.Errorf("error %v, want ErrBusy", err)
		}
		if _, err := AllGatherObject(t.Context(), r.groups[1], 3); err != nil {
			t.Error(err)
		}
		if err := <-first; err != nil {
			t.Error(err)
		}
	})
}

// short is a transport that answers with the wrong number of bytes or ranks.
type short struct {
	member
	parts [][]byte
}

func (s *short) AllGather(context.Context, []byte) ([][]byte, error)    { return s.parts, nil }
func (s *short) Broadcast(context.Context, int, []byte) ([]byte, error) { return nil, nil }

func TestTransportAnswersAreChecked(t *testing.T) {
	for _, parts := range [][][]byte{nil, {make([]byte, 8)}, {make([]byte, 8), make([]byte, 7)}} {
		g := New(&short{member{size: 2}, parts}, Options{})
		if _, err := g.AllGatherBytes(t.Context(), nil); err == nil {
			t.Errorf("gather accepted %v", parts)
		}
	}
	if _, err := BroadcastObject(t.Context(), New(&short{member{size: 2}, nil}, Options{}), 1, 0); err == nil {
		t.Error("broadcast accepted no bytes")
	}
}

type reversing struct{}

func (reversing) Marshal(v any) ([]byte, error) {
	b := []byte(v.(string))
	slices.Reverse(b)
	return b, nil
}

func (reversing) Unmarshal(data []byte, v any) error {
	b := bytes.Clone(data)
	slices.Reverse(b)
	*v.(*string) = string(b)
	return nil
}

func TestCodec(t *testing.T) {
	r := newRanks(2, Options{Codec: reversing{}})
	noErrors(t, r.each(t.Context(), func(ctx context.Context, rank int, g *Group) error {
		all, err := AllGatherObject(ctx, g, []string{"", "abc"}[rank])
		if err == nil && !slices.Equal(all, []string{"", "abc"}) {
			err = fmt.Errorf("rank %d got %q", rank, all)
		}
		return err
	}))
	if got := string(r.members[1].sent[1]); got != "cba" {
		t.Errorf("sent %q, want what the codec made", got)
	}
}

func TestOptions(t *testing.T) {
	for _, o := range []Options{{MaxBytes: -1}, {Timeout: -time.Second}} {
		if o.Validate() == nil {
			t.Errorf("%+v accepted", o)
		}
	}
	if err := (Options{}).Validate(); err != nil {
		t.Error(err)
	}
}
