package checkpoint

import (
	"bytes"
	"errors"
	"runtime"
	"slices"
	"sync"

	"github.com/ckptstore/ckptstore/tensor"
)

// EncodeLocal returns the canonical binary form of l. It omits the size of a shard, which
// follows from the box.
func EncodeLocal(l Local) []byte {
	var s, e encoder // the structure, and this rank's parts
	for _, it := range l.Items {
		s.b = append(s.b, it.flags())
	}
	s.names(len(l.Items), func(i int) string { return l.Items[i].Shard.FQN })
	for _, it := range l.Items {
		if it.flags()&flagPath != 0 {
			s.path(it.Path, it.Shard.FQN)
		}
	}
	for _, it := range l.Items {
		if !it.Value {
			s.b = append(s.b, wireDType(it.Shard.DType, it.Shard.Global, it.Shard.Box))
		}
	}
	for _, it := range l.Items {
		if !it.Value {
			s.int(len(it.Shard.Global))
		}
	}
	for _, it := range l.Items {
		for _, n := range it.Shard.Global {
			if !it.Value {
				s.int64(n)
			}
		}
	}
	e.b = make([]byte, 0, len(s.b)+8*len(l.Items)+32)
	e.begin(magicLocal)
	e.int(l.Rank)
	e.int(len(l.Items))
	e.int(len(s.b))
	e.b = append(e.b, s.b...)
	for _, it := range l.Items {
		if it.Value {
			e.int64(it.Bytes)
			continue
		}
		for d, n := range it.Shard.Global {
			if len(it.Shard.Box.Offsets) > d && len(it.Shard.Box.Sizes) > d {
				e.int64(it.Shard.Box.Offsets[d])
				e.int64(n - it.Shard.Box.Offsets[d] - it.Shard.Box.Sizes[d])
			}
		}
	}
	for _, it := range l.Items {
		if it.Check != (Check{}) {
			e.b = append(e.b, it.Check[:]...)
		}
	}
	return e.b
}

// wireDType returns 0, which no decoder accepts, for a box whose dimensions differ from its
// shape's: no form can express that.
func wireDType(t tensor.DType, s tensor.Shape, b tensor.Box) byte {
	if len(b.Offsets) != len(s) || len(b.Sizes) != len(s) {
		return 0
	}
	return byte(t)
}

func (it Item) flags() byte {
	flags := byte(0)
	if it.Value {
		flags |= flagValue
	}
	if it.PerRank {
		flags |= flagPerRank
	}
	if !it.Path.Plain(it.Shard.FQN) {
		flags |= flagPath
	}
	if it.Check != (Check{}) {
		flags |= flagCheck
	}
	return flags
}

// DecodeLocal is the inverse of [EncodeLocal]. It validates shards.
func DecodeLocal(data []byte) (Local, error) {
	return new(LocalDecoder).Decode(data)
}

// LocalDecoder decodes the local plans of a save one after the other. The plans of the ranks
// mostly differ in boxes alone, so names and shapes with the same bytes as in the plan before
// are shared with it instead of decoded again. The zero value is ready; it is not for
// concurrent use.
type LocalDecoder struct {
	structure []byte // as encoded
	items     []Item // without boxes
	numbers   int    // that the boxes need: two a dimension
	checked   []int  // indexes of the items that have a check
}

// Decode is [DecodeLocal].
func (c *LocalDecoder) Decode(data []byte) (Local, error) {
	d := &decoder{b: data}
	d.begin(magicLocal)
	l := Local{Rank: d.int()}
	n := d.count(3)
	end := d.count(1) + d.at
	if d.err == nil && (n != len(c.items) || !bytes.Equal(data[d.at:end], c.structure)) {
		in := &decoder{b: data[:end], at: d.at}
		*c = readStructure(in, n)
		d.err = in.err
	}
	if d.err == nil {
		d.at = end
		l.Items = c.boxes(d)
	}
	if err := d.end("local plan"); err != nil {
		return Local{}, err
	}
	return l, nil
}

// readStructure reads everything of n items except their boxes and sizes.
func readStructure(d *decoder, n int) (c LocalDecoder) {
	structure := d.b[d.at:]
	flags := d.flags(n, flagValue|flagPerRank|flagPath|flagCheck)
	shards := 0
	for _, f := range flags {
		if f&flagValue == 0 {
			shards++
		}
	}
	names := d.names(n, "item")
	paths := d.paths(flags, flagPath, names)
	dtypes, shapes := d.dtypes(shards, 0), d.shapes(shards)
	if d.err == nil && d.left() > 0 {
		d.fail("%d bytes after the last shape", d.left())
	}
	if d.err != nil || n == 0 {
		return c
	}
	c.structure, c.items = bytes.Clone(structure), make([]Item, n)
	for i, next := 0, 0; i < n; i++ {
		it := &c.items[i]
		it.Value, it.PerRank = flags[i]&flagValue != 0, flags[i]&flagPerRank != 0
		it.Shard.FQN, it.Path = names[i], paths[i]
		if flags[i]&flagCheck != 0 {
			c.checked = append(c.checked, i)
		}
		if it.Value {
			continue
		}
		it.Shard.DType, it.Shard.Global = tensor.DType(dtypes[next]), shapes[next]
		next++
		if err := validShape(it.Shard.FQN, it.Shard.DType, it.Shard.Global); err != nil {
			d.fail("%v", err)
			return LocalDecoder{}
		}
		c.numbers += 2 * len(it.Shard.Global)
	}
	return c
}

// validShape is [tensor.Shard.Validate] without a box.
func validShape(fqn string, t tensor.DType, shape tensor.Shape) error {
	zeros := make([]int64, len(shape))
	return tensor.Shard{FQN: fqn, DType: t, Global: shape, Box: tensor.Box{Offsets: zeros, Sizes: zeros}}.Validate()
}

// boxes makes a plan's items from the structure and the rest of its bytes.
//
// Two small allocations per box, and the names that every rank's plan repeats, once took most
// of the decoding time. Now a plan is a copy of the items and one slab of numbers.
func (c *LocalDecoder) boxes(d *decoder) []Item {
	if d.fits(uint64(c.numbers), 1); d.err != nil || len(c.items) == 0 {
		return nil
	}
	items, slab := slices.Clone(c.items), make([]int64, c.numbers)
	for i := range items {
		it := &items[i]
		if it.Value {
			it.Bytes = d.int64()
			continue
		}
		k := len(it.Shard.Global)
		offsets, sizes := slab[:k:k], slab[k:2*k:2*k]
		slab = slab[2*k:]
		volume := int64(it.Shard.DType.Size())
		for dim, n := range it.Shard.Global {
			offset, rest := d.uint(), d.uint()
			if offset > uint64(n) || rest > uint64(n)-offset {
				d.fail("tensor %q: %d before and %d behind the box are out of bounds of shape %v in dimension %d",
					it.Shard.FQN, offset, rest, it.Shard.Global, dim)
				return nil
			}
			offsets[dim], sizes[dim] = int64(offset), n-int64(offset)-int64(rest)
			volume *= sizes[dim]
		}
		it.Shard.Box = tensor.Box{Offsets: offsets, Sizes: sizes}
		it.Bytes = volume
	}
	if d.fits(uint64(len(c.checked)), len(Check{})); d.err != nil {
		return nil
	}
	for _, i := range c.checked {
		check := &items[i].Check
		if d.at += copy(check[:], d.b[d.at:]); *check == (Check{}) {
			d.fail("the check of %q is zero, which means no check", items[i].Shard.FQN)
			return nil
		}
	}
	return items
}

// DecodeLocals decodes the local plans of a save on all processors, in the order of data. The
// error joins those of all broken plans.
func DecodeLocals(data [][]byte) ([]Local, error) {
	locals, errs := make([]Local, len(data)), make([]error, len(data))
	if len(data) == 0 {
		return locals, nil
	}
	// All decoders begin with the structure of the first plan, so that all share its names.
	var first LocalDecoder
	locals[0], errs[0] = first.Decode(data[0])
	workers := min(runtime.GOMAXPROCS(0), len(data))
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			c := first
			for i := max(1, w*len(data)/workers); i < (w+1)*len(data)/workers; i++ {
				locals[i], errs[i] = c.Decode(data[i])
			}
		})
	}
	wg.Wait()
	return locals, errors.Join(errs...)
}
