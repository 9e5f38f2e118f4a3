package broadcast

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ckptstore/ckptstore/internal/problem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// quick are limits for tests in which a wait ends.
var quick = Limits{Beat: 20 * time.Millisecond, Silent: 300 * time.Millisecond, Absent: 600 * time.Millisecond}

// sender is a node that passes blocks on.
type sender struct {
	*Shares
	url string
}

func newSender(t *testing.T, limits Limits) *sender {
	t.Helper()
	s := NewShares(limits, slog.New(slog.DiscardHandler))
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	t.Cleanup(s.Close)
	return &sender{s, server.URL}
}

// gets receives as a node, and returns the frames.
func (s *sender) gets(t *testing.T, node int, limits Limits) (got [][]byte, err error) {
	t.Helper()
	err = Receive(t.Context(), Peer{s.url, &http.Client{Transport: &http.Transport{}}}, 1, 1, node, limits, func(f Frame) error {
		if f.Rank != 7 || f.Block != int64(len(got)) {
			return fmt.Errorf("block %d of rank %d comes after %d", f.Block, f.Rank, len(got))
		}
		got = append(got, bytes.Clone(f.Data))
		return nil
	})
	return got, err
}

func frame(n int64, size int) Frame {
	return Frame{Rank: 7, Block: n, Data: bytes.Repeat([]byte{byte(n)}, size)}
}

// Each receiver gets all frames, small and large, in their order. One comes before the share is
// open, and one when all was passed on.
func TestPassedOn(t *testing.T) {
	s := newSender(t, Defaults)
	sizes := []int{1, MaxFrame, 100, 5000, MaxFrame, MaxFrame - 1, 1}
	var all sync.WaitGroup
	check := func(node int) {
		got, err := s.gets(t, node, Defaults)
		if err != nil || len(got) != len(sizes) {
			t.Errorf("node %d got %d frames of %d: %v", node, len(got), len(sizes), err)
			return
		}
		for n, size := range sizes {
			if !bytes.Equal(got[n], frame(int64(n), size).Data) {
				t.Errorf("node %d got other bytes of frame %d", node, n)
			}
		}
	}
	all.Go(func() { check(1) })
	share := s.Open(1, 1, []int{1, 2})
	for n, size := range sizes {
		if err := share.Pass(t.Context(), []int{1, 2}, frame(int64(n), size)); err != nil {
			t.Fatal(err)
		}
	}
	share.End(true)
	check(2)
	all.Wait()
	if !share.done() {
		t.Error("the share is not done")
	}
	if _, err := s.gets(t, 2, Defaults); !slices.Equal(problem.Kinds(err), []problem.Kind{problem.Conflict}) {
		t.Errorf("a second request of a node: %v", err)
	}
}

// Receivers of different sets get their own blocks only.
func TestSets(t *testing.T) {
	s := newSender(t, Defaults)
	share := s.Open(1, 1, []int{1, 2, 3})
	counts := map[int]int{}
	for n := range 200 { // more than packets are kept: those of all sets are sent when there is no room
		to := [][]int{{1, 2}, {1, 3}, {2, 3}, {1}, {2}}[n%5]
		block := Frame{Rank: 7, Data: []byte{byte(n)}}
		for _, node := range to {
			counts[node]++
		}
		if err := share.Pass(t.Context(), to, block); err != nil {
			t.Fatal(err)
		}
	}
	share.End(true)
	for node, want := range counts {
		got := 0
		if err := Receive(t.Context(), Peer{s.url, &http.Client{Transport: &http.Transport{}}}, 1, 1, node, Defaults, func(Frame) error { got++; return nil }); err != nil || got != want {
			t.Errorf("node %d got %d frames, want %d: %v", node, got, want, err)
		}
	}
}

// A receiver that takes nothing, or does not come, is dropped after a while, and holds up the
// others for no longer. The memory is bounded meanwhile.
func TestReceiverTakesNothing(t *testing.T) {
	for name, comes := range map[string]bool{"takes nothing": true, "does not come": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			// The other receiver must not seem silent on a busy machine.
			s := newSender(t, Limits{Beat: quick.Beat, Silent: 10 * quick.Silent, Absent: 10 * quick.Silent})
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			var all sync.WaitGroup
			share := s.Open(1, 1, []int{1, 2})
			if comes {
				all.Go(func() {
					_ = Receive(ctx, Peer{s.url, &http.Client{Transport: &http.Transport{}}}, 1, 1, 2, Defaults, func(Frame) error {
						<-ctx.Done()
						return ctx.Err()
					})
				})
			}
			const frames = window + window/4
			all.Go(func() {
				if got, err := s.gets(t, 1, Defaults); err != nil || len(got) != frames {
					t.Errorf("the other node got %d of %d frames: %v", len(got), frames, err)
				}
			})
			for n := range int64(frames) {
				if err := share.Pass(t.Context(), []int{1, 2}, frame(n, MaxFrame)); err != nil {
					t.Fatal(err)
				}
				share.mu.Lock()
				if share.packets > window {
					t.Errorf("%d packets are kept", share.packets)
				}
				share.mu.Unlock()
			}
			share.End(true)
			leave()
			all.Wait()
			share.mu.Lock()
			defer share.mu.Unlock()
			if !share.to[2].gone || share.packets != 0 {
				t.Errorf("dropped: %v; %d packets are kept", share.to[2].gone, share.packets)
			}
		})
	}
}

// A stream that ends without the last signal is an error, as is a silent sender, nonsense, and
// a load that is not known.
func TestIncompleteStreams(t *testing.T) {
	for name, c := range map[string]struct {
		serve http.HandlerFunc
		text  string
	}{
		"cut": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write(appendHeader(nil, 7, 10, 0))
		}, "ends too early"},
		"silent": {func(w http.ResponseWriter, r *http.Request) {
			_ = http.NewResponseController(w).Flush()
			<-r.Context().Done()
		}, "silent for too long"},
		"large frame": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write(appendHeader(nil, 7, MaxFrame+1, 0))
		}, "a frame of"},
		"another program": {func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "no", http.StatusTeapot) }, "not that of a trainer"},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(c.serve)
			defer server.Close()
			s := &sender{url: server.URL}
			if _, err := s.gets(t, 1, quick); err == nil || !strings.Contains(err.Error(), c.text) {
				t.Errorf("error %v, want %q", err, c.text)
			}
		})
	}
	t.Run("the load fails", func(t *testing.T) {
		s := newSender(t, Defaults)
		share := s.Open(1, 1, []int{1})
		if err := share.Pass(t.Context(), []int{1}, frame(0, 10)); err != nil {
			t.Fatal(err)
		}
		share.End(false)
		if _, err := s.gets(t, 1, Defaults); err == nil {
			t.Error("no error")
		}
	})
	t.Run("an unknown load", func(t *testing.T) {
		s := newSender(t, quick)
		if _, err := s.gets(t, 1, Defaults); err == nil {
			t.Error("no error")
		}
	})
	t.Run("the job ends", func(t *testing.T) {
		s := newSender(t, Defaults)
		s.Open(1, 1, []int{1})
		closing := time.AfterFunc(50*time.Millisecond, s.Close)
		defer closing.Stop()
		if _, err := s.gets(t, 1, Defaults); err == nil {
			t.Error("no error")
		}
	})
}

// A sender that reads slowly shows that it lives.
func TestSlowSender(t *testing.T) {
	s := newSender(t, quick)
	share := s.Open(1, 1, []int{1})
	ending := time.AfterFunc(3*quick.Silent, func() { share.End(true) })
	defer ending.Stop()
	if _, err := s.gets(t, 1, quick); err != nil {
		t.Error(err)
	}
}
