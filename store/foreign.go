package store

import (
	"context"
	"fmt"
	"path/filepath"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/planner/plan"
	"github.com/ckptstore/ckptstore/storage"
)

// OpenForeign opens a checkpoint of another program by its path: see
// [storage.OpenForeign]. No store is needed. Chunks that overlap or leave a
// hole are an error that names them all.
func OpenForeign(ctx context.Context, path string) (*storage.Foreign, error) {
	full, err := filepath.Abs(path)
	if err == nil {
		// A link may lead elsewhere by the time that an adopted file is read.
		full, err = filepath.EvalSymlinks(full)
	}
	if err != nil {
		return nil, fmt.Errorf("open checkpoint %s: %w", path, err)
	}
	f, err := storage.OpenForeign(ctx, vfs.Default, full)
	if err != nil {
		return nil, err
	}
	var locals []plan.Local
	for _, r := range f.Manifest().Ranks {
		locals = append(locals, plan.Local{Rank: r.Rank, Items: f.Items(r.Rank)})
	}
	if _, err := planner.Global(locals); err != nil {
		return nil, fmt.Errorf("open checkpoint %s: %w", path, err)
	}
	return f, nil
}

// ExportTo writes a checkpoint into a directory: see [storage.Export].
func ExportTo(ctx context.Context, from storage.Reader, dir string, o storage.ExportOptions) (storage.Exported, error) {
	full, err := filepath.Abs(dir)
	if err != nil {
		return storage.Exported{}, fmt.Errorf("export to %s: %w", dir, err)
	}
	return storage.Export(ctx, from, vfs.Default, full, o)
}
