package collective

import (
	"bytes"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// call is one Exchange that runs on its own goroutine.
type call struct {
	parts [][]byte
	err   error
	done  chan struct{}
}

func start(ctx context.Context, h *Hub, rank int, seq uint64, op, own string) *call {
	c := &call{done: make(chan struct{})}
	go func() {
		defer close(c.done)
		c.parts, c.err = h.Exchange(ctx, rank, seq, op, []byte(own))
	}()
	return c
}

func (c *call) result() (string, error) {
	<-c.done
	return string(bytes.Join(c.parts, []byte("|"))), c.err
}

func (c *call) wants(t *testing.T, want string) {
	t.Helper()
	if got, err := c.result(); err != nil || got != want {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
}

func (c *call) fails(t *testing.T, parts ...string) {
	t.Helper()
	got, err := c.result()
	if err == nil {
		t.Fatalf("got %q, want an error with %q", got, parts)
	}
	for _, part := range parts {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("error %q lacks %q", err, part)
		}
	}
}

func TestHubWaitsForEveryRank(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHub(3)
		a, b := start(t.Context(), h, 2, 1, "op", "c"), start(t.Context(), h, 0, 1, "op", "a")
		synctest.Wait()
		select {
		case <-a.done:
			t.Error("a rank did not wait")
		case <-b.done:
			t.Error("a rank did not wait")
		default:
		}
		start(t.Context(), h, 1, 1, "op", "b").wants(t, "a|b|c")
		a.wants(t, "a|b|c")
		b.wants(t, "a|b|c")
	})
}

func TestHubCopiesBytes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHub(2)
		own := []byte("a")
		ended, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := h.Exchange(ended, 0, 1, "op", own); err == nil {
			t.Fatal("a rank alone got an answer")
		}
		own[0] = 'X'
		start(t.Context(), h, 1, 1, "op", "b").wants(t, "a|b")
	})
}

func TestHubNamesMissingRanks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHub(6)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		calls := []*call{start(ctx, h, 0, 4, OpAllGather, "a"), start(ctx, h, 4, 4, OpAllGather, "e")}
		for _, c := range calls {
			c.fails(t, "collective 4 (all_gather)", "waited for ranks 1-3, 5, which did not join", "deadline exceeded")
		}
		var missing *MissingError
		if !errors.As(calls[1].err, &missing) || missing.Rank != 4 || !slices.Equal(missing.Ranks, []int{1, 2, 3, 5}) {
			t.Errorf("error %#v", calls[1].err)
		}
	})
}

func TestHubRanksThatDoNotFitAreNamed(t *testing.T) {
	type join struct {
		seq     uint64
		op, own string
	}
	for name, c := range map[string]struct {
		joins []join
		want  []string
	}{
		"other op": {
			[]join{{1, OpAllGather, "x"}, {1, OpBroadcast(2, 1), ""}, {1, OpAllGather, "x"}},
			[]string{"all_gather by ranks 0, 2", "broadcast root=2 size=1 by rank 1"},
		},
		"other root": {
			[]join{{1, OpBroadcast(0, 1), "x"}, {1, OpBroadcast(0, 1), ""}, {1, OpBroadcast(1, 1), ""}},
			[]string{"broadcast root=0 size=1 by ranks 0-1", "broadcast root=1 size=1 by rank 2"},
		},
		"other length": {
			[]join{{1, OpAllGather, "x"}, {1, OpAllGather, "x"}, {1, OpAllGather, "xyz"}},
			[]string{"all_gather of 1 bytes by ranks 0-1", "all_gather of 3 bytes by rank 2"},
		},
		"other collective": {
			[]join{{1, OpAllGather, "x"}, {1, OpAllGather, "x"}, {2, OpAllGather, "x"}},
			[]string{"rank 2 joins collective 2 (all_gather), but collective 1 is open with ranks 0-1", "out of step"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := NewHub(3)
				var calls []*call
				for rank, j := range c.joins {
					calls = append(calls, start(t.Context(), h, rank, j.seq, j.op, j.own))
					synctest.Wait()
				}
				for _, one := range calls {
					one.fails(t, c.want...)
				}
				// A rank that repeats the failed collective gets the same error.
				start(t.Context(), h, 0, 1, c.joins[0].op, c.joins[0].own).fails(t, c.want...)
			})
		})
	}
}

func TestHubLateRankGetsTheErrorOfItsCollective(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHub(3)
		a := start(t.Context(), h, 0, 1, "op", "a")
		synctest.Wait()
		start(t.Context(), h, 1, 2, "op", "b").fails(t, "out of step")
		a.fails(t, "out of step")
		start(t.Context(), h, 2, 1, "op", "c").fails(t, "out of step")
	})
}

func TestHubBroadcastTakesTheRootsBytes(t *testing.T) {
	h := NewHub(2)
	op := OpBroadcast(1, 3)
	a := start(t.Context(), h, 0, 1, op, "")
	start(t.Context(), h, 1, 1, op, "abc").wants(t, "|abc")
	a.wants(t, "|abc")
}

func TestHubRepeatsItsLastAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHub(2)
		// Rank 0's first connection breaks while it waits; its repeat and a
		// second repeat join the same collective.
		broken, hangUp := context.WithCancel(t.Context())
		lost := start(broken, h, 0, 1, "op", "a")
		synctest.Wait()
		hangUp()
		lost.fails(t, "waited for rank 1")
		again, twice := start(t.Context(), h, 0, 1, "op", "a"), start(t.Context(), h, 0, 1, "op", "a")
		synctest.Wait()
		start(t.Context(), h, 1, 1, "op", "b").wants(t, "a|b")
		again.wants(t, "a|b")
		twice.wants(t, "a|b")

		// The answer was lost: repeat while rank 1 is already in the next
		// collective, also with a context that has ended.
		next := start(t.Context(), h, 1, 2, "op", "B")
		synctest.Wait()
		start(broken, h, 0, 1, "op", "a").wants(t, "a|b")
		start(t.Context(), h, 0, 1, "op", "a").wants(t, "a|b")
		start(t.Context(), h, 0, 2, "op", "A").wants(t, "A|B")
		next.wants(t, "A|B")

		start(t.Context(), h, 0, 1, "op", "a").fails(t, "collective 1 (op) of rank 0 is over", "past 2")
		start(t.Context(), h, 0, 2, "op", "other").fails(t, "rank 0 repeats it")
		start(t.Context(), h, 0, 2, "po", "A").fails(t, "rank 0 repeats it")
	})
}

func TestHubCloseReleasesEveryone(t *testing.T) {
	for name, c := range map[string]struct{ reason, want error }{
		"without a reason": {nil, ErrClosed},
		"with a reason":    {context.Canceled, context.Canceled},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := NewHub(3)
				calls := []*call{start(t.Context(), h, 0, 1, "op", "a"), start(t.Context(), h, 1, 1, "op", "b")}
				synctest.Wait()
				h.Close(c.reason)
				h.Close(errors.New("a second close"))
				calls = append(calls, start(t.Context(), h, 2, 1, "op", "c"))
				for _, one := range calls {
					if _, err := one.result(); !errors.Is(err, c.want) {
						t.Errorf("error %v, want %v", err, c.want)
					}
				}
			})
		})
	}
}

func TestHubRefusesBadRanks(t *testing.T) {
	for _, rank := range []int{-1, 2} {
		start(t.Context(), NewHub(2), rank, 1, "op", "").fails(t, "not in 0..1")
	}
	defer func() {
		if recover() == nil {
			t.Error("NewHub accepted a world of 0")
		}
	}()
	NewHub(0)
}

// Ranks run many collectives at their own pace and repeat some calls; every
// answer belongs to its collective.
func TestHubManyCollectives(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		world := rapid.IntRange(1, 5).Draw(t, "world")
		rounds := rapid.IntRange(1, 12).Draw(t, "rounds")
		first := rapid.Uint64Range(0, 5).Draw(t, "first")
		repeats := rapid.SliceOfN(rapid.IntRange(0, 2), world*rounds, world*rounds).Draw(t, "repeats")
		h := NewHub(world)
		errs := make(chan error, world)
		for rank := range world {
			go func() {
				for i := range rounds {
					for range 1 + repeats[rank*rounds+i] {
						parts, err := h.Exchange(context.Background(), rank, first+uint64(i), OpAllGather, []byte{byte(rank), byte(i)})
						if err != nil {
							errs <- err
							return
						}
						for from, part := range parts {
							if !bytes.Equal(part, []byte{byte(from), byte(i)}) {
								errs <- errors.New("bytes of another rank or collective")
								return
							}
						}
					}
				}
				errs <- nil
			}()
		}
		for range world {
			if err := <-errs; err != nil {
				t.Fatal(err)
			}
		}
	})
}

// A hub continues after the last collective of an earlier one: a rank that did not get the answer gets it,
// and the next collective waits for all ranks.
func TestHubResumes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHub(2)
		h.Resume(7, [][]byte{[]byte("a"), []byte("b")})
		start(t.Context(), h, 1, 7, "op", "b").wants(t, "a|b")
		next := start(t.Context(), h, 0, 8, "op", "c")
		start(t.Context(), h, 1, 6, "op", "x").fails(t, "the group is past 7")
		start(t.Context(), h, 1, 8, "op", "d").wants(t, "c|d")
		next.wants(t, "c|d")
	})
}
