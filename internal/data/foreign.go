package data

import (
	"context"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/local"
	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sync/errgroup"
)

// Format is a layout of files that other programs write and read.
type Format string

// The formats.
const (
	DCP         Format = "dcp"         // a directory of PyTorch Distributed Checkpoint
	SafeTensors Format = "safetensors" // one file
	HuggingFace Format = "hf"          // a directory with model.safetensors.index.json
	AnyFile     Format = "file"        // one file of any kind
)

// Foreign is a checkpoint that another program wrote, read in place. It is safe for
// concurrent use. Package internal/foreign opens one.
type Foreign struct {
	fs       vfs.FS
	path     string
	format   Format
	manifest checkpoint.Manifest
	ranks    map[int]*rankIndex
	paths    map[string]checkpoint.Path
}

var _ Reader = (*Foreign)(nil)

// Part is the content of a foreign checkpoint's files for one rank.
type Part struct {
	Rank   int
	Files  []PlacedFile
	Chunks []Place // in the order in which they lie in the files
}

// PlacedFile is a file of another program, with its size and time at adoption.
type PlacedFile struct {
	Path     string // absolute and clean
	Size     int64  // in bytes
	Modified int64  // when it was last written, in ns since 1970
}

// Place is the location of a chunk or value.
type Place struct {
	Item    checkpoint.Item
	File    int                // index of the part's files
	Offset  int64              // in the file, in bytes
	Strides []int64            // in elements, of a chunk that is not row-major; else nil
	Record  *checkpoint.Record // nil if the file has no checksum of it
}

// NewForeign returns the checkpoint at an absolute path, with the contents in layout at the
// places in parts. It opens no file, and trusts nothing: a chunk outside its file is an
// error.
func NewForeign(files vfs.FS, name string, format Format, layout checkpoint.Layout, parts []Part) (*Foreign, error) {
	f := &Foreign{fs: files, path: name, format: format, ranks: map[int]*rankIndex{}, paths: map[string]checkpoint.Path{}}
	m := &f.manifest
	m.Checkpoint = path.Base(f.path)
	m.Run, m.Trial, m.Name = m.Checkpoint, "main", m.Checkpoint
	m.Layout = layout
	slices.SortFunc(m.Layout.Tensors, func(a, c checkpoint.Tensor) int { return strings.Compare(a.FQN, c.FQN) })
	slices.SortFunc(m.Layout.Values, func(a, c checkpoint.Value) int { return strings.Compare(a.FQN, c.FQN) })
	for _, t := range m.Layout.Tensors {
		f.paths[t.FQN] = t.Path
	}
	for _, v := range m.Layout.Values {
		f.paths[v.FQN] = v.Path
	}
	for _, p := range parts {
		x, err := p.index()
		if err != nil {
			return nil, err
		}
		r := &rankIndex{want: checkpoint.RankIndex{Rank: p.Rank, Index: checkpoint.Sum(x.Encode())}}
		if r.set(x); len(r.at) != len(x.Entries) || f.ranks[p.Rank] != nil {
			return nil, fmt.Errorf("rank %d has a chunk or value twice", p.Rank)
		}
		f.ranks[p.Rank] = r
		m.Ranks = append(m.Ranks, r.want)
		m.WorldSize = max(m.WorldSize, p.Rank+1)
	}
	slices.SortFunc(m.Ranks, func(a, c checkpoint.RankIndex) int { return a.Rank - c.Rank })
	return f, nil
}

// index returns the index of an adopted rank, checked as if it came from a file.
func (p Part) index() (*checkpoint.Index, error) {
	x := &checkpoint.Index{Rank: p.Rank, Modified: []int64{}}
	for _, f := range p.Files {
		if err := checkpoint.ValidatePath(f.Path); err != nil {
			return nil, err
		}
		x.Files = append(x.Files, checkpoint.File{Name: f.Path, Size: f.Size})
		x.Modified = append(x.Modified, f.Modified)
	}
	for _, c := range p.Chunks {
		e := checkpoint.Entry{Item: c.Item, File: c.File, Offset: c.Offset, Strides: c.Strides, Record: c.Record}
		if err := errors.Join(e.Item.Validate(), e.ValidatePlace(x.Files)); err != nil {
			return nil, err
		}
		x.Entries = append(x.Entries, e)
	}
	return x, nil
}

// Files returns the paths of the files that the checkpoint is read from, in the order of
// ranks.
func (f *Foreign) Files() []string {
	var names []string
	for _, r := range f.manifest.Ranks {
		for _, file := range f.ranks[r.Rank].index.Files {
			names = append(names, file.Name)
		}
	}
	return names
}

// Format returns the format of the checkpoint.
func (f *Foreign) Format() Format { return f.format }

// Path returns the path of the checkpoint.
func (f *Foreign) Path() string { return f.path }

// Manifest describes the checkpoint as if it were in a store's own format: named after its
// directory or file, of no store, with step and attempt 0.
func (f *Foreign) Manifest() checkpoint.Manifest { return f.manifest }

// Items returns a rank's items, in the order in which they lie in the files.
func (f *Foreign) Items(rank int) []checkpoint.Item {
	r := f.ranks[rank]
	if r == nil {
		return nil
	}
	items := make([]checkpoint.Item, len(r.index.Entries))
	for i, e := range r.index.Entries {
		items[i] = e.Item
		items[i].Path = f.paths[e.Item.Shard.FQN]
	}
	return items
}

// ReadMetadata implements [Reader].
func (f *Foreign) ReadMetadata(ctx context.Context) (checkpoint.Manifest, error) {
	return f.manifest, ctx.Err()
}

// SetUp implements [Reader].
func (f *Foreign) SetUp(ctx context.Context, m checkpoint.Manifest, _ bool) error {
	if got, want := checkpoint.Sum(checkpoint.EncodeManifest(m)), checkpoint.Sum(checkpoint.EncodeManifest(f.manifest)); got != want {
		return fmt.Errorf("set up the load of checkpoint %s: the manifest is of another checkpoint", f.path)
	}
	return ctx.Err()
}

// PrepareLocalPlan implements [Reader].
func (f *Foreign) PrepareLocalPlan(ctx context.Context, reads []checkpoint.Read) ([]checkpoint.Read, error) {
	out := slices.Clone(reads)
	slices.SortStableFunc(out, func(a, b checkpoint.Read) int { return a.Rank - b.Rank })
	return out, ctx.Err()
}

// PrepareGlobalPlan implements [Reader].
func (f *Foreign) PrepareGlobalPlan(ctx context.Context, reads [][]checkpoint.Read) ([][]checkpoint.Read, error) {
	return reads, ctx.Err()
}

// ReadData implements [Reader]. No checksum of a block is known. The checksums of records in
// DCP archives are compared once all of a chunk is read, by one call or several. Damaged
// bytes may then be in dst already, but the call that reads the last of them returns a
// [*CorruptError]. Only [Foreign.Verify] compares a chunk that is read in part.
func (f *Foreign) ReadData(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read, dst Destination) (int64, error) {
	n, err := f.chunks().read(ctx, wants, reads, dst)
	if err != nil {
		return n, fmt.Errorf("load of checkpoint %s: %w", f.path, err)
	}
	return n, nil
}

func (f *Foreign) chunks() chunkReader {
	return chunkReader{f.load, foreignFiles{f.fs}, near, readers()}
}

// foreignFiles are files of another program, named by their paths.
type foreignFiles struct{ fs vfs.FS }

func (f foreignFiles) path(x *checkpoint.Index, n int) string { return x.Files[n].Name }

func (f foreignFiles) open(_ context.Context, x *checkpoint.Index, n int) (object.Object, error) {
	return local.Open(f.fs, x.Files[n].Name)
}

func (f *Foreign) load(_ context.Context, rank int) (*rankIndex, error) {
	r := f.ranks[rank]
	if r == nil {
		return nil, fmt.Errorf("rank %d has no file", rank)
	}
	return r, nil
}

// Verify reads every byte and compares it with the checksums left by the program that wrote
// it, those of the records of DCP archives. Safetensors files have none. For data without a
// checksum, Verify only checks that it can be read, and counts the chunks as unknown.
// progress is as in [Root.Verify].
func (f *Foreign) Verify(ctx context.Context, progress func(bytes int64)) (Report, error) {
	v := &verifier{
		files: foreignFiles{f.fs}, progress: progress,
		known: map[string]bool{}, broken: map[int]bool{}, together: newTogether(readers()),
	}
	var g errgroup.Group
	g.SetLimit(readers())
	for _, want := range f.manifest.Ranks {
		// Discard the sums: a foreign checkpoint has no place to keep them.
		x := *f.ranks[want.Rank].index
		x.Entries = append([]checkpoint.Entry(nil), x.Entries...)
		for n := range x.Files {
			v.data(ctx, &g, &x, n)
		}
	}
	if err := errors.Join(g.Wait(), ctx.Err()); err != nil {
		return Report{}, fmt.Errorf("verify checkpoint %s: %w", f.path, err)
	}
	v.sort()
	return v.report, nil
}
