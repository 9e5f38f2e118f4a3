package data

import (
	"fmt"
	"strings"
)

// Kind says what sort of damage a finding is.
type Kind string

// The kinds of findings.
const (
	Missing    Kind = "missing"    // a file is not there
	Truncated  Kind = "truncated"  // a file is shorter than it was written
	Corrupt    Kind = "corrupt"    // bytes are not those that were written
	Mismatch   Kind = "mismatch"   // two files, each whole, do not belong together
	Unreadable Kind = "unreadable" // the filesystem could not read
)

// Finding is one thing that is wrong with a checkpoint.
type Finding struct {
	Kind    Kind   `json:"kind"`
	File    string `json:"file"`            // within the checkpoint's directory
	FQN     string `json:"fqn,omitempty"`   // tensor or value that is affected
	Chunk   string `json:"chunk,omitempty"` // box of the affected chunk
	Block   int    `json:"block"`           // 64 KiB block in the chunk; -1 when none is meant
	Offset  int64  `json:"offset"`          // in the file, in bytes; -1 when none is meant
	Problem string `json:"problem"`
}

// String is the finding in one line.
func (f Finding) String() string {
	var s strings.Builder
	fmt.Fprintf(&s, "%s: %s", f.File, f.Kind)
	if f.FQN != "" {
		fmt.Fprintf(&s, " %q", f.FQN)
	}
	if f.Chunk != "" {
		fmt.Fprintf(&s, " %s", f.Chunk)
	}
	if f.Block >= 0 {
		fmt.Fprintf(&s, " block %d", f.Block)
	}
	if f.Offset >= 0 {
		fmt.Fprintf(&s, " offset %d", f.Offset)
	}
	return s.String() + ": " + f.Problem
}

// Report is what a verification found.
type Report struct {
	Findings []Finding // sorted by file and offset
	Files    int       // files that were read
	Chunks   int       // chunks and values whose bytes were digested
	Bytes    int64     // of those
	Read     int64     // of Bytes, those that no verification beside this one had read: see [Together]
	Extra    []string  // files that the manifest does not name: harmless

	// Of adopted files: what is known of their bytes.
	Sums []Sums
	// Unknown counts the chunks and values that could be compared with
	// nothing: no digest is known, and the program that wrote them has left no
	// checksum.
	Unknown int
}

// Clean reports whether nothing is wrong.
func (r Report) Clean() bool { return len(r.Findings) == 0 }
