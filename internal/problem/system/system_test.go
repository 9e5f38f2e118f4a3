package system

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// full is an error type that only errors.Is recognizes as a full disk.
type full struct{}

func (full) Error() string        { return "full" }
func (full) Is(target error) bool { return target == syscall.ENOSPC }

// TestKindOf checks that a system error has a kind, and that a declared kind
// takes precedence.
func TestKindOf(t *testing.T) {
	t.Parallel()
	path := func(err error) error { return fmt.Errorf("x: %w", &os.PathError{Op: "open", Path: "f", Err: err}) }
	for _, c := range []struct {
		err  error
		want problem.Kind
	}{
		{errors.New("plain"), problem.Internal},
		{path(syscall.ENOSPC), problem.NoSpace},
		{path(syscall.EDQUOT), problem.NoSpace},
		{full{}, problem.NoSpace},
		{fmt.Errorf("append: %w", context.DeadlineExceeded), problem.Late},
		{fmt.Errorf("append: %w: %w", context.DeadlineExceeded, syscall.ENOSPC), problem.Late},
		{path(syscall.EACCES), problem.NoAccess},
		{path(syscall.EPERM), problem.NoAccess},
		{path(syscall.EROFS), problem.NoAccess},
		{fs.ErrPermission, problem.NoAccess},
		{path(syscall.ENOENT), problem.MissingFile},
		{path(syscall.EIO), problem.Internal},
		{context.Canceled, problem.Internal},
		{problem.Wrap(problem.NotFound, path(syscall.ENOENT)), problem.NotFound},
		{fmt.Errorf("%w: %w", path(syscall.ENOSPC), problem.New(problem.Locked, "locked")), problem.Locked},
	} {
		if got := KindOf(c.err); got != c.want {
			t.Errorf("%v: %s, want %s", c.err, got, c.want)
		}
	}
	if got := Kinds(problem.Wrap(problem.Invalid, path(syscall.ENOSPC))); len(got) != 2 || got[0] != problem.Invalid || got[1] != problem.NoSpace {
		t.Errorf("the kinds are %v", got)
	}
}
