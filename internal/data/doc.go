// Package data is the data plane: it writes and reads the bytes of
// checkpoints, verifies them, lists them without a log, and removes them. It
// knows nothing of the log; its callers say what was decided there. Nor does it
// know where the files lie: [object.Backend] keeps them, a directory for one.
//
//	root      STORE/data, everything below it
//	writer    five steps that write a checkpoint; only the last makes it exist
//	reader    five steps that read any layout from any other
//	index     a rank's file that says what its data file holds, with digests
//	manifest  what the checkpoint is, with the digest of every index
//	receipt   COMMIT.json, which says that the manifest is committed
//	foreign   a checkpoint that another program wrote, read where it lies
//	adopted   a rank whose chunks lie in the files of a foreign checkpoint
//	verbatim  a rank whose chunks lie in files of another format, kept here as they came
//	pending   such files before their commit, in .pending below the root
//	base      a committed checkpoint whose chunks a save may reuse
//	sums      the digests of adopted chunks, learned by reading them once
//
// The files of a checkpoint, in the order in which they become durable:
//
//	<run>/<trial>/<checkpoint>/
//	  r00003.safetensors   chunks of rank 3
//	  <name>-<hash>.link   a file of an earlier checkpoint, linked in because it
//	                       holds chunks that are reused; it has this name in
//	                       every checkpoint
//	  r00003.idx           its index; of an adopted rank, without the file above
//	  r00003.sums          of an adopted rank, once they are learned
//	  manifest-<digest>    checkpoint.EncodeManifest; the digest is that of its bytes
//	  COMMIT.json          the receipt; without it this is no checkpoint
//	  __R_N.distcp …       of a verbatim rank, instead of the first: see [checkpoint.Frame]
//	  attached-<digest>-…  a file that was attached after the commit
//	  *.tmp                a file being written; never read
//
// Every digest is BLAKE3-256 and every checksum CRC-32C. The chain of trust
// goes receipt → manifest → index → chunk, each link a digest of the next, so
// that whoever knows a manifest's digest from the log can prove every byte.
//
// A data file is a safetensors file: a header padded to 4096 bytes, then the
// chunks without gaps, those with the largest elements first so that each is
// aligned. A chunk's key is its tensor's name, followed by "@" and its offsets
// when it is a part ("w@0,128"), and by "#2", "#3" where another chunk has
// that key already. Values, and element types that the format lacks, are
// stored as bytes (U8, one dimension). Keys are for other readers: this
// package finds chunks by the index alone.
//
// Of chunks that are reused, the index names the linked file, and the key that
// they have there; of equal chunks of 1 MiB or more in one data file, which
// lie there once, all have the place and key of the first. So a data file need
// not hold all of a rank's tensors, for readers that know no index: they take
// an export.
//
// The forms of index, sums, manifest and receipt are those of package checkpoint.
// Adopted files are never written to, and never removed.
//
// Crash safety rests on four rules. A file has its name only once all of its
// bytes are durable. An index is written after the data that it vouches for
// is synced. Directories are synced after that, and before anyone is told. The
// receipt comes last, after the decision that it records was acknowledged.
package data
