package store

import (
	"context"
	"errors"
	"syscall"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/query"
)

// Unserved reports whether an append, a decision or a question failed because
// nobody answered it: the store's owner is gone, paused or busy, the log's
// server has no room or no leader. The same call may do better later. A refusal
// is not unserved, such as that of facts on a disk that is nearly full.
func Unserved(err error) bool {
	switch {
	case err == nil, IsDamage(err), errors.Is(err, ErrForeign), errors.Is(err, jetlog.ErrForeign), errors.Is(err, jetlog.ErrClosed), errors.Is(err, errClosed),
		errors.Is(err, jetlog.ErrNotAllowed):
		return false
	case errors.Is(err, jetlog.ErrUnacknowledged), errors.Is(err, query.ErrUnreachable), errors.Is(err, context.DeadlineExceeded):
		return true // why that is may be that the disk is full
	}
	return !errors.Is(err, syscall.ENOSPC) && jetlog.Unanswered(err)
}
