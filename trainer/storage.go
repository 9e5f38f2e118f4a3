package trainer

import (
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
)

// Storage decides how the bytes of a job's checkpoints are written and read:
//
//	Writer(at Location) Writer
//	Reader(at Location) Reader   at.Reader for checkpoints that this storage has not written
//
// The trainer asks for a Writer for each step of a save and for a Reader for all
// steps of a load, on several goroutines at once, and after a crash in another
// process. So a step of a save must leave its state for the next in Location.Dir,
// not in memory. The store keeps manifests and receipts, lists checkpoints and
// deletes them. The programs trainer and ckptstore do not know your storage:
// commands that read tensors (cat, export, verify) report the files that they do
// not find.
type Storage = data.Storage

// Location is the place of one checkpoint: its Ref; Dir, the directory that SetUp
// creates and that a deletion removes; and Writer and Reader, the store's own.
// Commit(ctx, Manifest, Commit) (Receipt, error) is the last step of a storage
// with files of its own.
type Location = data.Location

// Writer writes a checkpoint in five steps:
//
//	PrepareLocalPlan(ctx, Local) (Local, error)           for each rank, if the plan is new
//	PrepareGlobalPlan(ctx, Layout) (Layout, error)        one time
//	SetUp(ctx, isCoordinator bool) error                  for each rank
//	WriteData(ctx, rank, []Item, Source) (Written, error) for each rank
//	Finish(ctx, Manifest, Commit) (Receipt, error)        one time
//
// Return the plans unchanged; an error fails the save. Only Finish makes the
// checkpoint exist. Each step may be retried after an error or a crash, also by
// another process. When WriteData returns, the rank's bytes are durable.
type Writer = data.Writer

// Reader reads a checkpoint in five steps:
//
//	ReadMetadata(ctx) (Manifest, error)
//	SetUp(ctx, Manifest, isCoordinator bool) error        checks that the files exist
//	PrepareLocalPlan(ctx, []Read) ([]Read, error)         for each rank
//	PrepareGlobalPlan(ctx, [][]Read) ([][]Read, error)    one time
//	ReadData(ctx, []Want, []Read, Destination) (bytesRead int64, err error)
//
// No step writes. ReadData compares every byte with a checksum before it returns
// it, and converts to the wanted dtype.
type Reader = data.Reader

// Source returns the bytes to write: Item(i) returns those of items[i], valid
// until the next call.
type Source = data.Source

// Destination receives the bytes that are read: Want(i) is the buffer of
// wants[i], nil to only verify.
type Destination = data.Destination

// Written is the result of WriteData for a rank: Files, the Digest of the Index
// that vouches for them, BytesWritten and BytesReused.
type Written = data.Written

// File is a file of a checkpoint: its Name in the checkpoint's directory, and its
// Size.
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

// Manifest lists the contents of a checkpoint; Ranks has the Index digest of each
// rank.
type Manifest = checkpoint.Manifest

// CorruptError reports stored bytes that differ from the written bytes: in which
// File, and the Problem. Block is -1 if it is unknown. Return a pointer.
type CorruptError = data.CorruptError

// Receipt records for readers without the log that a checkpoint is committed.
type Receipt = checkpoint.Receipt

// Want is a rank's request: a value, or a box of a tensor in a dtype.
type Want = checkpoint.Want

// Read is the part of one stored chunk in a want: the elements of Region go from
// the Chunk of a Rank to the box of the want.
type Read = checkpoint.Read
