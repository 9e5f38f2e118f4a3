package dcp

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/tensor"
)

// bomb writes a .metadata file of about a megabyte that refers to one large
// object from each of its names.
type bomb struct {
	*metadataWriter
	n int // of names
}

// name writes the i-th of the names.
func (b bomb) name(i int) { b.once(fmt.Sprintf("%05x", i)) }

// wide writes a torch.Size of as many dimensions as are allowed.
func (b bomb) wide(last int64) {
	ns := make([]int64, tensor.MaxDims)
	ns[len(ns)-1] = last
	b.size(described, ns)
}

// file returns the .metadata file whose dicts the functions fill.
func (b bomb) file(state, planner, storage func()) []byte {
	dict := func(fill func()) {
		b.op(opEmptyDict, opMark)
		if fill != nil {
			fill()
		}
		b.op(opSetItems)
	}
	b.begin(classMetadata)
	b.text("state_dict_metadata")
	dict(state)
	b.text("planner_data")
	dict(planner)
	b.text("storage_data")
	dict(storage)
	b.end()
	b.op(opStop)
	return b.b
}

// tensor writes a tensor whose list of chunks fill fills.
func (b bomb) tensor(size func(), fill func()) {
	b.begin(classTensor)
	b.text("properties")
	b.properties(classProperties, classMemFormat, "float32", 0, false)
	b.text("size")
	size()
	b.text("chunks")
	b.op(opEmptyList, opMark)
	fill()
	b.op(opAppends)
	b.end()
}

// stored writes an entry of storage_data. All of them share one archive.
func (b bomb) stored(fqn func(), offset func()) {
	b.begin(classIndex)
	b.text("fqn")
	fqn()
	b.text("offset")
	offset()
	b.end()
	if b.get("archive") {
		return
	}
	b.location(Location{"f", 0, 1})
	b.put("archive")
}

// paths returns the file that gives one path of 256 keys to every name.
func (b bomb) paths() []byte {
	return b.file(nil, func() {
		for i := range b.n {
			b.name(i)
			if !b.get("path") {
				b.tuple(maxPath)
				for range maxPath {
					b.text("key")
				}
				b.tupleOf(maxPath)
				b.put("path")
			}
		}
	}, nil)
}

// newBomb returns a bomb of n names.
func newBomb(n int) bomb { return bomb{&metadataWriter{pickler: newPickler(4)}, n} }

// Reading takes memory in proportion to a file that refers to a large object
// many times, or fails with an error that names the limit.
func TestMetadataBombs(t *testing.T) {
	const tooMany = "the same objects occur in too many places: their copies exceed the limit of"
	for name, c := range map[string]struct {
		make func(b bomb) []byte
		want string // part of the error, "" for none
	}{
		"a path of 256 keys for every name": {bomb.paths, ""},
		"a path of long keys": {func(b bomb) []byte {
			return b.file(nil, func() {
				b.name(0)
				b.tuple(maxPath)
				for range maxPath {
					b.text(strings.Repeat("k", 1<<20))
				}
				b.tupleOf(maxPath)
			}, nil)
		}, `path of "00000" has keys of 268435711 bytes in all, at most 65536 are allowed`},
		"a tensor of 64 dimensions for every name": {func(b bomb) []byte {
			return b.file(func() {
				for i := range b.n {
					b.name(i)
					if !b.get("tensor") {
						b.tensor(func() { b.wide(0) }, func() {})
						b.put("tensor")
					}
				}
			}, nil, nil)
		}, tooMany},
		"offsets of 64 dimensions for every name": {func(b bomb) []byte {
			return b.file(nil, nil, func() {
				for i := range b.n / 4 {
					b.stored(func() { b.name(i) }, func() { b.wide(1 << 62) })
				}
			})
		}, tooMany},
		"a chunk of 64 dimensions for every name": {func(b bomb) []byte {
			return b.file(func() {
				for i := range b.n / 4 {
					b.name(i)
					if !b.get("tensor") {
						b.tensor(func() { b.wide(0) }, func() {
							b.begin(classChunk)
							b.text("offsets")
							b.wide(0)
							b.text("sizes")
							b.wide(0)
							b.end()
						})
						b.put("tensor")
					}
				}
			}, nil, func() {
				for i := range b.n / 4 {
					b.stored(func() { b.name(i) }, func() { b.wide(0) })
				}
			})
		}, tooMany},
		"a long name for every chunk": {func(b bomb) []byte {
			long := strings.Repeat("n", maxFQN)
			return b.file(func() {
				b.text(long)
				b.tensor(func() { b.size(described, []int64{int64(b.n)}) }, func() {
					for i := range b.n / 8 {
						b.begin(classChunk)
						b.text("offsets")
						b.size(described, []int64{int64(i)})
						b.text("sizes")
						b.size(described, []int64{1})
						b.end()
					}
				})
			}, nil, func() {
				for i := range b.n / 8 {
					b.stored(func() { b.text(long) }, func() { b.size(described, []int64{int64(i)}) })
				}
			})
		}, tooMany},
	} {
		t.Run(name, func(t *testing.T) {
			data := c.make(newBomb(1 << 17))
			var err error
			used := spent(t, func() { _, err = ReadMetadata(data) })
			if used > 200*uint64(len(data)) {
				t.Errorf("a file of %d bytes took %d, %d a byte", len(data), used, used/uint64(len(data)))
			}
			if c.want == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			wantFormatError(t, err, c.want)
		})
	}
}

// The copies that files of PyTorch need are an eighth of the budget at most.
func TestFixturesNeedFewCopies(t *testing.T) {
	names, err := filepath.Glob("testdata/*/*/" + MetadataFile)
	if err != nil || len(names) == 0 {
		t.Fatalf("no fixtures: %v", err)
	}
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		root, err := unpickle(metadataDialect, data, MetadataFile, 0)
		if err != nil {
			t.Fatal(err)
		}
		r := &metadataReader{stored: map[archiveKey]Location{}, shared: map[*any][]any{}, budget: newBudget(len(data))}
		before := r.left
		if _, err := r.metadata(root); err != nil {
			t.Fatal(err)
		}
		if used := before - r.left; used > 2*int64(len(data)) {
			t.Errorf("%s: %d bytes take %d of copies", name, len(data), used)
		}
	}
}

// An object that stands in many places of a value is decoded in each of them.
// The memory of all places is in proportion to the pickle.
func TestValueBombs(t *testing.T) {
	const places = 1 << 18
	for name, object := range map[string][]byte{
		"bytes":        pickled("\x8c\x07_codecs\x8c\x06encode\x93X", 0, 8, 0, 0, strings.Repeat("x", 1<<11), str("latin1"), "\x86R"),
		"a long tuple": pickled("(", strings.Repeat("N", 1<<17), "t"),
		"dicts":        pickled("](", strings.Repeat("}K\x01K\x01s", 1<<14), "e"),
	} {
		t.Run(name, func(t *testing.T) {
			data := pickled(0x80, 4, object, "\x94](", strings.Repeat("h\x00", places), "e\x86.")
			archive := wholeArchive(data)
			var err error
			used := spent(t, func() { _, err = DecodeValue(archive) })
			wantFormatError(t, err, "its objects occur in too many places")
			if used > 300*uint64(len(data)) {
				t.Errorf("a pickle of %d bytes took %d, %d a byte", len(data), used, used/uint64(len(data)))
			}
		})
	}
}
