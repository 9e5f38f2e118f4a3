package reading

import (
	"context"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
)

// source is a checkpoint that is read. A checkpoint at a path has the path as its
// ID, and step -1.
type source struct {
	row      projections.Checkpoint
	manifest checkpoint.Manifest
	reader   data.Reader
	loader   *planner.Loader
}

// kept is how many checkpoints of the store stay open: callers that read a tensor
// read another one of the same checkpoint next.
const kept = 4

// sources caches the checkpoints of the store that were read last, newest first.
// A checkpoint at a path may be replaced at any time, and is never cached.
type sources struct {
	mu   sync.Mutex
	last []*source
}

// find returns the open source of a checkpoint, or nil.
func (s *sources) find(row projections.Checkpoint) *source {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.IndexFunc(s.last, func(have *source) bool { return have.is(row) })
	if i < 0 {
		return nil
	}
	found := s.last[i]
	copy(s.last[1:i+1], s.last[:i])
	s.last[0] = found
	return found
}

func (s *source) is(row projections.Checkpoint) bool {
	return s.row.Run == row.Run && s.row.Trial == row.Trial && s.row.ID == row.ID && s.row.Manifest == row.Manifest
}

// add caches a source.
func (s *sources) add(of *source) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last = slices.Insert(s.last, 0, of)
	s.last = s.last[:min(len(s.last), kept)]
}

// source opens the checkpoint that a reference names.
func (s *Server) source(ctx context.Context, ref string) (*source, error) {
	switch {
	case ref == "":
		return nil, problem.Errorf(problem.Invalid, "ref is empty: give RUN, RUN@NAME, an ID or the path of a checkpoint")
	case filepath.IsAbs(ref):
		return openPath(ctx, ref)
	case ref == ".", ref == "..", strings.HasPrefix(ref, "./"), strings.HasPrefix(ref, "../"):
		return nil, problem.Errorf(problem.Invalid, "ref %q is a path from the caller's directory, which is not known here: give an absolute one", ref)
	}
	row, err := s.catalog.Committed(ctx, ref)
	if err != nil {
		return nil, err
	}
	if found := s.sources.find(row); found != nil {
		now := *found
		now.row = row // with the current attachments
		return &now, nil
	}
	reader, err := s.catalog.ReaderOf(row)
	if err != nil {
		return nil, err
	}
	m, err := reader.ReadMetadata(ctx)
	if err == nil {
		err = reader.SetUp(ctx, m, true)
	}
	if err != nil {
		return nil, err
	}
	out := &source{row: row, manifest: m, reader: reader, loader: planner.NewLoader(m.Layout)}
	s.sources.add(out)
	return out, nil
}

// openPath opens a checkpoint of another program.
func openPath(ctx context.Context, path string) (*source, error) {
	f, err := store.OpenForeign(ctx, path)
	if err != nil {
		return nil, notFound(path, err)
	}
	m := f.Manifest()
	if err := f.SetUp(ctx, m, true); err != nil {
		return nil, err
	}
	row := projections.Checkpoint{ID: f.Path(), Name: m.Name, Step: -1, State: projections.Committed, Bytes: m.Layout.Bytes()}
	return &source{row: row, manifest: m, reader: f, loader: planner.NewLoader(m.Layout)}, nil
}
