// Package data is the data plane: it writes, reads, verifies, lists and removes the bytes of
// checkpoints. It does not read the log; its callers pass in what the log decided. It does
// not know where the files lie either: an [object.Backend] keeps them, for instance a
// directory.
//
//	root      STORE/data, everything below it
//	writer    five steps that write a checkpoint; only the last makes it exist
//	reader    five steps that read any layout from any other
//	index     a rank's file that lists the contents of its data file, with digests
//	manifest  the description of the checkpoint, with the digest of every index
//	receipt   COMMIT.json, which records that the manifest is committed
//	foreign   a checkpoint that another program wrote, read in place
//	adopted   a rank whose chunks lie in the files of a foreign checkpoint
//	verbatim  a rank whose chunks lie in files of another format, kept here unchanged
//	pending   such files before their commit, in .pending below the root
//	base      a committed checkpoint whose chunks a save may reuse
//	sums      the digests of adopted chunks, learned by reading them once
//
// The rooms below it need no root: package scan passes over bytes, stream writes a data file
// from its items, reuse decides what a save need not write, segments knows the contents of a
// file while it is written, and blocks are sets of blocks of a chunk.
//
// The files of a checkpoint, in the order in which they become durable:
//
//	<run>/<trial>/<checkpoint>/
//	  r00003.safetensors   chunks of rank 3
//	  <name>-<hash>.link   a file of an earlier checkpoint, hard-linked because it
//	                       holds chunks that are reused; it has this name in
//	                       every checkpoint
//	  r00003.idx           its index; of an adopted rank, without the file above
//	  r00003.sums          of an adopted rank, once they are learned
//	  manifest-<digest>    checkpoint.EncodeManifest; the digest is that of its bytes
//	  COMMIT.json          the receipt; without it the directory is not a checkpoint
//	  __R_N.distcp …       of a verbatim rank, instead of the first: see [checkpoint.Frame]
//	  attached-<digest>-…  a file that was attached after the commit
//	  *.tmp                a file being written; never read
//
// Every digest is BLAKE3-256 and every checksum CRC-32C. The chain of trust goes receipt →
// manifest → index → chunk. Each link is a digest of the next, so a reader that knows a
// manifest's digest from the log can prove every byte.
//
// A data file is a safetensors file: a header padded to 4096 bytes, then the chunks without
// gaps. Chunks with the largest elements come first, so that each is aligned. A chunk's key
// is its tensor's name, followed by "@" and its offsets when it is a part ("w@0,128"), and by
// "#2", "#3" where another chunk has that key already. Values, and element types that the
// format lacks, are stored as bytes (U8, one dimension). Keys are for other readers: this
// package finds chunks by the index alone.
//
// For a reused chunk, the index names the linked file and the chunk's key in that file. Where
// files have no links, it names the file in the directory of the checkpoint that wrote it. Equal
// chunks of 1 MiB or more in one data file are stored once, and all have the place and key of
// the first. A data file therefore need not hold all of a rank's tensors. Readers that do not
// know the index need an export.
//
// The forms of index, sums, manifest and receipt are those of package checkpoint. Adopted
// files are never written to, and never removed.
//
// Crash safety rests on four rules. A file gets its name only once all of its bytes are
// durable. An index is written after its data is synced. Directories are synced after that,
// and before the result is reported. The receipt comes last, after the log acknowledged the
// commit.
//
// Package scan passes over bytes and verifies them, package blocks computes which blocks of a
// chunk a read needs.
package data

import (
	"context"
	"fmt"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data/stream"
)

// Storage decides how the bytes of a job's checkpoints are written and read. The trainer asks
// it for a Writer for each step of a save and for a Reader for all steps of a load, from
// several goroutines at once. The steps of a save share state only on disk. Manifests and
// receipts remain the store's: see [Location.Commit].
type Storage interface {
	Writer(at Location) Writer
	// Reader reads a committed checkpoint. For a checkpoint that this storage did not write,
	// it returns at.Reader.
	Reader(at Location) Reader
}

// Location is the place of one checkpoint in a store.
type Location struct {
	// Ref names the checkpoint. While a rank's plan is prepared, the checkpoint has no ID
	// yet: Ref then holds only its name.
	Ref checkpoint.Ref
	// Dir is its directory. Writer.SetUp makes it; an aborted save and a deletion remove it
	// with all its files. It has no subdirectories.
	Dir string
	// Writer and Reader are the store's own. A storage that only adds to them passes its
	// steps on to them. A storage that replaces them may still use their plans.
	Writer Writer
	Reader Reader
}

// Commit is the last step of a storage with its own files, after it checked that they are all
// in place. It makes the manifest durable, calls commit, and writes the receipt.
// Writer.Finish does the same and checks the store's own files first.
func (l Location) Commit(ctx context.Context, m checkpoint.Manifest, commit Commit) (checkpoint.Receipt, error) {
	w, own := l.Writer.(*FileWriter)
	if !own {
		return checkpoint.Receipt{}, fmt.Errorf("commit %s: unknown location; pass on the Location given to Storage.Writer", l.Ref)
	}
	return w.finish(ctx, m, commit, false)
}

// Location returns the place of the checkpoint that w writes.
func (w *FileWriter) Location() Location {
	return Location{Ref: w.ref, Dir: w.root.path(w.ref), Writer: w, Reader: w.root.Reader(w.ref)}
}

// Location returns the place of the checkpoint that r reads.
func (r *FileReader) Location() Location {
	return Location{Ref: r.ref, Dir: r.root.path(r.ref), Writer: r.root.Writer(r.ref), Reader: r}
}

// Writer writes one checkpoint in five steps. Plans are prepared before the directory is set
// up. A rank's local plan is prepared before the checkpoint begins, and only when the attempt
// has not seen that plan yet. Each node of a job has its own writers; all of them write into
// one directory.
//
// Every step may be repeated after an error or a crash, also by another process, and then
// does the remaining work. Readers never see a checkpoint that was begun and not finished.
//
// While the coordinator runs PrepareGlobalPlan or Finish, all saves of the job wait. The
// context of these steps of a [Storage] ends with the time limit of a save: the step must
// heed it.
type Writer interface {
	// SetUp makes the checkpoint's directory. Every node calls it, after the event that
	// begins the checkpoint is acknowledged and not before: the sweep of leftovers removes a
	// directory without that event. On return the directory's name is durable up to the
	// store. isCoordinator changes nothing here: any node may come first. If the directory
	// holds another checkpoint, perhaps of another store, SetUp, WriteData and Finish return
	// a [*TakenError] and leave it unchanged.
	SetUp(ctx context.Context, isCoordinator bool) error

	// PrepareLocalPlan checks what a rank wants to save, and returns the plan as it was
	// given: the worker copies its items in that order. The caller refuses a returned plan
	// with another rank or other items. Every rank's node calls it. It writes nothing.
	PrepareLocalPlan(ctx context.Context, local checkpoint.Local) (checkpoint.Local, error)

	// PrepareGlobalPlan checks what all ranks together save, and returns the layout as it was
	// given. A returned layout with other tensors, boxes, dtypes, values or ranks aborts the
	// save. The coordinator calls it. It writes nothing.
	PrepareGlobalPlan(ctx context.Context, layout checkpoint.Layout) (checkpoint.Layout, error)

	// WriteData writes the items of one rank, in one pass over their bytes; where chunks are
	// reused, in two passes over those that may be stored already. The node of that rank
	// calls it; calls for different ranks may run at the same time, calls for one rank may
	// not. On return the rank's files and their names are durable, and remain so while the
	// call is repeated. If the space does not suffice, WriteData writes nothing and returns a
	// [*NoSpaceError]. Once the checkpoint has a manifest, a repeated call only compares:
	// equal bytes give the same result, other bytes an error with [ErrSealed].
	WriteData(ctx context.Context, rank int, items []checkpoint.Item, src Source) (Written, error)

	// Finish makes the checkpoint exist. The coordinator calls it when the log has every
	// participant's completed write. It checks that every index in m is in place with its
	// data, makes the manifest durable, calls commit with the manifest's digest, and then
	// writes the receipt durably. The checkpoint exists if and only if commit succeeds. A
	// call of commit with another digest, or before the manifest is in place, is refused; so
	// is a Finish that returns nil without having called commit. An error after commit
	// succeeded is an [*UnrecordedError]: the checkpoint exists in the log, and
	// [Root.WriteReceipt] repairs its receipt here.
	Finish(ctx context.Context, m checkpoint.Manifest, commit Commit) (checkpoint.Receipt, error)
}

// Commit appends the decision that commits a checkpoint. It is called once for each call of
// Finish. Called again for the same checkpoint, it must find and return its own earlier
// decision.
type Commit func(ctx context.Context, manifest checkpoint.Digest) (checkpoint.Decision, error)

// Source provides the bytes to write.
type Source = stream.Source

// Lasting is a [Source] whose items stay in place until WriteData returns: sealed slots, as
// opposed to one buffer for all.
type Lasting interface {
	Source
	// Lasts does nothing. It declares that the bytes of every item stay as they are.
	Lasts()
}

// Written reports what a rank wrote.
type Written struct {
	Files        []checkpoint.File // the data file, files that were linked in or named, then the index
	Index        checkpoint.Digest // of the index file; never zero
	BytesWritten int64             // of chunks and values in the data file
	BytesReused  int64             // of chunks and values that were stored already
	Took         *WriteTimes       // nil: not measured, or the call found its files complete
}

// WriteTimes are the parts of one WriteData. Bytes are digested while others are written, so
// Write is the time in which the call only waited.
type WriteTimes struct {
	Digest time.Duration // in which digests were computed
	Write  time.Duration // in which it waited for the bytes to be written
	Sync   time.Duration // until the files and their names were durable
}

// Reader reads one checkpoint in five steps, called in the order below. Each node that
// restores has its own reader. No step writes anything, takes a lock, or needs the log. Every
// step may be repeated.
type Reader interface {
	// ReadMetadata returns the checkpoint's manifest: by the digest that the caller gave from
	// the log, else by the receipt. Without either the error has [ErrNotCommitted] in its
	// chain. A manifest that does not match its digest gives a [*CorruptError].
	ReadMetadata(ctx context.Context) (checkpoint.Manifest, error)

	// SetUp takes the manifest that the load was resolved to, read here or sent by the
	// coordinator. Indexes are read and checked against it when they are first needed.
	SetUp(ctx context.Context, m checkpoint.Manifest, isCoordinator bool) error

	// PrepareLocalPlan checks that a rank's reads are in the checkpoint and returns them in
	// the form and order that this storage prefers.
	PrepareLocalPlan(ctx context.Context, reads []checkpoint.Read) ([]checkpoint.Read, error)

	// PrepareGlobalPlan takes the prepared reads of all ranks and returns them in the form
	// and order that this storage prefers. The coordinator calls it.
	PrepareGlobalPlan(ctx context.Context, reads [][]checkpoint.Read) ([][]checkpoint.Read, error)

	// ReadData fills the wants, converted where a want's dtype differs from the stored one
	// ([tensor.Convertible]). It reads only the blocks that overlap a read, each once. No
	// byte of a block reaches dst before its checksum is verified; damage gives a
	// [*CorruptError]. After an error the contents of dst are undefined. The regions of a
	// want's reads must not overlap. Calls may run at the same time. bytesRead counts the
	// bytes read from files, without indexes.
	ReadData(ctx context.Context, wants []checkpoint.Want, reads []checkpoint.Read, dst Destination) (bytesRead int64, err error)
}

// Destination provides the buffers that a load fills.
type Destination interface {
	// Want returns the buffer of wants[i]: as large as its box, row-major, or as large as the
	// value. If it returns nil, the want's bytes are verified and not copied. Several
	// goroutines call it, and it must return the same memory each time.
	Want(i int) []byte
}
