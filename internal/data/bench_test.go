package data_test

import (
	"fmt"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

// large is a checkpoint of one rank with 16 tensors of 16 MiB.
func large() (*model, [][]byte) {
	m := newModel()
	var data [][]byte
	for i := range 16 {
		m.full(0, fmt.Sprintf("layer.%02d", i), tensor.BFloat16, 2048, 4096)
		data = append(data, m.tensors[fmt.Sprintf("layer.%02d", i)])
	}
	return m, data
}

// BenchmarkWriteData writes 256 MiB, with digests and durably.
func BenchmarkWriteData(b *testing.B) {
	m, data := large()
	root := onDisk(b)
	w := root.Writer(ref)
	if err := w.SetUp(b.Context(), true); err != nil {
		b.Fatal(err)
	}
	items := m.layout.Items(0)
	b.SetBytes(m.layout.Bytes())
	b.ReportAllocs()
	for b.Loop() {
		if _, err := w.WriteData(b.Context(), 0, items, source(func(i int) ([]byte, error) { return data[i], nil })); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkReadData loads the same, from the page cache into warm memory, as
// it was saved and cut into columns.
func BenchmarkReadData(b *testing.B) {
	m, _ := large()
	root := onDisk(b)
	m.save(b, root)
	for _, columns := range []int64{4096, 1024} {
		b.Run(fmt.Sprintf("columns=%d", columns), func(b *testing.B) {
			var wants []checkpoint.Want
			for _, want := range m.wantAll() {
				for at := int64(0); at < 4096; at += columns {
					part := want
					part.Shard.Box = tensor.Box{Offsets: []int64{0, at}, Sizes: []int64{2048, columns}}
					wants = append(wants, part)
				}
			}
			dst := make(destination, len(wants))
			for i, want := range wants {
				dst[i] = noise("warm", want.Shard.Bytes())
			}
			reads := m.reads(wants)
			r := root.Reader(ref)
			manifest, err := r.ReadMetadata(b.Context())
			if err != nil {
				b.Fatal(err)
			}
			if err := r.SetUp(b.Context(), manifest, true); err != nil {
				b.Fatal(err)
			}
			b.SetBytes(m.layout.Bytes())
			for b.Loop() {
				if _, err := r.ReadData(b.Context(), wants, reads, dst); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkVerify reads and digests the same.
func BenchmarkVerify(b *testing.B) {
	m, _ := large()
	root := onDisk(b)
	receipt := m.save(b, root)
	b.SetBytes(m.layout.Bytes())
	for b.Loop() {
		if report := verify(b, root, receipt.Manifest); !report.Clean() {
			b.Fatal(report.Findings)
		}
	}
}

// BenchmarkMemory loads the same from memory, where all chunks are with their digests:
// copied, and verified in place.
func BenchmarkMemory(b *testing.B) {
	m, _ := large()
	root := onDisk(b)
	m.save(b, root)
	h := held{}
	for i, it := range m.layout.Items(0) {
		data, err := m.source(0).Item(i)
		if err != nil {
			b.Fatal(err)
		}
		h[heldKey(0, it)] = heldChunk{data, checkpoint.Sum(data)}
	}
	wants := m.wantAll()
	dst := make(destination, len(wants))
	for i, want := range wants {
		dst[i] = noise("warm", want.Shard.Bytes())
	}
	r, reads := root.Reader(ref), m.reads(wants)
	manifest, err := r.ReadMetadata(b.Context())
	if err != nil {
		b.Fatal(err)
	}
	if err := r.SetUp(b.Context(), manifest, true); err != nil {
		b.Fatal(err)
	}
	b.Run("copied", func(b *testing.B) {
		b.SetBytes(m.layout.Bytes())
		for b.Loop() {
			if got, err := r.ReadMemory(b.Context(), wants, reads, dst, h); err != nil || len(got.Rest) > 0 {
				b.Fatal(got.Unfit, err)
			}
		}
	})
	b.Run("in-place", func(b *testing.B) {
		b.SetBytes(m.layout.Bytes())
		for b.Loop() {
			if got, err := r.VerifyMemory(b.Context(), wants, reads, h, nil); err != nil || len(got.Rest) > 0 {
				b.Fatal(got.Unfit, err)
			}
		}
	})
}
