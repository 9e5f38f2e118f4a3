package jetlog

import (
	"errors"
	"fmt"
	"slices"
	"syscall"

	"github.com/ckptstore/ckptstore/internal/front"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/nats-io/nats.go/jetstream"
)

// ErrRefused says that the owner of the store does not take what this client
// sent. The same call is refused again.
var ErrRefused = errors.New("refused by the owner of the store")

// RefusedError is a refusal of a front, with its reason. It is [ErrRefused] to
// errors.Is; also [ErrNotAllowed] if clients may not do that at all, and
// [syscall.ENOSPC] if the disk of the store is nearly full.
type RefusedError struct {
	Code int // one of package internal/front
	Text string
}

// Error implements error.
func (e *RefusedError) Error() string {
	if e.Code == front.CodeDenied {
		return fmt.Sprintf("%v: %s", ErrNotAllowed, e.Text)
	}
	return fmt.Sprintf("%v: %s", ErrRefused, e.Text)
}

// ProblemKind returns [problem.Denied] where clients may not do that at all.
func (e *RefusedError) ProblemKind() problem.Kind {
	if e.Code == front.CodeDenied {
		return problem.Denied
	}
	return ""
}

// Is implements errors.Is.
func (e *RefusedError) Is(target error) bool {
	switch target {
	case ErrRefused:
		return true
	case ErrNotAllowed:
		return e.Code == front.CodeDenied
	case syscall.ENOSPC:
		return e.Code == front.CodeNoRoom
	}
	return false
}

// forGood are the codes of refusals that trying again does not settle at once.
var forGood = []jetstream.ErrorCode{
	front.CodeUnknownKind, front.CodeNewer, front.CodeEvent, front.CodeTooLarge, front.CodeLane,
	front.CodeNoRoom, front.CodeDenied, front.CodeBatch, front.CodeEntry, front.CodeHeld,
}

// refusedBy makes a refusal of a front the error that says so. Others stay.
func refusedBy(err error) error {
	var api *jetstream.APIError
	var known *RefusedError
	if !errors.As(err, &api) || errors.As(err, &known) || !slices.Contains(forGood, api.ErrorCode) {
		return err
	}
	return &RefusedError{Code: int(api.ErrorCode), Text: api.Description}
}
