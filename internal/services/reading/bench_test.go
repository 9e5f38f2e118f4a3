package reading

import (
	"fmt"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/session/shm"
	"github.com/ckptstore/ckptstore/tensor"
)

// BenchmarkRead reads 512 MiB of 16 tensors, verified, into shared memory that
// was used before.
func BenchmarkRead(b *testing.B) {
	const tensors, rows = 16, 32 << 10
	sizes := make([]int, tensors)
	var req Request
	req.Ref = "a"
	for i := range sizes {
		sizes[i] = rows
		shape := []int64{rows, 1024}
		req.Items = append(req.Items, client.Item{FQN: fmt.Sprintf("t%d", i), DType: tensor.Uint8, Shape: shape, Offsets: []int64{0, 0}, Sizes: shape})
	}
	s := serve(b, safetensors(b, sizes...))
	s.server.memory.files.Shared, _ = shm.Dir()
	for range 2 { // which brings the files into the page cache
		r, err := s.server.onRead(b.Context(), req)
		if err == nil {
			_, err = s.server.onDone(b.Context(), Done{r.Read})
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	b.SetBytes(tensors * rows * 1024)
	for b.Loop() {
		r, err := s.server.onRead(b.Context(), req)
		if err == nil {
			_, err = s.server.onDone(b.Context(), Done{r.Read})
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}
