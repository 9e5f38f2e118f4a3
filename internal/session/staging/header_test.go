package staging

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"reflect"
	"slices"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

// slotOf returns a file with the header of a plan of two values.
func slotOf(tb testing.TB) ([]byte, Header, *Layout) {
	tb.Helper()
	items := []checkpoint.Item{
		{Value: true, Bytes: 100, Shard: tensor.Shard{FQN: "config"}},
		{Value: true, PerRank: true, Bytes: 7, Shard: tensor.Shard{FQN: "rng"}},
	}
	encoded := checkpoint.EncodeLocal(checkpoint.Local{Rank: 3, Items: items})
	p := LayOut(items, encoded)
	h := Header{
		Part:       Part{Attempt: 2, Rank: 3, Fingerprint: checkpoint.Sum(encoded), Checkpoint: "step-9.a2"},
		Generation: 5, Spans: []Span{{p.offsets[0], 100}, {p.offsets[1], 7}}, Plan: encoded,
	}
	data := make([]byte, p.end)
	writeHeader(data, h.Part, h.Generation, p)
	return data, h, p
}

// A slot describes its content, and is complete only in the generation that was
// sealed.
func TestSlotHeader(t *testing.T) {
	data, want, p := slotOf(t)
	if p.data != 4096 || want.Spans[0].Offset != 4096 || want.Spans[1].Offset != 4096+128 || p.bytes != 107 {
		t.Errorf("the data of %+v begins at %d", want.Spans, p.data)
	}
	for generation, complete := range map[uint64]bool{0: false, 4: false, 5: true} {
		storeSealed(data, generation)
		got, sealed, err := readHeader(data)
		if err != nil || sealed != complete || !reflect.DeepEqual(got, want) {
			t.Errorf("sealed at %d: %+v, %t, %v", generation, got, sealed, err)
		}
	}
	// Digests belong to one generation and are complete, or are unknown.
	digests := []checkpoint.Digest{checkpoint.Sum([]byte("config")), {}}
	writeDigests(data, p, 5, digests)
	if got, _, err := readHeader(data); err != nil || !slices.Equal(got.Digests, digests) {
		t.Errorf("digests %v, %v", got.Digests, err)
	}
	for at := p.digests(); at < p.data; at++ {
		data[at] ^= 1
		if got, _, err := readHeader(data); err != nil || got.Digests != nil {
			t.Errorf("byte %d of the digests is another: %v, %v", at, got.Digests, err)
		}
		data[at] ^= 1
	}
	writeHeader(data, want.Part, want.Generation, p)
	if got, _, err := readHeader(data); err != nil || got.Digests != nil {
		t.Errorf("digests of an earlier use: %v, %v", got.Digests, err)
	}
	// The next use begins unsealed.
	want.Generation = 6
	writeHeader(data, want.Part, want.Generation, p)
	if _, sealed, err := readHeader(data); sealed || err != nil {
		t.Errorf("a slot in its next use is sealed: %t, %v", sealed, err)
	}
}

// Every changed byte of a header except the seal is detected, and a truncated
// file is never taken for a slot.
func TestDamagedSlotHeader(t *testing.T) {
	data, h, p := slotOf(t)
	storeSealed(data, h.Generation)
	end := int(slotFixed + binary.LittleEndian.Uint64(data[48:]))
	for i := range end {
		if i >= sealedAt && i < sealedAt+8 {
			continue
		}
		data[i] ^= 0x10
		if _, _, err := readHeader(data); !errors.Is(err, errNoSlot) {
			t.Errorf("byte %d is another: %v", i, err)
		}
		data[i] ^= 0x10
	}
	for n := range int(p.end) {
		if _, _, err := readHeader(data[:n:n]); !errors.Is(err, errNoSlot) {
			t.Fatalf("cut to %d bytes: %v", n, err)
		}
	}
}

// For any file content, the items are inside the file.
func FuzzReadSlotHeader(f *testing.F) {
	data, _, _ := slotOf(f)
	f.Add(data, true)
	f.Add(data[:slotFixed], false)
	f.Fuzz(func(t *testing.T, data []byte, sum bool) {
		// The seal is read as one word, which a mapped file aligns.
		data = append(make([]byte, 0, len(data)+8), data...)
		if n := len(data); sum && n >= slotFixed {
			if d := binary.LittleEndian.Uint64(data[48:]); d <= uint64(n-slotFixed) {
				binary.LittleEndian.PutUint32(data[16:], crc32.Checksum(data[20:slotFixed+d], castagnoli))
			}
		}
		h, _, err := readHeader(data)
		for _, at := range h.Spans {
			if err == nil && (at.Offset < 0 || at.Size < 0 || at.Offset > int64(len(data)) || at.Size > int64(len(data))-at.Offset) {
				t.Errorf("an item at %d of %d bytes in a file of %d", at.Offset, at.Size, len(data))
			}
		}
	})
}
