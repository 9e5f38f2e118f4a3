// Package checkpoint defines checkpoints, in memory and in bytes. It reads and
// writes no files: package planner makes plans, package data writes and reads the
// files described here.
//
//	Ref       the place of a checkpoint's files: three names, safe as file names
//	Digest    BLAKE3-256, of a chunk or a file
//	Local     the items that one rank wants to save
//	Layout    the contents of a checkpoint, and the rank whose file holds each chunk
//	Manifest  a layout with the identity of its checkpoint and the digest of
//	          every rank's index file; a pure function of the log
//	Index     where the chunks of one rank lie, with their digests and checksums
//	sums      digests and checksums of adopted chunks, learned after the adoption
//	Receipt   COMMIT.json: the manifest with this digest is committed
//	Want      one box of a tensor, or one value, that a rank wants to load
//	Read      one overlap of a want with a stored chunk
//
// The chain of trust goes receipt → manifest → index → chunk, each link a digest of
// the next: the manifest's digest in the log proves every byte. Every checksum is
// CRC-32C.
//
// # Plans and manifests
//
// The binary forms of Local, Layout and Manifest begin with four magic bytes and a
// version byte. Numbers are unsigned varints, differences (±) zigzag, flags and dtypes
// bytes; text has its length in front. A column is a list whose entries lie together:
// [x y] is a column of x, then one of y. Encoding is canonical: equal values
// give equal bytes, so the digest of an encoded plan is its fingerprint.
// Decoded bytes are encoded to the same bytes again.
//
//	local     "CKLP" 1  rank  items  length  structure  parts
//	structure [flags name path] of all items, [dtype ndim dims] of the shards:
//	          the common part of the ranks, decoded once for all of them
//	parts     of each item: a value's size in bytes, or for each dimension of
//	          a shard the elements before its box and behind it; then the
//	          checks of the items whose flags include one
//
//	  0        offset      offset+size        n
//	  +---------+--------------+--------------+
//	  | before  |     box      |    behind    |
//	  +---------+--------------+--------------+
//
//	layout    "CKLY" 1  tensors  [name dtype ndim dims path]  chunks of each
//	          values    [name ±rank bytes flags path]
//	chunks    0  cell size of each dimension (0: whole)  rank
//	             and, if that makes several cells, step and interleave
//	          1+count  [±rank], for each dimension [±offset ±size]
//	manifest  "CKMF" 1  store run trial checkpoint name step attempt world
//	          ranks  [±rank digest]  layout
//	name      bytes shared with the name before (127 at most), the others
//	path      only where it is not the name alone, marked by a flag (of a
//	          tensor in a layout, the high bit of its dtype): elements × 2 + 1
//	          if the last is an index, then of each other the bytes of the
//	          name × 2 + 1 if it is an index; the dots between do not count
//
// Chunks that are the cells of a regular grid, on ranks in an arithmetic run,
// are encoded as that rule and never listed:
//
//	shape [6 5], cells [2 3], rank 4, step 1    interleave 1   interleave 3
//	                                   +---+--+     4 5            4 7
//	chunk i lies in cell               |   |  |
//	  i % interleave × n/interleave    +---+--+     6 7            5 8
//	  + i / interleave                 |   |  |
//	of n, row by row, on rank          +---+--+     8 9            6 9
//	  rank + i × step                  |   |  |
//	                                   +---+--+
//
// Rows and blocks have interleave 1. Columns, and a dimension that two meshes
// cut one after the other, have the size of the mesh that cuts first.
//
// Hostile bytes cost memory in proportion to their number, except rules,
// which stand for at most 8 MiB of chunks a tensor and 1 GiB a form, and are
// not expanded before the whole form has been read. Tensors beyond that are
// listed.
//
// # Index
//
// Numbers are unsigned varints unless a width is given, strings have their length in
// front. Offsets count from the start of the file. The checksum covers all bytes in
// front of it.
//
//	┌────────┬───────┬──────┬───────┬────────┬───────┬─────────┬─────────┐
//	│ "CKIX" │ 0x01  │ rank │ count │ file…  │ count │ entry…  │ CRC-32C │
//	│ 4 B    │ 1 B   │      │       │        │       │         │ u32 LE  │
//	└────────┴───────┴──────┴───────┴────────┴───────┴─────────┴─────────┘
//	file   name size
//	entry  flags fqn key file offset length            flags: 1 value, 2 per rank
//	       [dtype ndim dim* (offset size)*]            absent for a value
//	       digest (32 B)                               of the chunk
//	       crc (u32 LE) for each 64 KiB                from the chunk's start
//
// An adopted rank has its chunks in the files of another program, which stay in
// place. Its index has version 2. The files are named by absolute paths, with their
// size and the time of their last write: a file that has changed in either is refused.
// The digests are in the file of sums, whose digest the log records.
//
//	file   path size modified (ns since 1970)
//	entry  flags fqn file offset length         flags: 4 strided, 8 record
//	       [dtype ndim dim* (offset size)*]     absent for a value
//	       [stride*]                            if strided: see [Entry.Span]
//	       [offset size CRC-32 (u32 LE)]        record: bytes with a checksum
//	                                            of the program that wrote them
//
// Version 3, of a verbatim rank, is described at [Frame]. Version 4 is version 1 for a rank
// that reuses data files in the directories of other checkpoints, where files have no links:
//
//	file   name size from                       from: empty, or run/trial/checkpoint
//
// The file of sums is described at [EncodeSums], the receipt at [Receipt], the names of all
// files at [DataFile] and its neighbours.
package checkpoint

import (
	"encoding/hex"
	"fmt"

	"github.com/ckptstore/ckptstore/tensor"
	"github.com/zeebo/blake3"
)

// Digest is a BLAKE3-256 digest.
type Digest [32]byte

// Sum returns the digest of data.
func Sum(data []byte) Digest { return blake3.Sum256(data) }

// Prefix is the common beginning of data with different ends. It is hashed once.
type Prefix struct{ hash *blake3.Hasher }

// NewPrefix returns the prefix data.
func NewPrefix(data []byte) Prefix {
	h := blake3.New()
	_, _ = h.Write(data) // never fails
	return Prefix{h}
}

// Sum returns [Sum] of the prefix followed by end.
func (p Prefix) Sum(end []byte) (d Digest) {
	h := p.hash.Clone()
	_, _ = h.Write(end)
	h.Sum(d[:0])
	return d
}

// String returns the digest in lower-case hexadecimal.
func (d Digest) String() string { return hex.EncodeToString(d[:]) }

// MarshalText writes the form of [Digest.String].
func (d Digest) MarshalText() ([]byte, error) { return []byte(d.String()), nil }

// UnmarshalText reads the form of [Digest.String].
func (d *Digest) UnmarshalText(text []byte) error {
	v, err := ParseDigest(string(text))
	*d = v
	return err
}

// ParseDigest is the inverse of [Digest.String].
func ParseDigest(s string) (Digest, error) {
	var d Digest
	if len(s) != 2*len(d) {
		return d, fmt.Errorf("digest %q has %d characters, want %d", s, len(s), 2*len(d))
	}
	if _, err := hex.Decode(d[:], []byte(s)); err != nil {
		return d, fmt.Errorf("digest %q: %w", s, err)
	}
	return d, nil
}

// Check is a short digest of the bytes of an item, with which differing replicas are found.
// Zero is none.
type Check [16]byte

// Item is one thing that a rank saves: a shard of a tensor, or a value, which is a sequence
// of bytes under a name. Path and Check are for the local plan: a [Layout] knows the path,
// and its items have neither.
type Item struct {
	Shard   tensor.Shard // of a value, only the FQN is set
	Bytes   int64        // size of the chunk or value
	Value   bool
	PerRank bool // every rank has its own value, such as RNG state
	Check   Check
	Path    Path
}

// Validate returns an error for an item that cannot be stored.
func (it Item) Validate() error {
	if it.Value {
		if it.Shard.FQN == "" || it.Bytes < 0 {
			return fmt.Errorf("value %q of %d bytes has no name or a negative size", it.Shard.FQN, it.Bytes)
		}
		return nil
	}
	if err := it.Shard.Validate(); err != nil {
		return err
	}
	if need := it.Shard.Bytes(); it.Bytes != need {
		return fmt.Errorf("tensor %q has %d bytes, its box %v needs %d", it.Shard.FQN, it.Bytes, it.Shard.Box, need)
	}
	return nil
}

// Local is the list of items that one rank wants to save, in the rank's own order.
type Local struct {
	Rank  int
	Items []Item
}

// Chunk is the stored part of a tensor.
type Chunk struct {
	Box  tensor.Box
	Rank int // whose file holds it
}

// Tensor is a tensor in a layout. Its chunks do not overlap, and they cover the shape unless
// a single rank saved only a part.
type Tensor struct {
	FQN    string
	Path   Path // nil where it is the FQN alone
	DType  tensor.DType
	Shape  tensor.Shape
	Chunks []Chunk // in (rank, item) order
}

// Value is a value in a layout. A per-rank value has one entry for each rank.
type Value struct {
	FQN     string
	Path    Path // nil where it is the FQN alone
	Rank    int  // whose file holds it
	Bytes   int64
	PerRank bool
}

// Layout lists the contents of a checkpoint and the rank that writes each part. Tensors are
// sorted by FQN, values by FQN and rank.
type Layout struct {
	Tensors []Tensor
	Values  []Value
}

// Items returns the items that rank has to write: its chunks, then its values, in the order
// of the layout. For more than one rank, use [Layout.Shares].
func (l Layout) Items(rank int) []Item {
	var items []Item
	for _, t := range l.Tensors {
		for _, c := range t.Chunks {
			if c.Rank == rank {
				items = append(items, t.item(c))
			}
		}
	}
	for _, v := range l.Values {
		if v.Rank == rank {
			items = append(items, v.item())
		}
	}
	return items
}

func (t Tensor) item(c Chunk) Item {
	s := tensor.Shard{FQN: t.FQN, DType: t.DType, Global: t.Shape, Box: c.Box}
	return Item{Shard: s, Bytes: s.Bytes()}
}

func (v Value) item() Item {
	return Item{Value: true, Shard: tensor.Shard{FQN: v.FQN}, Bytes: v.Bytes, PerRank: v.PerRank}
}

// Shares is a layout by rank: searching all of it for each rank would cost the square of the
// ranks.
type Shares struct {
	layout Layout
	at     map[int][]share
}

// share is a chunk of a tensor or, where chunk is -1, a value.
type share struct{ entry, chunk int32 }

// Shares indexes a layout, which must not change afterwards.
func (l Layout) Shares() Shares {
	s := Shares{layout: l, at: map[int][]share{}}
	for i, t := range l.Tensors {
		for k, c := range t.Chunks {
			s.at[c.Rank] = append(s.at[c.Rank], share{int32(i), int32(k)})
		}
	}
	for i, v := range l.Values {
		s.at[v.Rank] = append(s.at[v.Rank], share{int32(i), -1})
	}
	return s
}

// Items is [Layout.Items].
func (s Shares) Items(rank int) []Item {
	if len(s.at[rank]) == 0 {
		return nil
	}
	items := make([]Item, 0, len(s.at[rank]))
	for _, at := range s.at[rank] {
		if at.chunk < 0 {
			items = append(items, s.layout.Values[at.entry].item())
			continue
		}
		t := &s.layout.Tensors[at.entry]
		items = append(items, t.item(t.Chunks[at.chunk]))
	}
	return items
}

// Bytes returns the size of all chunks and values.
func (l Layout) Bytes() int64 {
	sum := int64(0)
	for _, t := range l.Tensors {
		for _, c := range t.Chunks {
			sum += c.Box.Volume() * int64(t.DType.Size())
		}
	}
	for _, v := range l.Values {
		sum += v.Bytes
	}
	return sum
}

// RankIndex names one rank's index file by its digest.
type RankIndex struct {
	Rank  int
	Index Digest
}

// Manifest describes a committed checkpoint: everything that a reader needs in addition to
// the ranks' files.
type Manifest struct {
	Store      string // identity of the store that committed it
	Run        string
	Trial      string
	Checkpoint string // full ID
	Name       string
	Step       int64
	Attempt    int
	WorldSize  int
	Ranks      []RankIndex // ascending
	Layout     Layout
}

// Want is one thing that a rank wants to load.
type Want struct {
	Value bool
	Shard tensor.Shard // of a value, only the FQN is set
	Rank  int          // of a per-rank value, the rank that saved it
}

// Read is one overlap of a want with a stored chunk: the elements of Region go from chunk
// Chunk in the file of Rank to the box of the want. All boxes are in coordinates of the whole
// tensor. If the want and the chunk have different dtypes, the elements are converted. For a
// value, only Want, FQN and Rank are set.
type Read struct {
	Want   int // index of the want
	FQN    string
	Rank   int
	DType  tensor.DType // of the chunk
	Chunk  tensor.Box
	Region tensor.Box
}
