//go:build testbed || outlive

package testbed_test

import (
	"io"
	"testing"

	"github.com/ckptstore/ckptstore/internal/testbed"
)

// BenchmarkTCP sends 1 MiB from one node to another through the switch.
func BenchmarkTCP(b *testing.B) {
	ctx, bed := newBed(b, testbed.Options{})
	nodes := start(ctx, b, bed, "a", "b")
	from, to := connect(ctx, b, nodes[0], nodes[1])
	buf := make([]byte, 1<<20)
	b.SetBytes(int64(len(buf)))
	go func() { _, _ = io.Copy(io.Discard, to) }()
	for b.Loop() {
		if _, err := from.Write(buf); err != nil {
			b.Fatal(err)
		}
	}
}
