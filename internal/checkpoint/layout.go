package checkpoint

import (
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/ckptstore/ckptstore/tensor"
)

// EncodeLayout returns the canonical binary form of l.
func EncodeLayout(l Layout) []byte {
	var e encoder
	e.layout(l)
	return e.b
}

func (e *encoder) layout(l Layout) {
	e.begin(magicLayout)
	e.int(len(l.Tensors))
	e.names(len(l.Tensors), func(i int) string { return l.Tensors[i].FQN })
	rules := make([]grid, len(l.Tensors))
	regular := make([]bool, len(l.Tensors))
	each(len(l.Tensors), func(i int) { rules[i], regular[i] = ruleOf(l.Tensors[i]) })
	for i, t := range l.Tensors {
		dtype := byte(t.DType)
		if !regular[i] {
			for _, c := range t.Chunks {
				dtype = min(dtype, wireDType(t.DType, t.Shape, c.Box))
			}
		}
		if !t.Path.Plain(t.FQN) {
			dtype |= dtypePath
		}
		e.b = append(e.b, dtype)
	}
	for _, t := range l.Tensors {
		e.int(len(t.Shape))
	}
	for _, t := range l.Tensors {
		for _, n := range t.Shape {
			e.int64(n)
		}
	}
	for _, t := range l.Tensors {
		if !t.Path.Plain(t.FQN) {
			e.path(t.Path, t.FQN)
		}
	}
	var spent budget
	for i, t := range l.Tensors {
		if regular[i] && spent.allows(len(t.Chunks), len(t.Shape)) {
			e.int(0)
			e.grid(rules[i], t.Shape)
			continue
		}
		e.int(1 + len(t.Chunks))
		e.chunks(t)
	}
	e.values(l.Values)
}

// chunks lists the chunks without a rule, as differences from the chunk before: few of them
// take more than a byte or two.
func (e *encoder) chunks(t Tensor) {
	last := 0
	for _, c := range t.Chunks {
		e.delta(int64(c.Rank), int64(last))
		last = c.Rank
	}
	for d, n := range t.Shape {
		offset, size := int64(0), n
		for _, c := range t.Chunks {
			if len(c.Box.Offsets) <= d || len(c.Box.Sizes) <= d {
				continue
			}
			e.delta(c.Box.Offsets[d], offset)
			e.delta(c.Box.Sizes[d], size)
			offset, size = c.Box.Offsets[d], c.Box.Sizes[d]
		}
	}
}

func (e *encoder) values(values []Value) {
	e.int(len(values))
	e.names(len(values), func(i int) string { return values[i].FQN })
	last := 0
	for _, v := range values {
		e.delta(int64(v.Rank), int64(last))
		last = v.Rank
	}
	for _, v := range values {
		e.int64(v.Bytes)
	}
	for _, v := range values {
		e.b = append(e.b, Item{PerRank: v.PerRank, Path: v.Path, Shard: tensor.Shard{FQN: v.FQN}}.flags())
	}
	for _, v := range values {
		if !v.Path.Plain(v.FQN) {
			e.path(v.Path, v.FQN)
		}
	}
}

// DecodeLayout is the inverse of [EncodeLayout]. It validates shapes and boxes, but not that
// the boxes cover each shape once.
func DecodeLayout(data []byte) (Layout, error) {
	d := &decoder{b: data}
	l := d.layout(nil)
	if err := d.end("layout"); err != nil {
		return Layout{}, err
	}
	return l, nil
}

// layout reads a layout. If only is not nil, the rules of the tensors for which it is false
// are checked like the others, but not expanded.
func (d *decoder) layout(only func(fqn string) bool) (l Layout) {
	d.begin(magicLayout)
	n := d.count(5)
	names, dtypes, shapes := d.names(n, "tensor"), d.dtypes(n, dtypePath), d.shapes(n)
	paths := d.paths(dtypes, dtypePath, names)
	if d.err == nil && n > 0 {
		l.Tensors = make([]Tensor, n)
	}
	var spent budget
	rules := make([]grid, len(l.Tensors))
	dims := 0
	for i := range l.Tensors {
		dims += len(shapes[i])
	}
	cells := make([]int64, dims)
	for i := range l.Tensors {
		t := &l.Tensors[i]
		*t = Tensor{FQN: names[i], Path: paths[i], DType: tensor.DType(dtypes[i] &^ dtypePath), Shape: shapes[i]}
		if err := validShape(t.FQN, t.DType, t.Shape); err != nil {
			d.fail("%v", err)
		}
		switch c := d.uint(); {
		case d.err != nil:
			return l
		case c == 0:
			ndim := len(t.Shape)
			rules[i] = d.grid(t.FQN, t.Shape, cells[:ndim:ndim], &spent)
			cells = cells[ndim:]
		default:
			t.Chunks = d.chunks(t, d.fits(c-1, 1+2*len(t.Shape)), spent)
		}
	}
	l.Values = d.values()
	if d.err == nil { // the rules of a broken form are not expanded
		each(len(rules), func(i int) {
			if rules[i].count > 0 && (only == nil || only(l.Tensors[i].FQN)) {
				l.Tensors[i].Chunks = rules[i].expand(l.Tensors[i].Shape)
			}
		})
	}
	return l
}

func (d *decoder) chunks(t *Tensor, count int, spent budget) []Chunk {
	if d.err != nil || count == 0 {
		return nil
	}
	// Ranks are read twice, so that nothing is allocated for broken ones.
	start, last := d.at, 0
	for range count {
		last = d.rank(last)
	}
	ndim := len(t.Shape)
	if ndim > 0 {
		d.fits(uint64(count), 2*ndim)
	}
	if d.err != nil {
		return nil
	}
	chunks, slab := make([]Chunk, count), make([]int64, 2*ndim*count)
	d.at, last = start, 0
	for i := range chunks {
		last = d.rank(last)
		chunks[i].Rank = last
		chunks[i].Box = tensor.Box{Offsets: slab[:ndim:ndim], Sizes: slab[ndim : 2*ndim : 2*ndim]}
		slab = slab[2*ndim:]
	}
	for dim, n := range t.Shape {
		offset, size := int64(0), n
		for i := range chunks {
			offset += unzigzag(d.uint())
			size += unzigzag(d.uint())
			if d.err == nil && (offset < 0 || size < 0 || offset > n || size > n-offset) {
				d.fail("tensor %q: box at %d+%d is out of bounds of shape %v in dimension %d", t.FQN, offset, size, t.Shape, dim)
			}
			if d.err != nil {
				return nil
			}
			chunks[i].Box.Offsets[dim], chunks[i].Box.Sizes[dim] = offset, size
		}
	}
	if _, ok := ruleOf(Tensor{Shape: t.Shape, Chunks: chunks}); ok && spent.allows(count, ndim) {
		d.fail("tensor %q: %d chunks are listed instead of a rule", t.FQN, count)
	}
	return chunks
}

func (d *decoder) values() []Value {
	n := d.count(5)
	names := d.names(n, "value")
	if d.err != nil || n == 0 {
		return nil
	}
	values, last := make([]Value, n), 0
	for i := range values {
		last = d.rank(last)
		values[i].FQN, values[i].Rank = names[i], last
	}
	for i := range values {
		values[i].Bytes = d.int64()
	}
	flags := d.flags(n, flagPerRank|flagPath)
	for i, path := range d.paths(flags, flagPath, names) {
		values[i].PerRank, values[i].Path = flags[i]&flagPerRank != 0, path
	}
	return values
}

// EncodeManifest returns the canonical binary form of m. The form's digest is part of the
// file's name.
func EncodeManifest(m Manifest) []byte {
	var e encoder
	e.begin(magicManifest)
	for _, s := range []string{m.Store, m.Run, m.Trial, m.Checkpoint, m.Name} {
		e.string(s)
	}
	e.int64(m.Step)
	e.int(m.Attempt)
	e.int(m.WorldSize)
	e.int(len(m.Ranks))
	last := 0
	for _, r := range m.Ranks {
		e.delta(int64(r.Rank), int64(last))
		last = r.Rank
	}
	for _, r := range m.Ranks {
		e.b = append(e.b, r.Index[:]...)
	}
	e.layout(m.Layout)
	return e.b
}

// DecodeManifest is the inverse of [EncodeManifest].
func DecodeManifest(data []byte) (Manifest, error) { return decodeManifest(data, nil) }

// DecodeManifestOf is [DecodeManifest] for a lookup of one tensor: tensors of other names may
// lack their chunks, which are most of a manifest.
func DecodeManifestOf(data []byte, fqn string) (Manifest, error) {
	return decodeManifest(data, func(other string) bool { return other == fqn })
}

func decodeManifest(data []byte, only func(string) bool) (Manifest, error) {
	d := &decoder{b: data}
	d.begin(magicManifest)
	text := func() string { return string(d.bytes()) }
	m := Manifest{
		Store: text(), Run: text(), Trial: text(), Checkpoint: text(), Name: text(),
		Step: d.int64(), Attempt: d.int(), WorldSize: d.int(),
	}
	if n := d.count(33); n > 0 {
		m.Ranks = make([]RankIndex, n)
	}
	last := 0
	for i := range m.Ranks {
		last = d.rank(last)
		m.Ranks[i].Rank = last
	}
	for i := range m.Ranks {
		m.Ranks[i].Index = d.digest()
	}
	m.Layout = d.layout(only)
	if err := d.end("manifest"); err != nil {
		return Manifest{}, err
	}
	return m, nil
}

// each calls do(0) to do(n-1) on all processors.
func each(n int, do func(i int)) {
	var next atomic.Int64
	var wg sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), n) {
		wg.Go(func() {
			for i := int(next.Add(1)) - 1; i < n; i = int(next.Add(1)) - 1 {
				do(i)
			}
		})
	}
	wg.Wait()
}
