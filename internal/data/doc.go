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
package data
