package trainer

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/doctor"
	"github.com/ckptstore/ckptstore/internal/front"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/shm"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/internal/store/space"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

// TestExitCodes: schedulers distinguish errors by the exit code.
func TestExitCodes(t *testing.T) {
	t.Parallel()
	link := &beneath.TypeError{Type: fs.ModeSymlink}
	for _, c := range []struct {
		code int
		errs []error
	}{
		{0, []error{nil}},
		{1, []error{
			&launch.FailedError{}, &launch.LostSaveError{}, syscall.ENOSPC, &data.NoSpaceError{}, &space.NoSpaceError{}, &jetlog.RefusedError{Code: front.CodeNoRoom}, launch.ErrDevices,
			fmt.Errorf("%w: %w", launch.ErrDevices, launch.ErrConfig), fmt.Errorf("%w: %w", store.ErrLocked, syscall.ENOSPC), fmt.Errorf("%w: %w", launch.ErrConfig, syscall.ENOSPC),
			fmt.Errorf("%w: %w", jetlog.ErrUnacknowledged, syscall.ENOSPC), errors.Join(&launch.LostSaveError{}, store.ErrLeaseLost), errors.Join(&store.RunningError{}, &launch.FailedError{}),
		}},
		{5, []error{&store.RunningError{}, session.ErrFenced, staging.ErrTaken, store.ErrLeaseLost, fmt.Errorf("%w: %w", store.ErrLeaseLost, jetlog.ErrNotAllowed), fmt.Errorf("%w: %w", launch.ErrConfig, staging.ErrTaken)}},
		{6, []error{doctor.ErrFound}},
		{10, []error{store.ErrNoStore, fmt.Errorf("%w: %w", store.ErrNoStore, fs.ErrNotExist), fmt.Errorf("%w: %w", store.ErrNoStore, fs.ErrPermission)}},
		{11, []error{store.ErrLocked, jetlog.ErrServed, fmt.Errorf("%w: %w", store.ErrLocked, context.DeadlineExceeded), fmt.Errorf("%w: %w", store.ErrLocked, fs.ErrPermission)}},
		{12, []error{
			jetlog.ErrNotAllowed, &jetlog.DeniedError{}, &jetlog.RefusedError{Code: front.CodeDenied}, shm.ErrNotPrivate, store.ErrUntrusted, link, &beneath.TypeError{Type: fs.ModeDir},
			fmt.Errorf("%w: %w", store.ErrDamaged, link), fmt.Errorf("%w: %w", launch.ErrConfig, link), fmt.Errorf("%w: %w", store.ErrNoStore, jetlog.ErrNotAllowed), fmt.Errorf("%w: %w", store.ErrUntrusted, store.ErrLocked),
		}},
		{64, []error{
			problem.New(problem.Unauthorized, "the token is not that of the job"),
			console.UsageError{Err: errors.New("--x")},
			launch.ErrConfig, launch.ErrNotWhole, projections.ErrReference, store.ErrForeign, store.ErrNotEmpty, store.ErrNewer, events.ErrNewer,
			&projections.NewerError{}, &events.NewerError{}, store.ErrDamaged, jetlog.ErrGap, jetlog.ErrUnsafe, jetlog.ErrUnrecovered, jetlog.ErrCursorDamaged, viewdb.ErrForeign, viewdb.ErrRolledBack,
			viewdb.ErrGap, store.ErrLocation, os.ErrPermission, syscall.EACCES, syscall.EPERM, syscall.EROFS, &fs.PathError{Op: "open", Path: "x", Err: syscall.EROFS},
			fmt.Errorf("%w: --resume: %w", launch.ErrConfig, projections.ErrNotFound), fmt.Errorf("%w: --resume: %w", launch.ErrConfig, &projections.AmbiguousError{}),
		}},
		{70, []error{errors.New("anything"), context.Canceled, context.DeadlineExceeded, projections.ErrNotFound, projections.ErrAmbiguous, fs.ErrNotExist, syscall.EIO, jetlog.ErrConflict, jetlog.ErrUnacknowledged}},
		{75, []error{&launch.PreemptedError{Saved: true}, &nodes.TooFewError{}, fmt.Errorf("join endpoint a:1: %w: %w", nodes.ErrNoContact, syscall.ECONNREFUSED)}},
		{143, []error{&launch.PreemptedError{}, signaled{unix.SIGTERM}, errors.Join(&launch.PreemptedError{}, syscall.ENOSPC), fmt.Errorf("%w: %w", signaled{unix.SIGTERM}, context.Canceled)}},
		{130, []error{signaled{unix.SIGINT}}},
	} {
		for _, err := range c.errs {
			if got := exitCode(err); got != c.code {
				t.Errorf("%T %v: exit code %d, want %d", err, err, got, c.code)
			}
			if err == nil {
				continue
			}
			if got := exitCode(fmt.Errorf("do it: %w: again", err)); got != c.code {
				t.Errorf("%T %v, wrapped: exit code %d, want %d", err, err, got, c.code)
			}
			if got := exitCode(errors.Join(err, errors.New("close it"))); got != c.code {
				t.Errorf("%T %v, joined: exit code %d, want %d", err, err, got, c.code)
			}
		}
	}
}
