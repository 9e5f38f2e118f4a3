package data

import (
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// ErrNotCommitted is in the chain of errors about a directory that has no receipt: it is not
// a checkpoint, whatever else it holds.
var ErrNotCommitted = errors.New("no receipt, so this is not a committed checkpoint")

// ErrSealed is in the chain of errors about writing different bytes into a
// checkpoint that already has a manifest.
var ErrSealed = errors.New("the checkpoint has a manifest and takes no other bytes")

// NoSpaceError reports that a save would not fit. Nothing was written.
type NoSpaceError struct {
	Dir     string
	Need    int64  // bytes that this write needs
	Pending int64  // bytes that other running writes still need
	Keep    int64  // bytes that must stay free
	Free    uint64 // bytes that are free
}

// Error reports the directory, the sizes and the next step.
func (e *NoSpaceError) Error() string {
	others := ""
	if e.Pending > 0 {
		others = fmt.Sprintf(" in addition to the %d that other ranks are writing", e.Pending)
	}
	if e.Keep > 0 {
		others += fmt.Sprintf(", %d are kept for the log,", e.Keep)
	}
	return fmt.Sprintf("no space in %s: %d bytes are needed%s and %d are free; "+
		"free space, then save again", e.Dir, e.Need, others, e.Free)
}

// Unwrap makes errors.Is(err, syscall.ENOSPC) hold, as for a disk that fills up later.
func (e *NoSpaceError) Unwrap() error { return syscall.ENOSPC }

// CorruptError reports that stored bytes differ from those that were written. None of them
// were handed out.
type CorruptError struct {
	File    string // path
	FQN     string // of the tensor or value; empty when the file as a whole is meant
	Chunk   string // box of the chunk, such as "[0 8]+[4 8]"; empty for a value
	Block   int    // 64 KiB block in the chunk; -1 when no block is meant
	Offset  int64  // in the file, in bytes
	Problem string // what is wrong
	Want    string // digest or checksum, when two were compared
	Got     string
}

// Error reports the file, tensor, chunk, block and the next step.
func (e *CorruptError) Error() string {
	var s strings.Builder
	fmt.Fprintf(&s, "%s is damaged", e.File)
	if e.FQN != "" {
		fmt.Fprintf(&s, ": %q", e.FQN)
	}
	if e.Chunk != "" {
		fmt.Fprintf(&s, " %s", e.Chunk)
	}
	if e.Block >= 0 {
		fmt.Fprintf(&s, ", block %d at offset %d", e.Block, e.Offset)
	}
	fmt.Fprintf(&s, ": %s", e.Problem)
	if e.Want != "" {
		fmt.Fprintf(&s, " (want %s, got %s)", e.Want, e.Got)
	}
	s.WriteString("; load another checkpoint, and verify this one to see all damage")
	return s.String()
}

// ProblemKind returns [problem.Damage].
func (*CorruptError) ProblemKind() problem.Kind { return problem.Damage }
