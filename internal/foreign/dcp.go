package foreign

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"regexp"
	"runtime"
	"slices"
	"strconv"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/format/dcp"
	"github.com/ckptstore/ckptstore/tensor"
	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sync/errgroup"
)

// maxMetadata bounds a .metadata file, in bytes: a thousand ranks with a thousand tensors
// each need 160 MB.
const maxMetadata = 2 << 30

// A tensor that was expanded before it was saved has more bytes than its storage. Beyond both
// limits a small file would fill memory and disks.
const (
	maxExpanded  = 1 << 30 // bytes of a chunk
	maxExpansion = 1 << 10 // times the bytes of its storage
)

// stored is one archive of a DCP directory.
type stored struct {
	where   dcp.Location
	rank    int
	place   data.Place
	altered bool // as in [dcp.Payload]
}

// dcp reads the metadata of a DCP directory, and the directory of each archive in it.
func (b *builder) dcp(ctx context.Context) error {
	name := path.Join(b.dir, dcp.MetadataFile)
	text, err := readSmall(b.fs, name, maxMetadata)
	if err != nil {
		return err
	}
	m, err := dcp.ReadMetadata(text)
	if err != nil {
		return named(name, err)
	}
	all, err := b.stored(ctx, name, m)
	if err != nil {
		return err
	}
	// Only the archive of a tensor records that its elements differ from those of its
	// storage. Such a tensor becomes a value, like tensors of unknown dtypes.
	altered := map[string]bool{}
	for _, s := range all {
		if s.altered {
			altered[s.place.Item.Shard.FQN] = true
		}
	}
	if len(altered) > 0 {
		if m, err = m.Opaque(altered); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		b.parts, b.layout, b.tensors = map[int]*data.Part{}, checkpoint.Layout{}, map[string]int{}
		if all, err = b.stored(ctx, name, m); err != nil {
			return err
		}
	}
	for _, s := range all {
		p := b.parts[s.rank]
		p.Chunks = append(p.Chunks, s.place)
	}
	return nil
}

// stored returns the entries of the metadata, in the order of the files, each found in its
// archive.
func (b *builder) stored(ctx context.Context, name string, m dcp.Metadata) ([]*stored, error) {
	all, err := b.contents(m)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	// In the order of the files, each file is opened once and read forwards.
	slices.SortStableFunc(all, func(a, c *stored) int {
		return cmp.Or(cmp.Compare(a.where.File, c.where.File), cmp.Compare(a.where.Offset, c.where.Offset))
	})
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(runtime.GOMAXPROCS(0) + 2)
	for rest := all; len(rest) > 0; {
		n := slices.IndexFunc(rest, func(s *stored) bool { return s.where.File != rest[0].where.File })
		if n < 0 {
			n = len(rest)
		}
		of := rest[:n]
		rest = rest[n:]
		p, at, file, err := b.file(of[0].rank, of[0].where.File)
		if err != nil {
			return nil, errors.Join(lost(err, path.Join(b.dir, of[0].where.File), func(yield func(string) bool) {
				for _, s := range of {
					if !yield(s.place.Item.Shard.FQN) {
						return
					}
				}
			}), g.Wait())
		}
		size := p.Files[at].Size
		for _, s := range of {
			s.place.File = at
		}
		g.Go(func() error { return errors.Join(archives(ctx, file, size, of), file.Close()) })
	}
	return all, g.Wait()
}

// contents makes the layout, and a list of everything stored.
func (b *builder) contents(m dcp.Metadata) ([]*stored, error) {
	var all []*stored
	add := func(it checkpoint.Item, where dcp.Location) *stored {
		s := &stored{where: where, place: data.Place{Item: it}}
		all = append(all, s)
		return s
	}
	type part struct{ tensor, chunk int }
	parts := map[*stored]part{}
	values := map[*stored]int{}
	for i, t := range m.Tensors {
		path, err := pathOf(t.FQN, t.Path)
		if err != nil {
			return nil, err
		}
		out := checkpoint.Tensor{FQN: t.FQN, Path: path, DType: t.DType, Shape: t.Shape}
		if len(t.Chunks) == 0 {
			return nil, fmt.Errorf("tensor %q has no chunk", t.FQN)
		}
		for k, c := range t.Chunks {
			shard := tensor.Shard{FQN: t.FQN, DType: t.DType, Global: t.Shape, Box: c.Box}
			if err := shard.Validate(); err != nil {
				return nil, err
			}
			parts[add(checkpoint.Item{Shard: shard, Bytes: shard.Bytes()}, c.Where)] = part{i, k}
			out.Chunks = append(out.Chunks, checkpoint.Chunk{Box: c.Box})
		}
		if err := b.tensor(out); err != nil {
			return nil, err
		}
	}
	for i, v := range m.Values {
		path, err := pathOf(v.FQN, v.Path)
		if err != nil {
			return nil, err
		}
		it := checkpoint.Item{Value: true, Shard: tensor.Shard{FQN: v.FQN}, Bytes: v.Where.Length}
		values[add(it, v.Where)] = i
		b.layout.Values = append(b.layout.Values, checkpoint.Value{FQN: v.FQN, Path: path, Bytes: it.Bytes})
	}
	ranks := ranksOf(all)
	for _, s := range all {
		s.rank = ranks[s.where.File]
		if p, ok := parts[s]; ok {
			b.layout.Tensors[p.tensor].Chunks[p.chunk].Rank = s.rank
		} else {
			b.layout.Values[values[s]].Rank = s.rank
		}
	}
	for _, t := range b.layout.Tensors {
		slices.SortStableFunc(t.Chunks, func(a, c checkpoint.Chunk) int { return a.Rank - c.Rank })
	}
	return all, nil
}

// pathOf returns an entry of planner_data as a path; nil where it adds nothing to the name.
func pathOf(fqn string, elements []any) (checkpoint.Path, error) {
	var p checkpoint.Path
	for _, e := range elements {
		switch e := e.(type) {
		case string:
			p = append(p, checkpoint.PathKey(e))
		case int:
			p = append(p, checkpoint.PathIndex(e))
		default:
			return nil, fmt.Errorf("%q: planner_data has an element %v of type %T", fqn, e, e)
		}
	}
	if err := p.Validate(fqn); err != nil {
		return nil, fmt.Errorf("planner_data: %w", err)
	}
	if p.Plain(fqn) {
		return nil, nil
	}
	return p, nil
}

// elementsOf returns the entry of planner_data for a path. PyTorch converts every key to a
// string.
func elementsOf(fqn string, p checkpoint.Path) []any {
	if p.Plain(fqn) {
		return []any{fqn}
	}
	out := make([]any, len(p))
	for i, e := range p {
		if out[i] = e.Key; e.List {
			out[i] = e.Index
		}
	}
	return out
}

var dataFileName = regexp.MustCompile(`^__(0|[1-9][0-9]{0,8})_(?:0|[1-9][0-9]*)\.distcp$`)

// ranksOf returns the rank of each file.
func ranksOf(all []*stored) map[string]int {
	ranks := map[string]int{}
	var files []string
	known := true
	for _, s := range all {
		if _, seen := ranks[s.where.File]; seen {
			continue
		}
		files = append(files, s.where.File)
		ranks[s.where.File] = 0
		parts := dataFileName.FindStringSubmatch(path.Base(s.where.File))
		if parts == nil {
			known = false
			continue
		}
		rank, err := strconv.Atoi(parts[1])
		if known = known && err == nil; known {
			ranks[s.where.File] = rank
		}
	}
	if !known {
		slices.Sort(files)
		for rank, file := range files {
			ranks[file] = rank
		}
	}
	return ranks
}

// archives finds the payload of each archive of one file.
func archives(ctx context.Context, file vfs.File, size int64, of []*stored) error {
	for _, s := range of {
		if err := ctx.Err(); err != nil {
			return err
		}
		bad := func(format string, args ...any) error {
			return &dcp.FormatError{File: s.where.File, Offset: s.where.Offset, Problem: fmt.Sprintf("%q: ", s.place.Item.Shard.FQN) + fmt.Sprintf(format, args...)}
		}
		if s.where.Offset > size || s.where.Length > size-s.where.Offset {
			return bad("its %d bytes do not lie in the %d bytes of the file, which was cut off", s.where.Length, size)
		}
		e := &s.place
		if e.Item.Value {
			e.Offset = s.where.Offset
			continue
		}
		p, err := dcp.ReadArchive(file, s.where)
		if err != nil {
			return fmt.Errorf("tensor %q: %w", e.Item.Shard.FQN, err)
		}
		if s.altered = p.Altered; s.altered {
			continue
		}
		shard := e.Item.Shard
		switch {
		case shard.Bytes() > max(maxExpanded, p.Length*maxExpansion):
			return bad("its %d bytes are stored in %d, each element many times; save it contiguous", shard.Bytes(), p.Length)
		case p.DType != shard.DType:
			return bad("the metadata has %v, the archive %v", shard.DType, p.DType)
		case !slices.Equal(p.Sizes, shard.Box.Sizes):
			return bad("the metadata has sizes %v, the archive %v", shard.Box.Sizes, p.Sizes)
		case p.BigEndian && shard.DType.Size() > 1:
			return bad("it was written on a big-endian machine, which is not supported; save it again on a little-endian one")
		}
		e.Offset = p.Offset + p.First*int64(shard.DType.Size())
		e.Record = &checkpoint.Record{Offset: p.Offset, Size: p.Length, CRC: p.CRC32}
		if !rowMajor(p.Sizes, p.Strides) {
			e.Strides = p.Strides
		}
		if shard.Box.Empty() {
			e.Offset = p.Offset
		}
	}
	return nil
}

// named adds the path of a file to an error about its bytes.
func named(file string, err error) error {
	if bad := (*dcp.FormatError)(nil); errors.As(err, &bad) && bad.File == "" {
		return &dcp.FormatError{File: file, Offset: bad.Offset, Problem: bad.Problem}
	}
	return fmt.Errorf("%s: %w", file, err)
}

// rowMajor reports whether the elements of a box with these sizes and strides are contiguous
// and in order.
func rowMajor(sizes, strides []int64) bool {
	if slices.Contains(sizes, 0) {
		return true
	}
	next := int64(1)
	for d := len(sizes) - 1; d >= 0; d-- {
		if sizes[d] != 1 && strides[d] != next {
			return false
		}
		next *= sizes[d]
	}
	return true
}
