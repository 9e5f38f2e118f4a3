package planner_test

import (
	"fmt"
	"testing"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/tensor"
)

// BenchmarkCoordinator is the path of the coordinator from encoded local
// plans to an encoded layout: every rank has some rows of every tensor.
func BenchmarkCoordinator(b *testing.B) {
	for _, size := range []struct{ ranks, tensors int }{{64, 100}, {512, 500}, {1024, 1000}} {
		b.Run(fmt.Sprintf("%dx%d", size.ranks, size.tensors), func(b *testing.B) {
			data := make([][]byte, size.ranks)
			for rank := range data {
				l := checkpoint.Local{Rank: rank}
				for i := range size.tensors {
					shape := tensor.Shape{int64(8 * size.ranks), 1024}
					l.Items = append(l.Items, item(shard(fmt.Sprintf("model.layers.%d.weight", i), shape, box([]int64{int64(8 * rank), 0}, []int64{8, 1024}))))
				}
				data[rank] = checkpoint.EncodeLocal(l)
			}
			b.ReportAllocs()
			for b.Loop() {
				locals, err := checkpoint.DecodeLocals(data)
				if err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(float64(len(checkpoint.EncodeLayout(global(b, locals)))), "layout-bytes")
			}
		})
	}
}
