package checkpoint

// span is the number of bytes from the first element to the end of the last,
// and whether they can lie in a file of limit bytes at all.
func (e *Entry) Span(limit int64) (bytes int64, ok bool) {
	sizes := e.Item.Shard.Box.Sizes
	if e.Item.Shard.Box.Empty() {
		return 0, true
	}
	size := int64(e.Item.Shard.DType.Size())
	limit /= size
	last := int64(0) // element
	for d, n := range sizes {
		if n == 1 {
			continue
		}
		if e.Strides[d] > limit/(n-1) {
			return 0, false
		}
		if add := e.Strides[d] * (n - 1); add > limit-last {
			return 0, false
		} else {
			last += add
		}
	}
	return (last + 1) * size, last < limit
}

// gather fills window with the bytes of a strided chunk from start on, out of
// all of its span. Both ends are multiples of an element's size.
func (e *Entry) Gather(window, span []byte, start int64) {
	size := int64(e.Item.Shard.DType.Size())
	sizes := e.Item.Shard.Box.Sizes
	at := make([]int64, len(sizes))
	pos, rest := int64(0), start/size
	for d := len(sizes) - 1; d >= 0; d-- {
		at[d] = rest % sizes[d]
		rest /= sizes[d]
		pos += at[d] * e.Strides[d]
	}
	for len(window) > 0 {
		copy(window[:size], span[pos*size:])
		window = window[size:]
		for d := len(sizes) - 1; d >= 0; d-- {
			at[d]++
			pos += e.Strides[d]
			if at[d] < sizes[d] {
				break
			}
			pos -= at[d] * e.Strides[d]
			at[d] = 0
		}
	}
}
