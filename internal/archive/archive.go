// Package archive keeps the old part of a log in sealed files, message by
// message and byte for byte, so that the live stream stays short however old the
// store is.
//
//	sequence   1 ……………………………………………………………… end │ end+1 ……… last
//	           segment │ segment │ … │ segment │ live stream
//
//	segment    consecutive messages of the log in one file, which never changes
//	end        the last sequence of the archive; the live stream begins after it
//	           and names it in its configuration
//	ahead      a segment after end: its messages are in the live stream too. It
//	           was sealed early, so that little is left to do when the stream is cut
//	chain      each segment holds the digest of the one before it, so that the
//	           digest of the last one covers every byte of the archive
//	lane       the decisions of one aggregate; see [events.Aggregate]
//	heads      a file with the last decision of every lane up to end
//
// A directory of an archive:
//
//	DIR/
//	  00000000000000000001-00000000000000032768.seg
//	  00000000000000032769-00000000000000065536.seg
//	  heads-65536        derived from the segments; written again if missing
//
// A segment, all numbers little-endian:
//
//	"CKPTSEG1"                          8 bytes
//	length of the store's identity      2 bytes, then the identity
//	sequence of the first message       8 bytes
//	digest of the segment before        32 bytes, zero for the first
//	frame of messages                   at most 256 KiB before compression
//	…
//	frame of the index                  see index.go
//	offset of that frame                8 bytes
//	digest                              BLAKE3-256 of every byte before it
//	"CKPTEND1"                          8 bytes
//
// A frame:
//
//	bytes that follow the frame's head  4 bytes
//	bytes when decompressed             4 bytes
//	CRC-32C of the bytes that follow    4 bytes
//	Zstandard frame
//
// A message in a frame; its sequence follows from its position:
//
//	time      8 bytes, Unix nanoseconds: when the server stored it
//	lengths   of subject 2, headers 4, body 4 bytes
//	subject, headers as they were on the wire, body
package archive

import (
	"encoding/hex"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Errors to test with errors.Is.
var (
	// ErrDamaged reports that a segment is missing, or that its bytes are not as
	// sealed.
	ErrDamaged = errors.New("damaged archive")
	// ErrForeign reports that a segment belongs to another store.
	ErrForeign = errors.New("archive of another store")
	// ErrNone reports that the archive has no such message.
	ErrNone = errors.New("no such message in the archive")
)

// Message is one message of the log as the server stored it.
type Message struct {
	Sequence uint64
	Time     time.Time // when the server stored it
	Subject  string
	Header   []byte // as on the wire, from "NATS/1.0" to the empty line; nil if it has none
	Data     []byte
}

// Digest is the BLAKE3-256 of a segment, which covers all earlier segments.
type Digest [32]byte

// String returns the digest in hexadecimal.
func (d Digest) String() string { return hex.EncodeToString(d[:]) }

// ParseDigest is the inverse of [Digest.String].
func ParseDigest(s string) (d Digest, err error) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(d) {
		return d, fmt.Errorf("digest %q is not 64 hexadecimal digits", s)
	}
	return Digest(b), nil
}

// Segment names a sealed file.
type Segment struct {
	First, Last uint64
	Path        string
}

const extension = ".seg"

func segmentName(first, last uint64) string {
	return fmt.Sprintf("%020d-%020d%s", first, last, extension)
}

// parseSegment reads the name of a segment; ok is false for any other file.
func parseSegment(dir, name string) (s Segment, ok bool) {
	stem, ok := strings.CutSuffix(name, extension)
	a, b, both := strings.Cut(stem, "-")
	if !ok || !both {
		return s, false
	}
	first, err1 := strconv.ParseUint(a, 10, 64)
	last, err2 := strconv.ParseUint(b, 10, 64)
	if err1 != nil || err2 != nil || first == 0 || last < first || segmentName(first, last) != name {
		return s, false
	}
	return Segment{First: first, Last: last, Path: filepath.Join(dir, name)}, true
}
