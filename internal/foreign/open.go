// Package foreign reads the checkpoints of other programs in place, without running any code
// of theirs, and writes them.
//
//	part     the contents of the files of one rank, and the place of each chunk
//	survey   the parts of a checkpoint, found from headers and metadata alone
//	export   a checkpoint of any reader, written as another program would
//	claim    the directory next to an export's, in which it is made
//
//	FILE                                       one value with any contents: [File]
//	DIR/.metadata  DIR/__R_N.distcp            PyTorch Distributed Checkpoint
//	NAME.safetensors                           one file
//	DIR/model.safetensors.index.json           Hugging Face
//	DIR/model-00001-of-00002.safetensors
//
// Packages dcp and safetensors define the bytes of these formats; package data defines
// checkpoints and reads their chunks.
package foreign

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/format/dcp"
	"github.com/ckptstore/ckptstore/internal/format/safetensors"
	"github.com/ckptstore/ckptstore/tensor"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// Open opens a DCP directory, a safetensors file, or a directory with a Hugging Face index or
// a single safetensors file. It reads no tensor: of a DCP directory it reads .metadata and
// the directory of each archive, of safetensors files the headers. The path must be absolute
// and without symbolic links, since adopted files are found by it later. Damage gives a
// [*data.CorruptError] or a [*dcp.FormatError]; a path without a checkpoint gives an error
// with [fs.ErrNotExist] in its chain.
//
// A chunk is of rank R if it lies in a file __R_N.distcp, or in the (R+1)-th safetensors file
// by name. For DCP files with other names, R counts all files by name. A value is its
// torch.save archive, which is never decoded.
func Open(ctx context.Context, files vfs.FS, name string) (*data.Foreign, error) {
	f, err := open(ctx, files, name)
	if err != nil {
		return nil, fmt.Errorf("open checkpoint %s: %w", name, err)
	}
	return f, nil
}

func open(ctx context.Context, files vfs.FS, name string) (*data.Foreign, error) {
	b, format, err := survey(ctx, files, name)
	if err != nil {
		return nil, err
	}
	var parts []data.Part
	for _, rank := range slices.Sorted(maps.Keys(b.parts)) {
		parts = append(parts, *b.parts[rank])
	}
	if len(parts) == 0 { // an empty checkpoint is rank 0's
		parts = append(parts, data.Part{Rank: 0})
	}
	return data.NewForeign(files, name, format, b.layout, parts)
}

// File opens one file of any kind, as a checkpoint with one value: its bytes, under its own
// name.
func File(ctx context.Context, files vfs.FS, name string) (*data.Foreign, error) {
	if err := errors.Join(ctx.Err(), checkpoint.ValidatePath(name)); err != nil {
		return nil, fmt.Errorf("open file %s: %w", name, err)
	}
	b := &builder{fs: files, dir: path.Dir(name), parts: map[int]*data.Part{}}
	p, n, file, err := b.file(0, path.Base(name))
	if err != nil {
		return nil, fmt.Errorf("open file %s: %w", name, err)
	}
	if err := file.Close(); err != nil {
		return nil, fmt.Errorf("open file %s: %w", name, err)
	}
	value := checkpoint.Item{Value: true, Shard: tensor.Shard{FQN: path.Base(name)}, Bytes: p.Files[n].Size}
	p.Chunks = []data.Place{{Item: value, File: n}}
	layout := checkpoint.Layout{Values: []checkpoint.Value{{FQN: value.Shard.FQN, Bytes: value.Bytes}}}
	return data.NewForeign(files, name, data.AnyFile, layout, []data.Part{*p})
}

// survey identifies the checkpoint at a path, and its parts.
func survey(ctx context.Context, files vfs.FS, name string) (*builder, data.Format, error) {
	if err := errors.Join(ctx.Err(), checkpoint.ValidatePath(name)); err != nil {
		return nil, "", err
	}
	info, err := files.Stat(name)
	if err != nil {
		return nil, "", err
	}
	b := &builder{fs: files, dir: name, parts: map[int]*data.Part{}, tensors: map[string]int{}}
	if info.IsDir() {
		format, err := b.directory(ctx)
		return b, format, err
	}
	b.dir = path.Dir(name)
	return b, data.SafeTensors, b.safetensors(ctx, []string{path.Base(name)}, nil)
}

// builder collects the contents of a directory's files.
type builder struct {
	fs      vfs.FS
	dir     string
	parts   map[int]*data.Part // by rank
	layout  checkpoint.Layout
	tensors map[string]int // in the layout, by FQN
}

// directory identifies the format of a directory.
func (b *builder) directory(ctx context.Context) (data.Format, error) {
	names, err := b.fs.List(b.dir)
	if err != nil {
		return "", err
	}
	single := slices.DeleteFunc(slices.Clone(names), func(n string) bool { return !strings.HasSuffix(n, safetensors.Suffix) })
	switch {
	case slices.Contains(names, dcp.MetadataFile):
		return data.DCP, b.dcp(ctx)
	case slices.Contains(names, checkpoint.ReceiptFile):
		return "", fmt.Errorf("it is the checkpoint of a store; name it by RUN@ID with --store, not by its path")
	case slices.Contains(names, safetensors.IndexFile):
		return data.HuggingFace, b.huggingFace(ctx)
	case len(single) == 1:
		return data.SafeTensors, b.safetensors(ctx, single, nil)
	case len(single) > 1:
		return "", fmt.Errorf("it holds %d %s files and no %s: name one of the files", len(single), safetensors.Suffix, safetensors.IndexFile)
	case slices.ContainsFunc(names, func(n string) bool { return strings.HasSuffix(n, ".distcp") }):
		return "", fmt.Errorf("%w: it holds .distcp files and no %s, so the save that wrote them did not end", fs.ErrNotExist, dcp.MetadataFile)
	}
	return "", fmt.Errorf("%w: it holds neither %s nor %s nor a %s file", fs.ErrNotExist, dcp.MetadataFile, safetensors.IndexFile, safetensors.Suffix)
}

// tensor adds a tensor to the layout, without chunks.
func (b *builder) tensor(t checkpoint.Tensor) error {
	if _, twice := b.tensors[t.FQN]; twice {
		return fmt.Errorf("tensor %q occurs twice", t.FQN)
	}
	b.tensors[t.FQN] = len(b.layout.Tensors)
	b.layout.Tensors = append(b.layout.Tensors, t)
	return nil
}

// huggingFace reads a directory with an index, which must place every tensor, and no other.
func (b *builder) huggingFace(ctx context.Context) error {
	name := path.Join(b.dir, safetensors.IndexFile)
	text, err := readSmall(b.fs, name, safetensors.MaxIndex)
	if err != nil {
		return err
	}
	x, err := safetensors.ParseIndex(text)
	if err != nil {
		return &data.CorruptError{File: name, Block: -1, Problem: err.Error()}
	}
	if err := b.safetensors(ctx, x.Shards(), x.Files); err != nil {
		return err
	}
	for fqn, file := range x.Files {
		if _, ok := b.tensors[fqn]; !ok {
			return &data.CorruptError{File: name, Block: -1, Problem: fmt.Sprintf("it places %q in %s, which does not hold it", fqn, file)}
		}
	}
	return nil
}

// safetensors reads the headers of files, in the order of ranks. where holds the file of each
// tensor; nil if there is no index.
func (b *builder) safetensors(ctx context.Context, names []string, where map[string]string) error {
	for rank, name := range names {
		if err := ctx.Err(); err != nil {
			return err
		}
		p, n, file, err := b.file(rank, name)
		if err != nil && where != nil {
			return lost(err, path.Join(b.dir, name), func(yield func(string) bool) {
				for _, fqn := range slices.Sorted(maps.Keys(where)) {
					if where[fqn] == name && !yield(fqn) {
						return
					}
				}
			})
		}
		if err != nil {
			return err
		}
		h, err := safetensors.Parse(file, p.Files[n].Size)
		if err = errors.Join(err, file.Close()); err != nil {
			return &data.CorruptError{File: p.Files[n].Path, Block: -1, Problem: err.Error()}
		}
		for _, t := range h.Tensors {
			if where != nil && where[t.Name] != name {
				return &data.CorruptError{File: p.Files[n].Path, FQN: t.Name, Block: -1, Problem: fmt.Sprintf("%s places it in %q", safetensors.IndexFile, where[t.Name])}
			}
			dtype, ok := t.Type.DType()
			if !ok {
				return fmt.Errorf("%s: tensor %q has the unknown dtype %q", p.Files[n].Path, t.Name, t.Type)
			}
			shard := tensor.Shard{FQN: t.Name, DType: dtype, Global: t.Shape, Box: t.Shape.Full()}
			p.Chunks = append(p.Chunks, data.Place{Item: checkpoint.Item{Shard: shard, Bytes: t.End - t.Start}, File: n, Offset: h.DataStart + t.Start})
			if err := b.tensor(checkpoint.Tensor{FQN: t.Name, DType: dtype, Shape: t.Shape, Chunks: []checkpoint.Chunk{{Box: shard.Box, Rank: rank}}}); err != nil {
				return err
			}
		}
	}
	return nil
}
