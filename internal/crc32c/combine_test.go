package crc32c

import (
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"
)

// TestCombine compares combined sums with those of the whole data.
func TestCombine(t *testing.T) {
	t.Parallel()
	data := make([]byte, 1<<16)
	_, _ = rand.NewChaCha8([32]byte{2}).Read(data) // never fails
	rapid.Check(t, func(t *rapid.T) {
		from := rapid.IntRange(0, len(data)).Draw(t, "from")
		cut := rapid.IntRange(from, len(data)).Draw(t, "cut")
		to := rapid.IntRange(cut, len(data)).Draw(t, "to")
		got := Combine(Checksum(data[from:cut]), Checksum(data[cut:to]), int64(to-cut))
		if want := Checksum(data[from:to]); got != want {
			t.Fatalf("bytes %d to %d and %d to %d: %08x, want %08x", from, cut, cut, to, got, want)
		}
	})
}

// TestCombineLong doubles a block of zeros until it is longer than any object.
func TestCombineLong(t *testing.T) {
	t.Parallel()
	block := make([]byte, 1<<10)
	sum, size := Checksum(block), int64(len(block))
	for range 10 {
		sum, size = Combine(sum, sum, size), 2*size
	}
	if want := Checksum(make([]byte, size)); sum != want {
		t.Fatalf("%d zeros: %08x, want %08x", size, sum, want)
	}
	// In three parts, in both orders of combination.
	const part = 5 << 40
	a, b, c := uint32(0x12345678), uint32(0x9abcdef0), uint32(0x0fedcba9)
	left := Combine(Combine(a, b, part), c, part+3)
	right := Combine(a, Combine(b, c, part+3), 2*part+3)
	if left != right {
		t.Fatalf("combination depends on its order: %08x and %08x", left, right)
	}
	if got := Combine(a, Checksum(nil), 0); got != a {
		t.Fatalf("with nothing: %08x, want %08x", got, a)
	}
}

func BenchmarkCombine(b *testing.B) {
	sum := uint32(1)
	for b.Loop() {
		sum = Combine(sum, 0x89abcdef, 1<<16)
	}
}
