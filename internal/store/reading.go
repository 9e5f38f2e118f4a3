package store

import (
	"errors"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/projections"
)

// A process that opens a store with [Options].Reader changes nothing in it, also
// when another process owns it:
//
//	                          Reader            otherwise
//	append, decide, lease     refused           allowed
//	own the store             if it has none    if it has none
//	receipts, aborted saves   left as they are  written, removed
//	digests, read.json        left as they are  learned, written
//	sealing, cutting          left as they are  done
//	ballast                   on a full disk    released
//	sockets of dead jobs      left as they are  removed
//
// What is not done waits for the next owner that is no reader; end.json keeps up to
// where that is known to be done. Owning takes LOCK, owner.json and end.json, and the
// server of the log and the views write to their own directories. So a reader takes
// only a store that it could write to: see [ReadOnly] for the others.

// errReading is the error of everything that a reader does not do.
var errReading = errors.New("the store was opened for reading")

// unwritable is why this process changes nothing in the store; nil when it may.
func (s *Store) unwritable() error {
	if s.backup == nil && s.opts.Reader {
		return errReading
	}
	return s.backup
}

// owed removes from a report of a reader the receipt that a crash has left unwritten:
// the log commits the checkpoint, and the next owner writes the receipt.
func (s *Store) owed(c projections.Checkpoint, report data.Report) data.Report {
	if !s.opts.Reader {
		return report
	}
	kept := report.Findings[:0:0]
	for _, f := range report.Findings {
		if f.Kind == data.Missing && f.File == checkpoint.ReceiptFile {
			s.opts.Logger.Warn("receipt missing; `ckptstore verify --repair` writes it", "checkpoint", RefOf(c).String())
			continue
		}
		kept = append(kept, f)
	}
	report.Findings = kept
	return report
}
