package plan

import "github.com/ckptstore/ckptstore/tensor"

// EncodeLocal is the canonical binary form of l.
func EncodeLocal(l Local) []byte {
	var e encoder
	e.begin(magicLocal)
	e.int(l.Rank)
	e.int(len(l.Items))
	for _, it := range l.Items {
		e.uint(it.flags())
		e.string(it.Shard.FQN)
		e.int64(it.Bytes)
		if !it.Value {
			e.uint(uint64(it.Shard.DType))
			e.dims(it.Shard.Global)
			e.box(it.Shard.Box)
		}
	}
	return e.b
}

func (it Item) flags() uint64 {
	flags := uint64(0)
	if it.Value {
		flags |= flagValue
	}
	if it.PerRank {
		flags |= flagPerRank
	}
	return flags
}

// DecodeLocal is the inverse of [EncodeLocal]. Shards are validated.
func DecodeLocal(data []byte) (Local, error) {
	d := &decoder{b: data, size: len(data)}
	d.begin(magicLocal)
	l := Local{Rank: d.int()}
	for range d.entries(3) {
		flags := d.uint()
		it := Item{Value: flags&flagValue != 0, PerRank: flags&flagPerRank != 0}
		if flags > flagValue|flagPerRank {
			d.fail("unknown flags %d", flags)
		}
		it.Shard.FQN = d.name("item")
		it.Bytes = d.int64()
		if !it.Value {
			it.Shard.DType = d.dtype()
			it.Shard.Global = d.dims()
			it.Shard.Box = d.box(len(it.Shard.Global))
			if err := it.Shard.Validate(); err != nil {
				d.fail("%v", err)
			} else if it.Bytes != it.Shard.Bytes() {
				d.fail("tensor %q has %d bytes, its box needs %d", it.Shard.FQN, it.Bytes, it.Shard.Bytes())
			}
		}
		l.Items = append(l.Items, it)
	}
	return l, d.end("local plan")
}

// EncodeLayout is the canonical binary form of l.
func EncodeLayout(l Layout) []byte {
	var e encoder
	e.layout(l)
	return e.b
}

func (e *encoder) layout(l Layout) {
	e.begin(magicLayout)
	e.int(len(l.Tensors))
	for _, t := range l.Tensors {
		e.string(t.FQN)
		e.uint(uint64(t.DType))
		e.dims(t.Shape)
		e.int(len(t.Chunks))
		for _, c := range t.Chunks {
			e.int(c.Rank)
			e.box(c.Box)
		}
	}
	e.int(len(l.Values))
	for _, v := range l.Values {
		e.string(v.FQN)
		e.int(v.Rank)
		e.int64(v.Bytes)
		e.uint(Item{PerRank: v.PerRank}.flags())
	}
}

// DecodeLayout is the inverse of [EncodeLayout]. Shapes and boxes are
// validated; whether the boxes cover each shape once is not looked into.
func DecodeLayout(data []byte) (Layout, error) {
	d := &decoder{b: data, size: len(data)}
	l := d.layout()
	return l, d.end("layout")
}

func (d *decoder) layout() (l Layout) {
	d.begin(magicLayout)
	for range d.entries(4) {
		t := Tensor{FQN: d.name("tensor"), DType: d.dtype(), Shape: d.dims()}
		whole := tensor.Shard{FQN: t.FQN, DType: t.DType, Global: t.Shape, Box: t.Shape.Full()}
		if err := whole.Validate(); err != nil {
			d.fail("%v", err)
		}
		for range d.entries(1) {
			c := Chunk{Rank: d.int(), Box: d.box(len(t.Shape))}
			if err := c.Box.Validate(t.Shape); err != nil {
				d.fail("tensor %q: %v", t.FQN, err)
			}
			t.Chunks = append(t.Chunks, c)
		}
		l.Tensors = append(l.Tensors, t)
	}
	for range d.entries(4) {
		v := Value{FQN: d.name("value"), Rank: d.int(), Bytes: d.int64()}
		flags := d.uint()
		if flags&^flagPerRank != 0 {
			d.fail("unknown flags %d", flags)
		}
		v.PerRank = flags&flagPerRank != 0
		l.Values = append(l.Values, v)
	}
	return l
}

// EncodeManifest is the canonical binary form of m; its digest names the
// file.
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
	for _, r := range m.Ranks {
		e.int(r.Rank)
		e.b = append(e.b, r.Index[:]...)
	}
	e.layout(m.Layout)
	return e.b
}

// DecodeManifest is the inverse of [EncodeManifest].
func DecodeManifest(data []byte) (Manifest, error) {
	d := &decoder{b: data, size: len(data)}
	d.begin(magicManifest)
	m := Manifest{
		Store: d.string(), Run: d.string(), Trial: d.string(), Checkpoint: d.string(), Name: d.string(),
		Step: d.int64(), Attempt: d.int(), WorldSize: d.int(),
	}
	for range d.entries(33) {
		m.Ranks = append(m.Ranks, RankIndex{Rank: d.int(), Index: d.digest()})
	}
	m.Layout = d.layout()
	return m, d.end("manifest")
}
