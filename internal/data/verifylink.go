package data

import (
	"fmt"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/format/safetensors"
	"github.com/ckptstore/ckptstore/internal/object"
)

// linkHeader checks that a file that was linked in says of the chunks that are
// reused what the index says. What else it holds is of another checkpoint.
func (v *verifier) linkHeader(x *checkpoint.Index, n int, file object.Object, size int64) {
	name := x.Files[n].Name
	h, err := safetensors.Parse(file, size)
	if err != nil {
		if size == x.Files[n].Size {
			v.find(Corrupt, name, "%v", err)
		}
		return // cut off, which is a finding already
	}
	at := make(map[string]safetensors.Tensor, len(h.Tensors))
	for _, t := range h.Tensors {
		at[t.Name] = t
	}
	for i := range x.Entries {
		e := &x.Entries[i]
		if e.File != n {
			continue
		}
		if t, ok := at[e.Key]; !ok || h.DataStart+t.Start != e.Offset || t.End-t.Start != e.Item.Bytes {
			v.add(Finding{
				Kind: Corrupt, File: name, FQN: e.Item.Shard.FQN, Chunk: e.BoxString(), Block: -1, Offset: e.Offset,
				Problem: fmt.Sprintf("the header does not say that the chunk %q lies here", e.Key),
			})
		}
	}
}
