// Package system assigns kinds to the errors of the operating system and the
// standard library, which declare none: a full disk, a passed deadline, a missing
// file, missing rights.
package system

import (
	"context"
	"errors"
	"io/fs"
	"syscall"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// known are the system's errors. A passed deadline comes first: the caller needs
// to know that it may retry, whatever delayed the answer.
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

// KindOf returns the first of the [Kinds], or [problem.Internal] if there is
// none.
func KindOf(err error) problem.Kind {
	if kinds := Kinds(err); len(kinds) > 0 {
		return kinds[0]
	}
	return problem.Internal
}
