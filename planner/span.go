package planner

import (
	"cmp"
	"sync"
	"sync/atomic"

	"github.com/ckptstore/ckptstore/tensor"
)

// span is a box as two numbers: the row-major positions of its first and its
// last element. Boxes of one tensor that are not empty are equal when both
// are, which is cheaper to find out than by any key made of the dimensions.
type span struct {
	first, last int64
	bytes       int64
	place
}

// spanOf is the span of a valid shard, and whether it is empty.
func spanOf(s *tensor.Shard) (at span, empty bool) {
	at.bytes = int64(s.DType.Size())
	for d, n := range s.Global {
		offset, size := s.Box.Offsets[d], s.Box.Sizes[d]
		if size == 0 {
			return span{}, true
		}
		at.first = at.first*n + offset
		at.last = at.last*n + offset + size - 1
		at.bytes *= size
	}
	return at, false
}

func compareSpans(a, b span) int {
	if a.first == b.first {
		return cmp.Compare(a.last, b.last)
	}
	return cmp.Compare(a.first, b.first)
}

// each calls do with 0 to n-1 on so many workers, and tells those apart.
func each(workers, n int, do func(worker, i int)) {
	var next atomic.Int64
	var wg sync.WaitGroup
	for w := range min(workers, n) {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				do(w, i)
			}
		})
	}
	wg.Wait()
}
