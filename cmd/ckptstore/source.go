package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/storage"
	"github.com/ckptstore/ckptstore/store"
	"github.com/ckptstore/ckptstore/web"
)

// source is a checkpoint that a command reads: one of a store, or one of
// another program.
type source struct {
	reader     storage.Reader
	manifest   plan.Manifest
	name       string // as people call it
	store      string // identity; empty for one of another program
	checkpoint projections.Checkpoint
	foreign    *storage.Foreign // nil for one of a store
}

// pathHelp says what of a REF is a path.
const pathHelp = `REF may be the path of a PyTorch DCP directory, of a .safetensors file, or of
a Hugging Face directory; then no store is needed. A REF is a path if it begins
with / or ./ or ../, or if it names such a directory or file.`

// isPath reports whether a reference is meant as a path. A run may have the
// name of any directory, so that only a checkpoint counts.
func isPath(ref string) bool {
	if filepath.IsAbs(ref) || ref == "." || ref == ".." || strings.HasPrefix(ref, "./") || strings.HasPrefix(ref, "../") {
		return true
	}
	info, err := os.Stat(ref)
	if err != nil {
		return false
	}
	if !info.IsDir() {
		return true
	}
	if _, err := os.Stat(filepath.Join(ref, ".metadata")); err == nil {
		return true
	}
	tensors, err := filepath.Glob(filepath.Join(ref, "*.safetensors"))
	return err == nil && len(tensors) > 0
}

// openPath opens a checkpoint of another program.
func openPath(ctx context.Context, path string) (source, error) {
	f, err := store.OpenForeign(ctx, path)
	if errors.Is(err, fs.ErrNotExist) {
		return source{}, fmt.Errorf("%w: give the path of a DCP directory, of a .safetensors file or of a Hugging Face directory: %w", projections.ErrNotFound, err)
	}
	if err != nil {
		return source{}, err
	}
	s := source{reader: f, manifest: f.Manifest(), name: path, foreign: f}
	return s, f.SetUp(ctx, s.manifest, true)
}

// committed is the committed checkpoint that a reference stands for.
func committed(ctx context.Context, views web.Source, ref string) (projections.Checkpoint, error) {
	c, err := web.Ask(ctx, views, web.Resolve, web.Params{Ref: ref})
	if err == nil && c.State != projections.Committed {
		err = fmt.Errorf("checkpoint %s@%s is %s: %s", c.Run, c.ID, c.State, c.Reason)
	}
	if strings.Contains(ref, "/") && errors.Is(err, projections.ErrNotFound) {
		err = fmt.Errorf("%w (and there is no checkpoint at the path %s)", err, ref)
	}
	return c, err
}

// withSource opens what a reference names for one command.
func (a *app) withSource(ctx context.Context, ref string, do func(source) error) error {
	if isPath(ref) {
		s, err := openPath(ctx, ref)
		if err != nil {
			return err
		}
		return do(s)
	}
	return a.with(ctx, func(st *store.Store) error {
		c, err := committed(ctx, st.Views(), ref)
		if err != nil {
			return err
		}
		digest, err := plan.ParseDigest(c.Manifest)
		if err != nil {
			return err
		}
		r := st.Data.Reader(store.RefOf(c)).WithManifest(digest)
		m, err := r.ReadMetadata(ctx)
		if err == nil {
			err = r.SetUp(ctx, m, true)
		}
		if err != nil {
			return err
		}
		return do(source{reader: r, manifest: m, name: c.Run + "@" + c.ID, store: st.ID, checkpoint: c})
	})
}
