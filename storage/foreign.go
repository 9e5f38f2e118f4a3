package storage

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/storage/dcp"
	"github.com/ckptstore/ckptstore/storage/safetensors"
	"github.com/ckptstore/ckptstore/tensor"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// Format is a layout of files that other programs write and read.
type Format string

// The formats.
const (
	DCP         Format = "dcp"         // a directory of PyTorch Distributed Checkpoint
	SafeTensors Format = "safetensors" // one file
	HuggingFace Format = "hf"          // a directory with model.safetensors.index.json
)

// Foreign is a checkpoint that another program wrote, read where it lies. Its
// indexes are made in memory when it is opened, which reads no tensor: of a
// DCP directory its .metadata and the directory of each archive, of
// safetensors files their headers. It is safe for concurrent use.
//
// A chunk is of rank R if it lies in a file __R_N.distcp, or in the (R+1)-th
// safetensors file by name. Of DCP files with other names, R counts all files
// by name. A value is its torch.save archive, and is never looked into.
type Foreign struct {
	fs       vfs.FS
	path     string
	format   Format
	manifest plan.Manifest
	ranks    map[int]*rankIndex
	paths    map[string]plan.Path
}

var _ Reader = (*Foreign)(nil)

// OpenForeign opens a DCP directory, a safetensors file, or a directory with a
// Hugging Face index or a single safetensors file. The path is absolute, and
// of no symbolic link: adopted files are found by it later. Damage gives a
// [*CorruptError] or a [*dcp.FormatError]; a path with nothing to read there,
// an error with [fs.ErrNotExist] in its chain.
func OpenForeign(ctx context.Context, files vfs.FS, name string) (*Foreign, error) {
	f := &Foreign{fs: files, path: name, ranks: map[int]*rankIndex{}, paths: map[string]plan.Path{}}
	err := errors.Join(ctx.Err(), validatePath(name))
	if err == nil {
		err = f.open(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("open checkpoint %s: %w", name, err)
	}
	return f, nil
}

func (f *Foreign) open(ctx context.Context) error {
	info, err := f.fs.Stat(f.path)
	if err != nil {
		return err
	}
	b := &foreignBuilder{fs: f.fs, dir: f.path, indexes: map[int]*index{}, tensors: map[string]int{}}
	if !info.IsDir() {
		f.format, b.dir = SafeTensors, path.Dir(f.path)
		err = b.safetensors(ctx, []string{path.Base(f.path)}, nil)
	} else {
		f.format, err = b.directory(ctx)
	}
	if err != nil {
		return err
	}
	return f.adoptIndexes(b)
}

// adoptIndexes checks what was found as if it came from a file of ours, and
// makes the manifest of it.
func (f *Foreign) adoptIndexes(b *foreignBuilder) error {
	m := &f.manifest
	m.Checkpoint = path.Base(f.path)
	m.Run, m.Trial, m.Name = m.Checkpoint, "main", m.Checkpoint
	m.Layout = b.layout
	slices.SortFunc(m.Layout.Tensors, func(a, c plan.Tensor) int { return strings.Compare(a.FQN, c.FQN) })
	slices.SortFunc(m.Layout.Values, func(a, c plan.Value) int { return strings.Compare(a.FQN, c.FQN) })
	for _, t := range m.Layout.Tensors {
		f.paths[t.FQN] = t.Path
	}
	for _, v := range m.Layout.Values {
		f.paths[v.FQN] = v.Path
	}
	for rank, x := range b.indexes {
		for i := range x.entries {
			e := &x.entries[i]
			if err := errors.Join(validateItem(e.item), e.validatePlace(x.files)); err != nil {
				return err
			}
		}
		r := &rankIndex{want: plan.RankIndex{Rank: rank, Index: plan.Sum(x.encode())}}
		if r.set(x); len(r.at) != len(x.entries) {
			return fmt.Errorf("rank %d has a chunk or value twice", rank)
		}
		f.ranks[rank] = r
		m.Ranks = append(m.Ranks, r.want)
		m.WorldSize = max(m.WorldSize, rank+1)
	}
	slices.SortFunc(m.Ranks, func(a, c plan.RankIndex) int { return a.Rank - c.Rank })
	return nil
}

// Format says what was opened.
func (f *Foreign) Format() Format { return f.format }

// Path is where it lies.
func (f *Foreign) Path() string { return f.path }

// Manifest describes the checkpoint as if it were one of ours: named after its
// directory or file, of no store, with step and attempt 0.
func (f *Foreign) Manifest() plan.Manifest { return f.manifest }

// Items is what a rank holds, in the order in which it lies in the files.
func (f *Foreign) Items(rank int) []plan.Item {
	r := f.ranks[rank]
	if r == nil {
		return nil
	}
	items := make([]plan.Item, len(r.index.entries))
	for i, e := range r.index.entries {
		items[i] = e.item
		items[i].Path = f.paths[e.item.Shard.FQN]
	}
	return items
}

// ReadMetadata implements [Reader].
func (f *Foreign) ReadMetadata(ctx context.Context) (plan.Manifest, error) {
	return f.manifest, ctx.Err()
}

// SetUp implements [Reader].
func (f *Foreign) SetUp(ctx context.Context, m plan.Manifest, _ bool) error {
	if got, want := plan.Sum(plan.EncodeManifest(m)), plan.Sum(plan.EncodeManifest(f.manifest)); got != want {
		return fmt.Errorf("set up the reading of checkpoint %s: the manifest is of another checkpoint", f.path)
	}
	return ctx.Err()
}

// PrepareLocalPlan implements [Reader].
func (f *Foreign) PrepareLocalPlan(ctx context.Context, reads []plan.Read) ([]plan.Read, error) {
	out := slices.Clone(reads)
	slices.SortStableFunc(out, func(a, b plan.Read) int { return a.Rank - b.Rank })
	return out, ctx.Err()
}

// PrepareGlobalPlan implements [Reader].
func (f *Foreign) PrepareGlobalPlan(ctx context.Context, reads [][]plan.Read) ([][]plan.Read, error) {
	out := make([][]plan.Read, len(reads))
	for rank, local := range reads {
		var err error
		if out[rank], err = f.PrepareLocalPlan(ctx, local); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// ReadData implements [Reader]. No checksum of a block is known. Those that the
// files have, of the records of DCP archives, are compared when all of a chunk
// is read, by one call or several: bytes that are damaged may be in dst, but
// the call that reads the last of them gives a [*CorruptError]. A chunk that is
// read in part is compared by [Foreign.Verify] alone.
func (f *Foreign) ReadData(ctx context.Context, wants []plan.Want, reads []plan.Read, dst Destination) (int64, error) {
	n, err := f.chunks().read(ctx, wants, reads, dst)
	if err != nil {
		return n, fmt.Errorf("load of checkpoint %s: %w", f.path, err)
	}
	return n, nil
}

func (f *Foreign) chunks() chunkReader {
	return chunkReader{fs: f.fs, load: f.load, path: func(x *index, n int) string { return x.files[n].Name }}
}

func (f *Foreign) load(rank int) (*rankIndex, error) {
	r := f.ranks[rank]
	if r == nil {
		return nil, fmt.Errorf("no file is of rank %d", rank)
	}
	return r, nil
}

// foreignBuilder collects the indexes of the files of a directory.
type foreignBuilder struct {
	fs      vfs.FS
	dir     string
	indexes map[int]*index
	layout  plan.Layout
	tensors map[string]int // in the layout, by FQN
}

// directory finds out what a directory is.
func (b *foreignBuilder) directory(ctx context.Context) (Format, error) {
	names, err := b.fs.List(b.dir)
	if err != nil {
		return "", err
	}
	single := slices.DeleteFunc(slices.Clone(names), func(n string) bool { return !strings.HasSuffix(n, safetensors.Suffix) })
	switch {
	case slices.Contains(names, dcp.MetadataFile):
		return DCP, b.dcp(ctx)
	case slices.Contains(names, ReceiptFile):
		return "", fmt.Errorf("it is the checkpoint of a store: name it by RUN@ID with --store, not by its path")
	case slices.Contains(names, safetensors.IndexFile):
		return HuggingFace, b.huggingFace(ctx)
	case len(single) == 1:
		return SafeTensors, b.safetensors(ctx, single, nil)
	case len(single) > 1:
		return "", fmt.Errorf("it holds %d %s files and no %s: name one of the files", len(single), safetensors.Suffix, safetensors.IndexFile)
	case slices.ContainsFunc(names, func(n string) bool { return strings.HasSuffix(n, ".distcp") }):
		return "", fmt.Errorf("%w: it holds .distcp files and no %s, so the save that wrote them did not end", fs.ErrNotExist, dcp.MetadataFile)
	}
	return "", fmt.Errorf("%w: it holds neither %s nor %s nor a %s file", fs.ErrNotExist, dcp.MetadataFile, safetensors.IndexFile, safetensors.Suffix)
}

// tensor adds a tensor to the layout, without chunks.
func (b *foreignBuilder) tensor(t plan.Tensor) error {
	if _, twice := b.tensors[t.FQN]; twice {
		return fmt.Errorf("tensor %q stands twice", t.FQN)
	}
	b.tensors[t.FQN] = len(b.layout.Tensors)
	b.layout.Tensors = append(b.layout.Tensors, t)
	return nil
}

// huggingFace reads a directory with an index, which must say of each tensor
// where it lies, and of no other.
func (b *foreignBuilder) huggingFace(ctx context.Context) error {
	name := path.Join(b.dir, safetensors.IndexFile)
	text, err := readSmall(b.fs, name, safetensors.MaxIndex)
	if err != nil {
		return err
	}
	x, err := safetensors.ParseIndex(text)
	if err != nil {
		return &CorruptError{File: name, Block: -1, Problem: err.Error()}
	}
	if err := b.safetensors(ctx, x.Shards(), x.Files); err != nil {
		return err
	}
	for fqn, file := range x.Files {
		if _, ok := b.tensors[fqn]; !ok {
			return &CorruptError{File: name, Block: -1, Problem: fmt.Sprintf("it says that %q is in %s, which does not hold it", fqn, file)}
		}
	}
	return nil
}

// safetensors reads the headers of files, in the order of ranks. where says
// which file holds each tensor; nil: nobody says.
func (b *foreignBuilder) safetensors(ctx context.Context, names []string, where map[string]string) error {
	for rank, name := range names {
		if err := ctx.Err(); err != nil {
			return err
		}
		x, n, file, err := b.file(rank, name)
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
		h, err := safetensors.Parse(file, x.files[n].Size)
		if err = errors.Join(err, file.Close()); err != nil {
			return &CorruptError{File: x.files[n].Name, Block: -1, Problem: err.Error()}
		}
		for _, t := range h.Tensors {
			if where != nil && where[t.Name] != name {
				return &CorruptError{File: x.files[n].Name, FQN: t.Name, Block: -1, Problem: fmt.Sprintf("%s says that it lies in %q", safetensors.IndexFile, where[t.Name])}
			}
			dtype, ok := t.Type.DType()
			if !ok {
				return fmt.Errorf("%s: tensor %q has the unknown dtype %q", x.files[n].Name, t.Name, t.Type)
			}
			shard := tensor.Shard{FQN: t.Name, DType: dtype, Global: t.Shape, Box: t.Shape.Full()}
			x.entries = append(x.entries, entry{item: plan.Item{Shard: shard, Bytes: t.End - t.Start}, file: n, offset: h.DataStart + t.Start})
			if err := b.tensor(plan.Tensor{FQN: t.Name, DType: dtype, Shape: t.Shape, Chunks: []plan.Chunk{{Box: shard.Box, Rank: rank}}}); err != nil {
				return err
			}
		}
	}
	return nil
}
