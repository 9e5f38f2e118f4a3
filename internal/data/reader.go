package data

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"sync"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data/blocks"
)

// FileReader reads one checkpoint from local files. After SetUp, several goroutines may call
// its methods.
type FileReader struct {
	root   *Root
	ref    checkpoint.Ref
	digest checkpoint.Digest // of the manifest; zero: take the receipt's
	only   string            // the only tensor to read; empty: all

	ranks map[int]*rankIndex // set by SetUp
}

var _ Reader = (*FileReader)(nil)

// rankIndex is an index that is read when it is first needed.
type rankIndex struct {
	want checkpoint.RankIndex

	mu    sync.Mutex
	index *checkpoint.Index
	at    map[key]int            // entries by key
	seen  map[int][]blocks.Range // blocks that were read, of entries that are not learned
	// starts are the numbers of the first block of each entry: see [BlockRange].
	starts []int64
}

// Reader reads the checkpoint at ref. If ref is invalid, each step returns an error.
func (r *Root) Reader(ref checkpoint.Ref) *FileReader { return &FileReader{root: r, ref: ref} }

// WithManifest sets the digest of the manifest that the log records as committed, so that the
// reader needs no receipt. It is called before any step.
func (r *FileReader) WithManifest(digest checkpoint.Digest) *FileReader {
	r.digest = digest
	return r
}

// Only restricts the reader to a single tensor: ReadMetadata is cheaper then, and its
// manifest may lack the chunks of all other tensors. SetUp accepts that manifest. An empty
// name restricts nothing. Only is called before any step.
func (r *FileReader) Only(fqn string) *FileReader {
	r.only = fqn
	return r
}

// Root returns the data directory that the reader reads from.
func (r *FileReader) Root() *Root { return r.root }

func (r *FileReader) wrap(step string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s of checkpoint %s: %w", step, r.ref, err)
}

// ReadMetadata implements [Reader].
func (r *FileReader) ReadMetadata(ctx context.Context) (checkpoint.Manifest, error) {
	m, err := r.readMetadata(ctx)
	return m, r.wrap("read the manifest", err)
}

func (r *FileReader) readMetadata(ctx context.Context) (checkpoint.Manifest, error) {
	if err := errors.Join(ctx.Err(), r.ref.Validate()); err != nil {
		return checkpoint.Manifest{}, err
	}
	if r.digest != (checkpoint.Digest{}) {
		return r.root.readManifestOf(ctx, r.ref, r.digest, r.only)
	}
	receipt, err := r.root.readReceipt(ctx, r.ref)
	if err != nil {
		return checkpoint.Manifest{}, err
	}
	m, err := r.root.readManifestOf(ctx, r.ref, receipt.Manifest, r.only)
	if err != nil {
		return checkpoint.Manifest{}, err
	}
	if r.only != "" {
		receipt.WorldSize, receipt.Bytes = 0, 0 // of all tensors
	}
	return m, receipt.Matches(m)
}

// readManifest returns the manifest with the given digest.
func (r *Root) readManifest(ctx context.Context, ref checkpoint.Ref, digest checkpoint.Digest) (checkpoint.Manifest, error) {
	return r.readManifestOf(ctx, ref, digest, "")
}

// readManifestOf is like readManifest, but may leave out the chunks of tensors other than
// fqn.
func (r *Root) readManifestOf(ctx context.Context, ref checkpoint.Ref, digest checkpoint.Digest, fqn string) (checkpoint.Manifest, error) {
	data, err := r.readFile(ctx, ref, checkpoint.ManifestFile(digest))
	if err != nil {
		return checkpoint.Manifest{}, err
	}
	if got := checkpoint.Sum(data); got != digest {
		return checkpoint.Manifest{}, &CorruptError{
			File: r.path(ref, checkpoint.ManifestFile(digest)), Block: -1, Problem: "digest of the manifest",
			Want: digest.String(), Got: got.String(),
		}
	}
	if fqn != "" {
		return checkpoint.DecodeManifestOf(data, fqn)
	}
	return checkpoint.DecodeManifest(data)
}

// readIndex returns the index that a manifest names.
func (r *Root) readIndex(ctx context.Context, ref checkpoint.Ref, want checkpoint.RankIndex) (checkpoint.Index, error) {
	path := r.path(ref, checkpoint.IndexFile(want.Rank))
	data, err := r.readFile(ctx, ref, checkpoint.IndexFile(want.Rank))
	if err != nil {
		return checkpoint.Index{}, err
	}
	if got := checkpoint.Sum(data); got != want.Index {
		return checkpoint.Index{}, &CorruptError{
			File: path, Block: -1, Problem: "digest of the index",
			Want: want.Index.String(), Got: got.String(),
		}
	}
	x, err := checkpoint.DecodeIndex(data)
	if err == nil && x.Rank != want.Rank {
		err = fmt.Errorf("it is the index of rank %d", x.Rank)
	}
	if err != nil {
		return checkpoint.Index{}, &CorruptError{File: path, Block: -1, Problem: err.Error()}
	}
	return x, nil
}

// SetUp implements [Reader]. Only ReadData opens files, so the coordinator does no more than
// other ranks.
func (r *FileReader) SetUp(ctx context.Context, m checkpoint.Manifest, _ bool) error {
	err := errors.Join(ctx.Err(), r.ref.Validate())
	if err == nil && r.digest != (checkpoint.Digest{}) && r.only == "" {
		if digest := checkpoint.Sum(checkpoint.EncodeManifest(m)); digest != r.digest {
			err = fmt.Errorf("the manifest has digest %s, the log records %s", digest, r.digest)
		}
	}
	if err == nil {
		var names []string
		if names, err = r.root.names(ctx, nameOf(r.ref)); err == nil && len(names) == 0 {
			err = fmt.Errorf("%s: %w", r.root.path(r.ref), fs.ErrNotExist)
		}
	}
	if err != nil {
		return r.wrap("set up the load", err)
	}
	r.ranks = make(map[int]*rankIndex, len(m.Ranks))
	for _, rank := range m.Ranks {
		r.ranks[rank.Rank] = &rankIndex{want: rank}
	}
	return nil
}

// load reads the index of a rank once. After an error, the next call retries.
func (r *FileReader) load(ctx context.Context, rank int) (*rankIndex, error) {
	x, ok := r.ranks[rank]
	if !ok {
		return nil, fmt.Errorf("the manifest names no files of rank %d", rank)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.index != nil {
		return x, nil
	}
	loaded, err := r.root.readIndex(ctx, r.ref, x.want)
	if err == nil && loaded.Adopted() {
		var learned bool
		if learned, err = r.root.readSums(ctx, r.ref, &loaded, x.want.Index); err == nil && !learned {
			r.root.unverified(r.ref)
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w; load another checkpoint, and verify this one to see all damage", err)
	}
	if err != nil {
		return nil, err
	}
	x.set(&loaded)
	return x, nil
}

func (x *rankIndex) set(loaded *checkpoint.Index) {
	x.index, x.at = loaded, make(map[key]int, len(loaded.Entries))
	for i, e := range loaded.Entries {
		x.at[itemKey(loaded.Rank, e.Item)] = i
	}
}

// PrepareLocalPlan implements [Reader]. It returns the reads ordered by rank, so that each
// file is read in one pass.
func (r *FileReader) PrepareLocalPlan(ctx context.Context, reads []checkpoint.Read) ([]checkpoint.Read, error) {
	if err := ctx.Err(); err != nil {
		return nil, r.wrap("local plan to load", err)
	}
	if r.ranks == nil {
		return nil, r.wrap("local plan to load", errors.New("SetUp was not called"))
	}
	for _, read := range reads {
		if _, ok := r.ranks[read.Rank]; !ok {
			return nil, r.wrap("local plan to load", fmt.Errorf("%q: the manifest names no files of rank %d", read.FQN, read.Rank))
		}
	}
	out := slices.Clone(reads)
	slices.SortStableFunc(out, func(a, b checkpoint.Read) int { return a.Rank - b.Rank })
	return out, nil
}

// PrepareGlobalPlan implements [Reader]. It has nothing to add.
func (r *FileReader) PrepareGlobalPlan(ctx context.Context, reads [][]checkpoint.Read) ([][]checkpoint.Read, error) {
	if err := ctx.Err(); err != nil {
		return nil, r.wrap("global plan to load", err)
	}
	return reads, nil
}

// compareItems returns the names of items that x lacks, and of entries of x that are not in
// items. The order does not matter.
func compareItems(x *checkpoint.Index, items []checkpoint.Item) (missing, extra []string) {
	name := func(it checkpoint.Item) string {
		if it.Value {
			return fmt.Sprintf("value %q", it.Shard.FQN)
		}
		return fmt.Sprintf("tensor %q %s", it.Shard.FQN, it.Shard.Box)
	}
	held := make(map[key]checkpoint.Item, len(x.Entries))
	for _, e := range x.Entries {
		held[itemKey(x.Rank, e.Item)] = e.Item
	}
	for _, it := range items {
		k := itemKey(x.Rank, it)
		have, ok := held[k]
		delete(held, k)
		switch {
		case !ok:
			missing = append(missing, name(it)+" is not in the index")
		case have.Bytes != it.Bytes || have.PerRank != it.PerRank || have.Shard.DType != it.Shard.DType || !have.Shard.Global.Equal(it.Shard.Global):
			missing = append(missing, name(it)+" has another type, shape or size in the index")
		}
	}
	for _, it := range held {
		extra = append(extra, name(it)+" is not in the manifest")
	}
	slices.Sort(extra)
	return missing, extra
}

// key names a chunk or value within a checkpoint. The box of a value is empty.
type key struct {
	value bool
	rank  int // whose file holds it
	fqn   string
	box   string
}

func itemKey(rank int, it checkpoint.Item) key {
	if it.Value {
		return key{value: true, rank: rank, fqn: it.Shard.FQN}
	}
	return key{rank: rank, fqn: it.Shard.FQN, box: it.Shard.Box.Key()}
}

// Stored is one chunk or value of a checkpoint, as an index describes it.
type Stored struct {
	Rank   int // whose index has it
	Item   checkpoint.Item
	Digest checkpoint.Digest // of its bytes; zero for an adopted chunk that was never read
}

// Contents lists the stored chunks and values, in the order of ranks and of each rank's
// items. It reads indexes, which the manifest proves, and no data. SetUp must have been
// called.
func (r *FileReader) Contents(ctx context.Context) ([]Stored, error) {
	var all []Stored
	for _, rank := range slices.Sorted(maps.Keys(r.ranks)) {
		x, err := r.load(ctx, rank)
		if err != nil {
			return nil, r.wrap("list the contents", err)
		}
		for _, e := range x.index.Entries {
			all = append(all, Stored{Rank: rank, Item: e.Item, Digest: e.Digest})
		}
	}
	return all, nil
}

// Named returns the files in the directories of other checkpoints that this one names, by rank.
// SetUp must have been called.
func (r *FileReader) Named(ctx context.Context) (map[int][]checkpoint.File, error) {
	named := map[int][]checkpoint.File{}
	for _, rank := range slices.Sorted(maps.Keys(r.ranks)) {
		x, err := r.load(ctx, rank)
		if err != nil {
			return nil, r.wrap("list the files of others", err)
		}
		for _, f := range x.index.Files {
			if f.From != (checkpoint.Ref{}) {
				named[rank] = append(named[rank], f)
			}
		}
	}
	return named, nil
}

// ChunkDigest is the digest of a chunk or value that a rank has written.
type ChunkDigest struct {
	Item   checkpoint.Item
	Digest checkpoint.Digest
}

// ChunkDigests returns the digests of everything that a rank has written of a checkpoint, in
// the order of its items. They come from the index with the given digest; if that index is
// missing or has another digest, ChunkDigests returns an error.
func (r *Root) ChunkDigests(ctx context.Context, ref checkpoint.Ref, of checkpoint.RankIndex) ([]ChunkDigest, error) {
	err := errors.Join(ctx.Err(), ref.Validate())
	var x checkpoint.Index
	if err == nil {
		x, err = r.readIndex(ctx, ref, of)
	}
	if err != nil {
		return nil, fmt.Errorf("digests of rank %d of checkpoint %s: %w", of.Rank, ref, err)
	}
	out := make([]ChunkDigest, len(x.Entries))
	for i, e := range x.Entries {
		out[i] = ChunkDigest{e.Item, e.Digest}
	}
	return out, nil
}
