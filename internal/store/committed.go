package store

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

// StateError says that a checkpoint is not committed, so that it cannot be read.
type StateError struct{ Checkpoint projections.Checkpoint }

// Error implements error.
func (e *StateError) Error() string {
	c := e.Checkpoint
	return fmt.Sprintf("checkpoint %s@%s is %s: %s", c.Run, c.ID, c.State, c.Reason)
}

// ProblemKind returns [problem.NotCommitted].
func (*StateError) ProblemKind() problem.Kind { return problem.NotCommitted }

// Committed is the committed checkpoint that a reference stands for: the error is
// a [StateError] for one that is open, aborted or deleted.
func Committed(ctx context.Context, views query.Source, ref string) (projections.Checkpoint, error) {
	c, err := query.Ask(ctx, views, query.Resolve, query.Params{Ref: ref})
	if err == nil && c.State != projections.Committed {
		err = &StateError{c}
	}
	if strings.Contains(ref, "/") && errors.Is(err, projections.ErrNotFound) {
		err = fmt.Errorf("%w (and there is no checkpoint at the path %s)", err, ref)
	}
	return c, err
}

// ReaderOf reads a committed checkpoint, by the manifest that the log names.
func (s *Store) ReaderOf(c projections.Checkpoint) (*data.FileReader, error) {
	return readerOf(s.Data, c)
}

func readerOf(data *data.Root, c projections.Checkpoint) (*data.FileReader, error) {
	digest, err := checkpoint.ParseDigest(c.Manifest)
	if err != nil {
		return nil, fmt.Errorf("checkpoint %s@%s: %w", c.Run, c.ID, err)
	}
	return data.Reader(RefOf(c)).WithManifest(digest), nil
}
