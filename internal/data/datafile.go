package data

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data/reuse"
	"github.com/ckptstore/ckptstore/internal/format/safetensors"
	"github.com/ckptstore/ckptstore/tensor"
)

// fileFormat is the metadata that tells other readers of safetensors which framework's names
// these are.
var fileFormat = map[string]string{"format": "pt"}

// layOut decides where each item goes in a rank's data file, and makes the file's header. It
// is a pure function of its arguments. The entries are in the order of the items. order is
// the order in the file, without the items that u places elsewhere. The writer fills in
// digests and checksums later.
func layOut(rank int, items []checkpoint.Item, u reuse.Plan) (x checkpoint.Index, order []int, header []byte, err error) {
	x = checkpoint.Index{Rank: rank, Entries: make([]checkpoint.Entry, len(items))}
	seen := make(map[key]struct{}, len(items))
	for i, it := range items {
		if err := it.Validate(); err != nil {
			return x, nil, nil, err
		}
		k := itemKey(rank, it)
		if _, twice := seen[k]; twice {
			return x, nil, nil, fmt.Errorf("%q %s: duplicate item", it.Shard.FQN, k.box)
		}
		seen[k] = struct{}{}
		x.Entries[i].Item = it
		if _, stored := u.Of[i]; !stored {
			order = append(order, i)
		}
	}
	for n, key := range keys(items, order) {
		x.Entries[order[n]].Key = key
	}
	// Elements of falling size, each a multiple of the next, keep every chunk aligned without
	// gaps.
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Compare(items[b].Shard.DType.Size(), items[a].Shard.DType.Size())
	})
	tensors := make([]safetensors.Tensor, len(order))
	at := int64(0)
	for n, i := range order {
		it := items[i]
		tensors[n] = safetensors.Tensor{Name: x.Entries[i].Key, Type: safetensors.Raw, Shape: tensor.Shape{it.Bytes}, Start: at, End: at + it.Bytes}
		if name, ok := safetensors.TypeOf(it.Shard.DType); ok && !it.Value {
			tensors[n].Type, tensors[n].Shape = name, it.Shard.Box.Sizes
		}
		x.Entries[i].Offset = at
		if at += it.Bytes; at < 0 || at > 1<<62 {
			return x, nil, nil, fmt.Errorf("the items need more than 2^62 bytes")
		}
	}
	if header, err = safetensors.Encode(fileFormat, tensors); err != nil {
		return x, nil, nil, err
	}
	for _, i := range order {
		x.Entries[i].Offset += int64(len(header))
	}
	x.Files = []checkpoint.File{{Name: checkpoint.DataFile(rank), Size: int64(len(header)) + at}}
	placeReused(&x, u)
	return x, order, header, nil
}

// keys returns the names of some items in the header of a data file. Tensors and values may
// have any name, so a name can equal the key of a part of another tensor, or the reserved
// key. A number then makes it unique.
func keys(items []checkpoint.Item, which []int) []string {
	out := make([]string, len(which))
	taken := map[string]struct{}{safetensors.MetadataKey: {}}
	next := map[string]int{}
	for at, i := range which {
		it := items[i]
		base := strings.ToValidUTF8(it.Shard.FQN, "\uFFFD")
		if box := it.Shard.Box; !it.Value && !box.Equal(it.Shard.Global.Full()) {
			base += "@"
			for d, off := range box.Offsets {
				if d > 0 {
					base += ","
				}
				base += strconv.FormatInt(off, 10)
			}
		}
		key := base
		for n := max(next[base], 2); ; n++ {
			if _, used := taken[key]; !used {
				next[base] = n
				break
			}
			key = base + "#" + strconv.Itoa(n)
		}
		taken[key] = struct{}{}
		out[at] = key
	}
	return out
}

// placeReused fills in the entries of items that need no writing. For items in the rank's own
// file, it leaves the digest to the writer.
func placeReused(x *checkpoint.Index, u reuse.Plan) {
	for _, f := range u.Files {
		x.Files = append(x.Files, checkpoint.File{Name: f.Name, Size: f.Size, From: f.In})
	}
	for i, s := range u.Of {
		e := &x.Entries[i]
		if s.File < 0 {
			e.Offset, e.Key = x.Entries[s.Tied].Offset, x.Entries[s.Tied].Key
			continue
		}
		e.File, e.Offset, e.Key = 1+s.File, s.Entry.Offset, s.Entry.Key
		e.Digest, e.Sums = s.Entry.Digest, s.Entry.Sums
	}
}

// tieReused gives equal items the digest and sums of the item that was written. They must
// match the digest that was taken before the write.
func tieReused(x *checkpoint.Index, u reuse.Plan) error {
	for i, s := range u.Of {
		if s.File >= 0 {
			continue
		}
		e, of := &x.Entries[i], &x.Entries[s.Tied]
		if of.Digest != s.Digest {
			return fmt.Errorf("bytes of %q changed while they were saved", of.Item.Shard.FQN)
		}
		e.Digest, e.Sums = of.Digest, of.Sums
	}
	return nil
}
