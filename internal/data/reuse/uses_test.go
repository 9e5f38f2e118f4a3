package reuse

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

// drawn is items that match chunks of a few files, some of them the same chunk.
func drawn(t *rapid.T) (items []checkpoint.Item, matches map[int]Match) {
	var chunks []*Chunk
	for f := range rapid.IntRange(1, 3).Draw(t, "files") {
		n := rapid.IntRange(1, 5).Draw(t, "chunks")
		file := File{From: fmt.Sprint("file ", f), Size: rapid.Int64Range(1, int64(n)*100).Draw(t, "size")}
		for i := range n {
			chunks = append(chunks, &Chunk{&checkpoint.Entry{Offset: int64(i) * 100, Digest: checkpoint.Digest{byte(f), byte(i), 1}}, file})
		}
	}
	matches = map[int]Match{}
	for i := range rapid.IntRange(1, 8).Draw(t, "items") {
		items = append(items, checkpoint.Item{Bytes: 100, Shard: tensor.Shard{FQN: fmt.Sprint(i)}})
		if rapid.Bool().Draw(t, "matches") {
			h := rapid.SampledFrom(chunks).Draw(t, "chunk")
			matches[i] = Match{Content: Content{digest: h.Entry.Digest, size: 100}, Held: h}
		}
	}
	return items, matches
}

// However items are distributed to ranks, and in whatever order the ranks come, the linked
// files are the same as if one rank had all items. Ranks that wait for others are paused.
func TestUsesOfRanksTogether(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		items, matches := drawn(t)
		world := rapid.IntRange(1, 4).Draw(t, "ranks")
		of := make([]map[int]Match, world)
		var ranks []int
		for rank := range of {
			of[rank] = map[int]Match{}
			ranks = append(ranks, rank)
		}
		for i := range items {
			if m, ok := matches[i]; ok {
				of[rapid.IntRange(0, world-1).Draw(t, "rank")][i] = m
			}
		}
		var mu sync.Mutex
		paused := 0
		count := func(n int) func() {
			return func() {
				mu.Lock()
				defer mu.Unlock()
				paused += n
			}
		}
		u := NewUses(ranks, count(1), count(-1))
		got := make([]Plan, world)
		var wg sync.WaitGroup
		for _, rank := range rapid.Permutation(ranks).Draw(t, "order") {
			wg.Go(func() {
				live, err := u.Live(context.Background(), rank, of[rank])
				if err != nil {
					t.Error(err)
				}
				got[rank] = Settle(items, of[rank], live, nil)
			})
		}
		wg.Wait()
		alone := Settle(items, matches, liveOf(usesOf(matches)), nil)
		linked := map[string]bool{}
		for rank := range got {
			for i, m := range of[rank] {
				one, whole := got[rank].Of[i], alone.Of[i]
				inFile := one.Entry != nil
				if inFile != (whole.Entry != nil) {
					t.Errorf("item %d of rank %d is linked %t, with one rank %t", i, rank, inFile, !inFile)
				}
				if inFile {
					linked[m.Held.File.From] = true
				}
			}
		}
		want := map[string]bool{}
		for _, f := range alone.Files {
			want[f.From] = true
		}
		if !reflect.DeepEqual(linked, want) || paused != 0 {
			t.Errorf("linked %v, want %v; %d ranks are paused", linked, want, paused)
		}
	})
}

// A rank that uses half of a file alone does not wait. Another rank waits until the others
// have reported, or never will, or its context ends.
func TestUsesWaits(t *testing.T) {
	file := File{From: "f", Size: 400}
	part := func(chunks ...int) map[int]Match {
		out := map[int]Match{}
		for _, n := range chunks {
			out[n] = Match{Content: Content{size: 100}, Held: &Chunk{&checkpoint.Entry{Offset: int64(n) * 100}, file}}
		}
		return out
	}
	for _, c := range []struct {
		name  string
		end   func(u *Uses, cancel context.CancelFunc)
		live  int64
		waits bool
	}{
		{"the other uses a part", func(u *Uses, _ context.CancelFunc) { _, _ = u.Live(context.Background(), 1, part(1, 2)) }, 300, true},
		{"the other uses nothing", func(u *Uses, _ context.CancelFunc) { u.Done(1) }, 100, true},
		{"the save has ended", func(u *Uses, _ context.CancelFunc) { u.Stop() }, 100, true},
		{"the context ends", func(_ *Uses, cancel context.CancelFunc) { cancel() }, -1, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				u := NewUses([]int{0, 1}, func() {}, func() {})
				if live, err := u.Live(t.Context(), 1, part(0, 1)); err != nil || live["f"] != 200 {
					t.Errorf("with half of the file: %v, %v", live, err)
				}
				u = NewUses([]int{0, 1}, func() {}, func() {})
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				ended := make(chan struct{})
				go func() {
					defer close(ended)
					live, err := u.Live(ctx, 0, part(0))
					if c.live < 0 && errors.Is(err, context.Canceled) {
						return
					}
					if err != nil || live["f"] != c.live {
						t.Errorf("%v, %v, want %d bytes", live, err, c.live)
					}
				}()
				synctest.Wait()
				select {
				case <-ended:
					t.Error("it has not waited")
				default:
				}
				c.end(u, cancel)
				<-ended
			})
		})
	}
}
