package foreign

import (
	"archive/zip"
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/format/dcp"
	"github.com/ckptstore/ckptstore/internal/format/safetensors"
	"github.com/ckptstore/ckptstore/tensor"
)

// fileFormat is the metadata that tells other readers of safetensors which framework's names
// these are.
var fileFormat = map[string]string{"format": "pt"}

// dcp lays out a file for each rank, with values first, and then the metadata.
func (x *exporter) dcp() ([]outFile, error) {
	m := dcp.Metadata{Version: "1.0.0"}
	byRank := map[int]*outFile{}
	ends := map[int]int64{}
	add := func(rank int, size int64, p part) dcp.Location {
		f := byRank[rank]
		if f == nil {
			f = &outFile{name: dcp.DataFile(rank, 0)}
			byRank[rank] = f
		}
		f.parts = append(f.parts, p)
		where := dcp.Location{File: f.name, Offset: ends[rank], Length: size}
		ends[rank] += size
		return where
	}
	seen := map[string]bool{}
	for _, v := range x.m.Layout.Values {
		if seen[v.FQN] {
			x.out.LeftOut = append(x.out.LeftOut, LeftOut{v.FQN, v.Rank, v.Bytes, "the format holds one value of a name, that of the lowest rank"})
			continue
		}
		seen[v.FQN] = true
		archive, err := x.archive(v)
		if err != nil {
			return nil, err
		}
		size := int64(len(archive)) // all that is kept of it
		where := add(v.Rank, size, part{value: &v, bytes: size})
		m.Values = append(m.Values, dcp.Value{FQN: v.FQN, Path: elementsOf(v.FQN, v.Path), Where: where})
		x.out.Values++
		x.out.Bytes += v.Bytes
	}
	for _, t := range x.m.Layout.Tensors {
		out := dcp.Tensor{FQN: t.FQN, Path: elementsOf(t.FQN, t.Path), DType: t.DType, Shape: t.Shape}
		for _, c := range t.Chunks {
			frame, err := dcp.TensorArchive(t.DType, c.Box.Sizes)
			if err != nil {
				return nil, fmt.Errorf("tensor %q: %w", t.FQN, err)
			}
			shard := tensor.Shard{FQN: t.FQN, DType: t.DType, Global: t.Shape, Box: c.Box}
			where := add(c.Rank, frame.Size, part{
				before: frame.Prefix, after: frame.Suffix, bytes: shard.Bytes(), want: checkpoint.Want{Shard: shard},
				reads: []checkpoint.Read{{FQN: t.FQN, Rank: c.Rank, Chunk: c.Box, Region: c.Box}},
			})
			out.Chunks = append(out.Chunks, dcp.Chunk{Box: c.Box, Where: where})
			x.out.Bytes += shard.Bytes()
		}
		m.Tensors = append(m.Tensors, out)
		x.out.Tensors++
	}
	var list []outFile
	for _, f := range byRank {
		list = append(list, *f)
	}
	slices.SortFunc(list, func(a, b outFile) int { return cmp.Compare(a.name, b.name) })
	text, err := dcp.WriteMetadata(m)
	return append(list, outFile{name: dcp.MetadataFile, parts: []part{{before: text}}}), err
}

// archive returns a value in the form of torch.save. An archive that PyTorch has saved is
// kept unchanged; other bytes become a Python object of type bytes.
func (x *exporter) archive(v checkpoint.Value) ([]byte, error) {
	data := make([]byte, v.Bytes)
	want := checkpoint.Want{Value: true, Shard: tensor.Shard{FQN: v.FQN}, Rank: v.Rank}
	if _, err := x.from.ReadData(x.ctx, []checkpoint.Want{want}, []checkpoint.Read{{FQN: v.FQN, Rank: v.Rank}}, buffer(data)); err != nil {
		return nil, err
	}
	if z, err := zip.NewReader(bytes.NewReader(data), v.Bytes); err == nil {
		if slices.ContainsFunc(z.File, func(f *zip.File) bool { return strings.HasSuffix(f.Name, "/data.pkl") }) {
			return data, nil
		}
	}
	archive, err := dcp.ValueArchive(data)
	if err != nil {
		return nil, fmt.Errorf("value %q: %w", v.FQN, err)
	}
	return archive, nil
}

// safetensors lays out whole tensors in one file, or in several with an index.
func (x *exporter) safetensors() ([]outFile, error) {
	unfit := &UnfitError{Format: x.o.Format}
	for _, t := range x.m.Layout.Tensors {
		if _, ok := safetensors.TypeOf(t.DType); !ok {
			unfit.Tensors = append(unfit.Tensors, fmt.Sprintf("%q (%v)", t.FQN, t.DType))
		}
		covered := int64(0)
		for _, c := range t.Chunks {
			covered += c.Box.Volume()
		}
		if covered != t.Shape.Volume() {
			return nil, fmt.Errorf("tensor %q of shape %v: the checkpoint holds %d of its %d elements, the format only whole tensors: export with --format dcp",
				t.FQN, t.Shape, covered, t.Shape.Volume())
		}
	}
	if len(unfit.Tensors) > 0 {
		return nil, unfit
	}
	for _, v := range x.m.Layout.Values {
		x.out.LeftOut = append(x.out.LeftOut, LeftOut{v.FQN, v.Rank, v.Bytes, "the format holds tensors only"})
	}
	groups := x.shards()
	index := safetensors.Index{Files: map[string]string{}}
	var list []outFile
	for i, group := range groups {
		name := safetensors.SingleFile
		if x.o.Format == data.HuggingFace {
			name = safetensors.ShardFile(i+1, len(groups))
		}
		f, err := wholeTensors(name, group)
		if err != nil {
			return nil, err
		}
		list = append(list, f)
		for _, t := range group {
			size := t.Shape.Volume() * int64(t.DType.Size())
			index.Files[t.FQN] = name
			index.TotalSize += size
			x.out.Tensors++
			x.out.Bytes += size
		}
	}
	if x.o.Format == data.HuggingFace {
		text, err := safetensors.EncodeIndex(index)
		if err != nil {
			return nil, err
		}
		list = append(list, outFile{name: safetensors.IndexFile, parts: []part{{before: text}}})
	}
	return list, nil
}

// shards cuts the tensors, sorted by name, into groups of at most MaxShard bytes. A larger
// tensor is a group of its own.
func (x *exporter) shards() [][]checkpoint.Tensor {
	limit := x.o.MaxShard
	if limit == 0 {
		limit = DefaultMaxShard
	}
	groups, size := [][]checkpoint.Tensor{nil}, int64(0)
	for _, t := range x.m.Layout.Tensors {
		bytes := t.Shape.Volume() * int64(t.DType.Size())
		last := len(groups) - 1
		if x.o.Format == data.HuggingFace && len(groups[last]) > 0 && bytes > limit-size {
			groups, size = append(groups, nil), 0
			last++
		}
		groups[last] = append(groups[last], t)
		size += bytes
	}
	return groups
}

// wholeTensors returns a safetensors file of gathered tensors, those with the largest
// elements first, so that each is aligned.
func wholeTensors(name string, group []checkpoint.Tensor) (outFile, error) {
	group = slices.Clone(group)
	slices.SortStableFunc(group, func(a, b checkpoint.Tensor) int { return cmp.Compare(b.DType.Size(), a.DType.Size()) })
	f := outFile{name: name, parts: make([]part, 1, len(group)+1)}
	var tensors []safetensors.Tensor
	at := int64(0)
	for _, t := range group {
		shard := tensor.Shard{FQN: t.FQN, DType: t.DType, Global: t.Shape, Box: t.Shape.Full()}
		if err := shard.Validate(); err != nil {
			return f, err
		}
		kind, _ := safetensors.TypeOf(t.DType)
		tensors = append(tensors, safetensors.Tensor{Name: t.FQN, Type: kind, Shape: t.Shape, Start: at, End: at + shard.Bytes()})
		at += shard.Bytes()
		p := part{want: checkpoint.Want{Shard: shard}, bytes: shard.Bytes()}
		for _, c := range t.Chunks {
			if !c.Box.Empty() {
				p.reads = append(p.reads, checkpoint.Read{FQN: t.FQN, Rank: c.Rank, Chunk: c.Box, Region: c.Box})
			}
		}
		f.parts = append(f.parts, p)
	}
	var err error
	if f.parts[0].before, err = safetensors.Encode(fileFormat, tensors); err != nil {
		return f, fmt.Errorf("%s: %w", name, err)
	}
	return f, nil
}
