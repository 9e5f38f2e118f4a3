package client

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
)

// TestCopyOut copies from and to any alignment, and checks that the bytes around the
// destination are unchanged.
func TestCopyOut(t *testing.T) {
	const most, margin = 3<<20 + 100, 80
	from := make([]byte, most+margin)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(from) // never fails
	for _, size := range []int{0, 1, 63, 64, 4096, 32<<10 - 1, 32 << 10, 32<<10 + 1, 285_714, 1 << 20, 1<<20 + 65, most} {
		for at := range 65 {
			t.Run(fmt.Sprint(size, "+", at), func(t *testing.T) {
				to := bytes.Repeat([]byte{0xa5}, size+2*margin)
				want := bytes.Clone(to)
				copy(want[at:at+size], from[64-at:])
				copyOut(to[at:at+size], from[64-at:][:size])
				if !bytes.Equal(to, want) {
					t.Error("other bytes than copy gives")
				}
			})
		}
	}
	short := make([]byte, 40_000)
	copyOut(short, from)
	if !bytes.Equal(short, from[:40_000]) {
		t.Error("into less memory than there is to copy")
	}
}

// BenchmarkCopyOut copies 256 MB in tensors of 286 kB, past the cache and
// through it.
func BenchmarkCopyOut(b *testing.B) {
	const size, count = 285_714, 900
	from, to := make([]byte, size*count), make([]byte, size*count)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(from) // never fails
	copy(to, from)
	for name, do := range map[string]func(to, from []byte){"past": copyOut, "through": func(to, from []byte) { copy(to, from) }} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(size * count)
			for b.Loop() {
				for i := range count {
					do(to[i*size:][:size], from[i*size:][:size])
				}
			}
		})
	}
}
