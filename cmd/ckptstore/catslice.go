package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/ckptstore/ckptstore/tensor"
)

// slice is a part of a tensor, and the shape that it has by itself: a dimension
// of which an index names one element is not in it.
type slice struct {
	box   tensor.Box
	shape tensor.Shape
}

// parseSlice reads numpy's basic slicing of a tensor: for each dimension
// START:STOP, an index, or nothing but a colon; "..." for as many dimensions as
// are left. Negative numbers count from the end, and ranges end where the
// tensor does.
func parseSlice(spec string, shape tensor.Shape) (slice, error) {
	parts := strings.Split(spec, ",")
	if strings.TrimSpace(spec) == "" {
		return slice{}, fmt.Errorf("it is empty: give a range for each dimension, such as 0:10,:,5")
	}
	if last := len(parts) - 1; last > 0 && strings.TrimSpace(parts[last]) == "" {
		parts = parts[:last] // as in a tuple of Python
	}
	named, dots := 0, false
	for _, part := range parts {
		if strings.TrimSpace(part) != "..." {
			named++
			continue
		}
		if dots {
			return slice{}, fmt.Errorf(`it has "..." twice`)
		}
		dots = true
	}
	if named > len(shape) {
		return slice{}, fmt.Errorf("it names %d dimensions, the tensor has %d: its shape is %v", named, len(shape), []int64(shape))
	}
	if !dots {
		parts = append(parts, "...")
	}
	out := slice{shape: tensor.Shape{}}
	add := func(off, size int64, keep bool) {
		out.box.Offsets, out.box.Sizes = append(out.box.Offsets, off), append(out.box.Sizes, size)
		if keep {
			out.shape = append(out.shape, size)
		}
	}
	for _, part := range parts {
		d := len(out.box.Sizes)
		if part = strings.TrimSpace(part); part == "..." {
			for range len(shape) - named {
				add(0, shape[len(out.box.Sizes)], true)
			}
			continue
		}
		off, size, keep, err := parseRange(part, shape[d])
		if err != nil {
			return slice{}, fmt.Errorf("dimension %d, %q: %w", d, part, err)
		}
		add(off, size, keep)
	}
	return out, nil
}

// parseRange reads the part of one dimension of n elements.
func parseRange(text string, n int64) (off, size int64, keep bool, err error) {
	ends := strings.Split(text, ":")
	number := func(i int, absent int64) (int64, error) {
		if i >= len(ends) || strings.TrimSpace(ends[i]) == "" {
			return absent, nil
		}
		v, err := strconv.ParseInt(strings.TrimSpace(ends[i]), 10, 64)
		if err != nil {
			return 0, fmt.Errorf("%q is not a whole number", ends[i])
		}
		return v, nil
	}
	if len(ends) == 1 {
		if strings.TrimSpace(text) == "" {
			return 0, 0, false, fmt.Errorf("it is empty: write : for the whole dimension")
		}
		i, err := number(0, 0)
		if err != nil {
			return 0, 0, false, err
		}
		if i < -n || i >= n {
			return 0, 0, false, fmt.Errorf("index %d is out of bounds of %d elements", i, n)
		}
		if i < 0 {
			i += n
		}
		return i, 1, false, nil
	}
	if len(ends) > 3 {
		return 0, 0, false, fmt.Errorf("want START:STOP, an index, or a colon")
	}
	step, err := number(2, 1)
	if err != nil {
		return 0, 0, false, err
	}
	if step != 1 {
		return 0, 0, false, fmt.Errorf("a step of %d is not supported: leave it out, and take one in %d of what is read", step, step)
	}
	start, err := number(0, 0)
	if err != nil {
		return 0, 0, false, err
	}
	stop, err := number(1, n)
	if err != nil {
		return 0, 0, false, err
	}
	within := func(v int64) int64 {
		if v < 0 {
			v = max(v, -n) + n
		}
		return min(v, n)
	}
	start, stop = within(start), within(stop)
	return min(start, n), max(stop-start, 0), true, nil
}
