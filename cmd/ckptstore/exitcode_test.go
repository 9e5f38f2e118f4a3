package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/agent"
	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/foreign"
	"github.com/ckptstore/ckptstore/internal/format/dcp"
	"github.com/ckptstore/ckptstore/internal/front"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/store/space"
	"github.com/ckptstore/ckptstore/planner/retention"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// TestExitCodes: the exit code of an error depends on its kind, however it is wrapped.
func TestExitCodes(t *testing.T) {
	t.Parallel()
	wrapped := func(err error) error { return fmt.Errorf("do it: %w: again", err) }
	for _, c := range []struct {
		code int
		errs []error
	}{
		{0, []error{nil}},
		{1, []error{
			errors.New("anything"), context.Canceled, context.DeadlineExceeded, syscall.ENOSPC, syscall.EDQUOT, fs.ErrNotExist, syscall.EIO,
			errNoLaunch, console.ErrNoTerminal, store.ErrForeign, store.ErrNewer, store.ErrNotEmpty, events.ErrNewer, &projections.NewerError{}, &events.NewerError{},
			&data.NoSpaceError{}, &space.NoSpaceError{}, &store.StateError{}, jetlog.ErrConflict, jetlog.ErrUnacknowledged, jetlog.ErrClosed,
			&jetlog.RefusedError{Code: front.CodeNoRoom}, &launch.FailedError{}, &launch.LostSaveError{}, data.ErrNotCommitted,
			fmt.Errorf("%w: %w", store.ErrForeign, jetlog.ErrForeign),
		}},
		{2, []error{
			console.UsageError{Err: errors.New("--x")},
			projections.ErrReference, projections.ErrAmbiguous, &projections.AmbiguousError{}, launch.ErrConfig, store.ErrLocation,
			retention.ErrPolicy, store.ErrTag, store.ErrCursorName, store.ErrAccess, jetlog.ErrExposed,
			fmt.Errorf("%w: %w", store.ErrAccess, fs.ErrNotExist), fmt.Errorf("%w: %w", store.ErrLocation, fs.ErrPermission),
			console.UsageError{Err: projections.ErrNotFound},
		}},
		{4, []error{
			projections.ErrNotFound, &projections.NotFoundError{}, store.ErrNothing, jetlog.ErrEnd, agent.ErrNoAgent,
			fmt.Errorf("%w: %w", projections.ErrNotFound, &dcp.FormatError{}),
		}},
		{5, []error{
			store.ErrExists, &store.RunningError{}, &foreign.OccupiedError{}, &store.FollowedError{}, jetlog.ErrCursorMoved, &store.RunExistsError{},
			&store.NotRunningError{}, agent.ErrServed,
		}},
		{6, []error{
			errFindings, &data.CorruptError{}, &data.ChangedError{}, &dcp.FormatError{}, store.ErrDamaged, jetlog.ErrGap, jetlog.ErrUnsafe, jetlog.ErrUnrecovered,
			jetlog.ErrCursorDamaged, viewdb.ErrForeign, viewdb.ErrRolledBack, viewdb.ErrGap, &data.TakenError{Err: &data.CorruptError{}},
			fmt.Errorf("%w: %w", store.ErrDamaged, fs.ErrPermission), errors.Join(projections.ErrNotFound, errFindings),
		}},
		{10, []error{store.ErrNoStore, fmt.Errorf("%w: %w", store.ErrNoStore, fs.ErrNotExist), fmt.Errorf("%w: %w", store.ErrNoStore, context.DeadlineExceeded)}},
		{11, []error{store.ErrLocked, jetlog.ErrServed, fmt.Errorf("%w: %w", store.ErrLocked, context.DeadlineExceeded), fmt.Errorf("%w: %w", store.ErrLocked, syscall.EWOULDBLOCK)}},
		{12, []error{
			os.ErrPermission, syscall.EACCES, syscall.EPERM, syscall.EROFS, &fs.PathError{Op: "open", Path: "x", Err: syscall.EROFS}, jetlog.ErrNotAllowed, &jetlog.DeniedError{},
			&jetlog.RefusedError{Code: front.CodeDenied}, store.ErrBackup, store.ErrUntrusted, errDeclined, &beneath.TypeError{Type: fs.ModeSymlink},
			fmt.Errorf("%w: %w", errDeclined, console.ErrNoTerminal), fmt.Errorf("%w: %w", store.ErrUntrusted, fs.ErrPermission),
		}},
	} {
		for _, err := range c.errs {
			for _, interrupted := range []bool{false, true} {
				want := c.code
				if interrupted && errors.Is(err, context.Canceled) {
					want = 130
				}
				if got := exitCode(err, interrupted); got != want {
					t.Errorf("%T %v: exit code %d, want %d", err, err, got, want)
				}
				if err == nil {
					continue
				}
				if got := exitCode(wrapped(err), interrupted); got != want {
					t.Errorf("%T %v, wrapped: exit code %d, want %d", err, err, got, want)
				}
				if got := exitCode(errors.Join(err, errors.New("close it")), interrupted); got != want {
					t.Errorf("%T %v, joined: exit code %d, want %d", err, err, got, want)
				}
			}
		}
	}
}
