package trainer

import (
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
)

// Storage decides how the bytes of a job's checkpoints are written and read:
//
//	Writer(at Location) Writer
//	Reader(at Location) Reader   at.Reader for checkpoints that it has not written
//
// The trainer asks for a Writer for each step of a save and for a Reader for all steps of
// a load, on several goroutines at once, and after a crash in another process: what a
// step of a save leaves for the next is in Location.Dir, not in memory. Manifests and receipts stay the store's, and so do listing and deletion. The programs trainer and ckptstore know
// no storage of yours: what reads tensors (cat, export, verify) names files that it does
// not find.
type Storage = data.Storage

// Location is where one checkpoint lies: its Ref; Dir, the directory that SetUp makes and
// that a deletion removes; and Writer and Reader, the store's own. Commit(ctx, Manifest,
// Commit) (Receipt, error) is the last step of a storage with files of its own.
type Location = data.Location

// Writer writes a checkpoint in five steps:
//
//	PrepareLocalPlan(ctx, Local) (Local, error)           for each rank, if the plan is new
//	PrepareGlobalPlan(ctx, Layout) (Layout, error)        one time
//	SetUp(ctx, isCoordinator bool) error                  for each rank
//	WriteData(ctx, rank, []Item, Source) (Written, error) for each rank
//	Finish(ctx, Manifest, Commit) (Receipt, error)        one time
//
// The plans must come back as they were given; an error refuses the save. Only Finish makes
// the checkpoint exist. Each step may be repeated after an error or a crash, by another
// process too. When WriteData returns, the rank's bytes are durable.
type Writer = data.Writer

// Reader reads a checkpoint in five steps:
//
//	ReadMetadata(ctx) (Manifest, error)
//	SetUp(ctx, Manifest, isCoordinator bool) error        finds out whether the files are there
//	PrepareLocalPlan(ctx, []Read) ([]Read, error)         for each rank
//	PrepareGlobalPlan(ctx, [][]Read) ([][]Read, error)    one time
//	ReadData(ctx, []Want, []Read, Destination) (bytesRead int64, err error)
//
// No step writes. ReadData gives no byte that was not compared with a checksum, and
// converts to the wanted dtype.
type Reader = data.Reader

// Source gives out the bytes to write: Item(i) is those of items[i], until the next call.
type Source = data.Source

// Destination takes the bytes that are read: Want(i) is the buffer of wants[i], nil to
// verify only.
type Destination = data.Destination

// Written is what WriteData has written for a rank: Files, the Digest of the Index that
// vouches for them, BytesWritten and BytesReused.
type Written = data.Written

// File is the Name, in the checkpoint's directory, and Size of a file.
type File = checkpoint.File

// Commit appends the decision that commits a checkpoint.
type Commit = data.Commit

// Ref names a checkpoint: Run, Trial, Checkpoint.
type Ref = checkpoint.Ref

// Digest is a BLAKE3-256 digest; [Sum] makes one.
type Digest = checkpoint.Digest

// Sum returns the digest of bytes.
func Sum(bytes []byte) Digest { return checkpoint.Sum(bytes) }

// Local is what one rank saves: its Rank and Items.
type Local = checkpoint.Local

// Item is one tensor shard or value: its Shard, Bytes, and whether it is a Value.
type Item = checkpoint.Item

// Layout is what all ranks save: which rank writes which box of each tensor.
type Layout = checkpoint.Layout

// Manifest says what is in a checkpoint; Ranks has the Index digest of each rank.
type Manifest = checkpoint.Manifest

// CorruptError says that stored bytes are not those that were written: in which File, and
// the Problem; Block is -1 if it is not known. Return a pointer to one.
type CorruptError = data.CorruptError

// Receipt says that a checkpoint is committed, to readers without the log.
type Receipt = checkpoint.Receipt

// Want is what a rank asks for: a value, or a box of a tensor in a dtype.
type Want = checkpoint.Want

// Read is one stored chunk's part in a want: the elements of Region go from the Chunk of
// a Rank to the box of the want.
type Read = checkpoint.Read
