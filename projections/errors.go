package projections

import (
	"fmt"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// Sentinels for [errors.Is].
var (
	// ErrNotFound matches every [NotFoundError].
	ErrNotFound = problem.New(problem.NotFound, "not found")
	// ErrAmbiguous matches every [AmbiguousError].
	ErrAmbiguous = problem.New(problem.Ambiguous, "ambiguous")
	// ErrReference reports a malformed reference.
	ErrReference = problem.New(problem.BadReference, "bad reference")
)

// NotFoundError reports that no object has the requested name.
type NotFoundError struct {
	What string // run, trial, checkpoint, …
	Ref  string // as requested
	Hint string // similar names, or the next step; may be empty
}

// Error implements error.
func (e *NotFoundError) Error() string {
	s := fmt.Sprintf("no %s %q", e.What, e.Ref)
	if e.Hint != "" {
		s += ": " + e.Hint
	}
	return s
}

// ProblemKind returns [problem.NotFound].
func (*NotFoundError) ProblemKind() problem.Kind { return problem.NotFound }

// Is makes every NotFoundError an [ErrNotFound].
func (e *NotFoundError) Is(target error) bool { return target == ErrNotFound }

// AmbiguousError reports that a reference stands for several checkpoints.
type AmbiguousError struct {
	Ref        string
	Candidates []string // unambiguous references
}

// Error implements error.
func (e *AmbiguousError) Error() string {
	return fmt.Sprintf("%q stands for several checkpoints: use one of %s", e.Ref, list(e.Candidates))
}

// ProblemKind returns [problem.Ambiguous].
func (*AmbiguousError) ProblemKind() problem.Kind { return problem.Ambiguous }

// Is makes every AmbiguousError an [ErrAmbiguous].
func (e *AmbiguousError) Is(target error) bool { return target == ErrAmbiguous }

func names[T any](rows []T, name func(T) string) []string {
	out := make([]string, len(rows))
	for i, row := range rows {
		out[i] = name(row)
	}
	return out
}

// notFound suggests names similar to the requested one, or some of the existing names.
func notFound(what, ref string, have []string) *NotFoundError {
	e := &NotFoundError{What: what, Ref: ref, Hint: Near(ref, have)}
	if e.Hint == "" {
		e.Hint = "there is none yet"
	}
	return e
}

// Near returns a hint for a missing name: similar names, or some of the existing ones.
// It is empty if there are none.
func Near(ref string, have []string) string {
	switch near := closest(ref, have); {
	case len(have) == 0:
		return ""
	case len(near) > 0:
		return "did you mean " + list(near) + "?"
	}
	return "there is " + list(have)
}

// list formats at most five of the candidates.
func list(candidates []string) string {
	const most = 5
	quoted := names(candidates[:min(len(candidates), most)], func(s string) string { return fmt.Sprintf("%q", s) })
	s := strings.Join(quoted, ", ")
	if more := len(candidates) - most; more > 0 {
		s += fmt.Sprintf(" and %d more", more)
	}
	return s
}

// closest returns at most three candidates that a typing error could have turned into
// ref, or that start with it, the nearest first.
func closest(ref string, candidates []string) []string {
	type scored struct {
		name     string
		distance int
	}
	var near []scored
	for _, c := range candidates {
		d := distance(strings.ToLower(ref), strings.ToLower(c))
		if ref != "" && strings.HasPrefix(c, ref) {
			d = min(d, 1)
		}
		if d <= max(1, len(ref)/4) {
			near = append(near, scored{c, d})
		}
	}
	slices.SortStableFunc(near, func(a, b scored) int { return a.distance - b.distance })
	return names(near[:min(len(near), 3)], func(s scored) string { return s.name })
}

// distance returns the number of bytes to insert, delete or replace between a and b.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost++
			}
			diagonal = row[j+1]
			row[j+1] = min(cost, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
