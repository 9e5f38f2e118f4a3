package shm_test

import (
	"slices"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/session/shm"
)

func TestIdle(t *testing.T) {
	var freed []int
	i := &shm.Idle[int]{Rest: time.Hour, Free: func(n int) { freed = append(freed, n) }}
	never := func(_, _ int) bool { return false }
	less := func(a, b int) bool { return a < b }
	if n, ok := i.Take(never); ok {
		t.Errorf("took %d of nothing", n)
	}
	for _, n := range []int{5, 3, 4} {
		i.Keep(n)
	}
	if n, ok := i.Take(never); !ok || n != 4 {
		t.Errorf("took %d, %t, want the newest", n, ok)
	}
	if n, ok := i.Take(less); !ok || n != 3 {
		t.Errorf("took %d, %t, want the least", n, ok)
	}
	if !i.Spare() || i.Spare() || !slices.Equal(freed, []int{5}) {
		t.Errorf("spared %v", freed)
	}
	i.Keep(6)
	i.Close()
	i.Keep(7)
	if _, ok := i.Take(never); ok || !slices.Equal(freed, []int{5, 6, 7}) {
		t.Errorf("closed with %v", freed)
	}
}

func TestIdleFreesWhatHasRested(t *testing.T) {
	freed := make(chan int, 1)
	i := &shm.Idle[int]{Rest: time.Millisecond, Free: func(n int) { freed <- n }}
	i.Keep(1)
	select {
	case <-freed:
	case <-time.After(20 * time.Second):
		t.Fatal("it is still there")
	}
	if n, ok := i.Take(func(_, _ int) bool { return false }); ok {
		t.Errorf("took %d, which was freed", n)
	}
}
