// Package system knows the kinds of the errors that come from the operating system
// and the standard library, which declare none: a full disk, a passed deadline, a
// missing file, missing rights.
package system

import (
	"context"
	"errors"
	"io/fs"
	"syscall"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// known are the system's errors. A passed deadline comes first: a caller that may
// ask again has to know, whatever kept the answer.
var known = []struct {
	err  error
	kind problem.Kind
}{
	{context.DeadlineExceeded, problem.Late},
	{syscall.ENOSPC, problem.NoSpace},
	{syscall.EDQUOT, problem.NoSpace},
	{fs.ErrPermission, problem.NoAccess},
	{syscall.EROFS, problem.NoAccess},
	{fs.ErrNotExist, problem.MissingFile},
}

// Kinds returns the kinds of err: those that its chain declares, the outermost
// first, then those of the system's errors in it.
func Kinds(err error) []problem.Kind {
	kinds := problem.Kinds(err)
	for _, k := range known {
		if errors.Is(err, k.err) {
			kinds = append(kinds, k.kind)
		}
	}
	return kinds
}

// KindOf returns the first of the [Kinds], and [problem.Internal] where there is
// none.
func KindOf(err error) problem.Kind {
	if kinds := Kinds(err); len(kinds) > 0 {
		return kinds[0]
	}
	return problem.Internal
}
