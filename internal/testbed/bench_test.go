//go:build testbed || outlive

package testbed_test

import (
	"io"
	"testing"

	"github.com/ckptstore/ckptstore/internal/testbed"
)

// BenchmarkTCP sends 1 MiB from one node to another through the switch, whose adapters segment or do
// not.
func BenchmarkTCP(b *testing.B) {
	for name, o := range map[string]testbed.Options{"segments": {}, "offload": {Offload: true}} {
		b.Run(name, func(b *testing.B) { benchmarkTCP(b, o) })
	}
}

func benchmarkTCP(b *testing.B, o testbed.Options) {
	ctx, bed := newBed(b, o)
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
