package data

import (
	"context"
	"fmt"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// Storage decides how the bytes of a job's checkpoints are written and read. The
// trainer asks it for a Writer for each step of a save and for a Reader for all steps of
// a load, on several goroutines at once: what one step of a save leaves for the next is
// on disk. Manifests and receipts stay the store's, see [Location.Commit].
type Storage interface {
	Writer(at Location) Writer
	// Reader reads a committed checkpoint. For one that this storage has not
	// written, it returns at.Reader.
	Reader(at Location) Reader
}

// Location is where one checkpoint lies in a store.
type Location struct {
	// Ref names the checkpoint. While a rank's plan is prepared, the checkpoint has no
	// ID yet, and Ref has its name.
	Ref checkpoint.Ref
	// Dir is its directory. Writer.SetUp makes it; an aborted save and a deletion remove
	// it with all files in it. It has no directories.
	Dir string
	// Writer and Reader are the store's own. A storage that only adds to them passes
	// its steps on to them; one that replaces them may still use their plans.
	Writer Writer
	Reader Reader
}

// Commit is the last step of a storage with files of its own, which has checked that
// they are all in place: it makes the manifest durable, calls commit, and writes the
// receipt. Writer.Finish does the same and checks the store's own files first.
func (l Location) Commit(ctx context.Context, m checkpoint.Manifest, commit Commit) (checkpoint.Receipt, error) {
	w, own := l.Writer.(*FileWriter)
	if !own {
		return checkpoint.Receipt{}, fmt.Errorf("commit %s: the location is not one that the trainer gave: pass on that of Storage.Writer", l.Ref)
	}
	return w.finish(ctx, m, commit, false)
}

// Location is that of the checkpoint that w writes.
func (w *FileWriter) Location() Location {
	return Location{Ref: w.ref, Dir: w.root.path(w.ref), Writer: w, Reader: w.root.Reader(w.ref)}
}

// Location is that of the checkpoint that r reads.
func (r *FileReader) Location() Location {
	return Location{Ref: r.ref, Dir: r.root.path(r.ref), Writer: r.root.Writer(r.ref), Reader: r}
}

// Writer writes one checkpoint in five steps. Plans are prepared before the directory is
// set up: a rank's local plan is, before the checkpoint has begun, only when the attempt
// has not seen it yet. Each node of a job has its own writers; all of them write into one
// directory.
//
// Every step may be repeated after an error or a crash, by another process
// too, and then does what is left to do. A checkpoint that was begun and not
// finished is never seen by a reader.
//
// While the coordinator takes a step, PrepareGlobalPlan or Finish, all saves of the job
// wait. The context of such a step of a [Storage] ends when the time for a save is over:
// the step must heed it.
type Writer interface {
	// SetUp makes the checkpoint's directory. Every node calls it, and no one
	// before the event that begins the checkpoint is acknowledged: whoever
	// sweeps leftovers takes a directory without that event for one. On return
	// the directory's name is durable up to the store. isCoordinator changes
	// nothing here: any node may come first. A directory that
	// holds another checkpoint, perhaps of another store, is a [*TakenError],
	// here and in WriteData and Finish, and stays as it is.
	SetUp(ctx context.Context, isCoordinator bool) error

	// PrepareLocalPlan checks what a rank wants to save, and returns the plan as
	// it was given: the worker copies its items in that order. A plan that comes
	// back with another rank, or with other items, is refused. Every rank's node
	// calls it. It writes nothing.
	PrepareLocalPlan(ctx context.Context, local checkpoint.Local) (checkpoint.Local, error)

	// PrepareGlobalPlan checks what all ranks together save, and returns the layout
	// as it was given. A layout that comes back with other tensors, boxes, dtypes or
	// values, or with another rank for one, aborts the save. The coordinator calls
	// it. It writes nothing.
	PrepareGlobalPlan(ctx context.Context, layout checkpoint.Layout) (checkpoint.Layout, error)

	// WriteData writes the items of one rank, in one pass over their bytes;
	// those that may be stored already, where chunks are reused, in two.
	// The node of that rank calls it; calls for different ranks may run at the
	// same time, those for one rank may not. On return the rank's files and
	// their names are durable, and stay so while the call is repeated. With
	// too little space nothing is written and the error is a [*NoSpaceError].
	// Once the checkpoint has a manifest, a repeated call only compares: equal
	// bytes give the same result, others an error with [ErrSealed].
	WriteData(ctx context.Context, rank int, items []checkpoint.Item, src Source) (Written, error)

	// Finish makes the checkpoint exist. The coordinator calls it when the log
	// has every participant's completed write. It checks that every index that
	// m names is in place with its data, makes the manifest durable, calls
	// commit with the manifest's digest, and then writes the receipt durably.
	// Only commit's success makes the checkpoint exist: when it fails, nothing
	// does. A call with another digest, or before the manifest is in place, is
	// refused, and so is an end without error that has not called it. An error
	// after that success is an [*UnrecordedError]: the checkpoint exists in the
	// log, and [Root.WriteReceipt] repairs it here.
	Finish(ctx context.Context, m checkpoint.Manifest, commit Commit) (checkpoint.Receipt, error)
}

// Commit appends the decision that commits a checkpoint. It is called once for
// each call of Finish; called again for the same checkpoint, it must find its
// own earlier decision and return that.
type Commit func(ctx context.Context, manifest checkpoint.Digest) (checkpoint.Decision, error)

// Source gives out the bytes to write.
type Source interface {
	// Item is the bytes of items[i], in place. They must be exactly as many
	// as the item says, and must not change until Item is called again or
	// WriteData returns; they are not written to. One goroutine calls it, so
	// that one buffer can serve all items; once for each item, unless files of
	// the rank are there already or chunks are reused: then it may be called
	// again for any, and must give the same bytes.
	Item(i int) ([]byte, error)
}

// Written says what a rank wrote.
type Written struct {
	Files        []checkpoint.File // the data file, files that were linked in, then the index
	Index        checkpoint.Digest // of the index file; never zero
	BytesWritten int64             // of chunks and values in the data file
	BytesReused  int64             // of those that were stored already
}

// Reader reads one checkpoint in five steps, called in the order below. Each
// node that restores has its own reader. No step writes anything, takes a
// lock, or needs the log. Every step may be repeated.
type Reader interface {
	// ReadMetadata is the checkpoint's manifest: the one that the receipt
	// names, or the one whose digest the caller gave because it knows the log.
	// Without either the error has [ErrNotCommitted] in its chain; a manifest
	// that is not what the digest says gives a [*CorruptError].
	ReadMetadata(ctx context.Context) (checkpoint.Manifest, error)

	// SetUp takes the manifest that the load was resolved to, read here or
	// sent by the coordinator. Indexes are read and checked against it when
	// they are first needed.
	SetUp(ctx context.Context, m checkpoint.Manifest, isCoordinator bool) error

	// PrepareLocalPlan checks that a rank's reads are in the checkpoint and
	// returns them as this storage would have them.
	PrepareLocalPlan(ctx context.Context, reads []checkpoint.Read) ([]checkpoint.Read, error)

	// PrepareGlobalPlan sees the prepared reads of all ranks and returns them as this
	// storage would have them. The coordinator calls it.
	PrepareGlobalPlan(ctx context.Context, reads [][]checkpoint.Read) ([][]checkpoint.Read, error)

	// ReadData fills the wants, converted where a want has another dtype than
	// was stored ([tensor.Convertible]). Only the blocks that overlap a read are read,
	// each once, and no byte of a block reaches dst before its checksum was
	// found right; damage gives a [*CorruptError]. After an error the contents
	// of dst are undefined. The regions of a want's reads must not overlap.
	// Calls may run at the same time. bytesRead counts what was read from
	// files, without indexes.
	ReadData(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read, dst Destination) (bytesRead int64, err error)
}

// Destination takes the bytes that are read.
type Destination interface {
	// Want is the buffer of wants[i]: as large as its box, row-major, or as
	// large as the value. Into nil nothing is copied, and what the want needs is
	// verified all the same. It is called by several goroutines, and must give
	// the same memory each time.
	Want(i int) []byte
}
