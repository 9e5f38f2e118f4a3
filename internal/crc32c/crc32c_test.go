package crc32c

import (
	"hash/crc32"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"
)

// TestUpdate compares every length, alignment and beginning with hash/crc32.
func TestUpdate(t *testing.T) {
	t.Logf("512 bits: %v", wide)
	data := make([]byte, 1<<17)
	random := rand.NewChaCha8([32]byte{1})
	_, _ = random.Read(data)
	for n := range 5 * stride {
		if got, want := Checksum(data[:n]), crc32.Checksum(data[:n], table); got != want {
			t.Fatalf("%d bytes: %08x, want %08x", n, got, want)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		from := rapid.IntRange(0, len(data)).Draw(t, "from")
		to := rapid.IntRange(from, len(data)).Draw(t, "to")
		crc := rapid.Uint32().Draw(t, "crc")
		want := crc32.Update(crc, table, data[from:to])
		for _, wide := range []bool{wide, false} {
			if got := update(crc, data[from:to], wide); got != want {
				t.Fatalf("bytes %d to %d after %08x, wide %v: %08x, want %08x", from, to, crc, wide, got, want)
			}
		}
	})
}

// TestKnown is RFC 3720, B.4, and the usual check value.
func TestKnown(t *testing.T) {
	for text, want := range map[string]uint32{"123456789": 0xe3069283, string(make([]byte, 32)): 0x8a9136aa, string(make([]byte, 1<<16)): crc32.Checksum(make([]byte, 1<<16), table)} {
		if got := Checksum([]byte(text)); got != want {
			t.Errorf("%d bytes: %08x, want %08x", len(text), got, want)
		}
	}
}

func BenchmarkChecksum(b *testing.B) {
	for _, c := range []struct {
		name string
		of   func([]byte) uint32
	}{{"this", Checksum}, {"hash/crc32", func(p []byte) uint32 { return crc32.Checksum(p, table) }}} {
		for name, size := range map[string]int{"cache": 1 << 18, "memory": 1 << 28} {
			b.Run(c.name+"/"+name, func(b *testing.B) {
				data := make([]byte, size)
				for i := range data {
					data[i] = byte(i * 7)
				}
				b.SetBytes(int64(size))
				for b.Loop() {
					for at := 0; at < size; at += 1 << 16 {
						c.of(data[at : at+1<<16])
					}
				}
			})
		}
	}
}
