package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/foreign"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// OpenForeign opens a checkpoint of another program by its path: see
// [foreign.Open]. No store is needed. Chunks that overlap are an error
// that names them. What no chunk covers is none yet: see [VerifyForeign].
func OpenForeign(ctx context.Context, path string) (*data.Foreign, error) {
	full, err := filepath.Abs(path)
	if err == nil {
		// A link may lead elsewhere by the time that an adopted file is read.
		var real string
		if real, err = filepath.EvalSymlinks(full); err == nil {
			full = real
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("open checkpoint %s: %w%s", path, fs.ErrNotExist, beside(full))
	}
	if err != nil {
		return nil, fmt.Errorf("open checkpoint %s: %w", path, err)
	}
	f, err := foreign.Open(ctx, vfs.Default, full)
	if err != nil {
		return nil, err
	}
	var locals []checkpoint.Local
	for _, r := range f.Manifest().Ranks {
		locals = append(locals, checkpoint.Local{Rank: r.Rank, Items: f.Items(r.Rank)})
	}
	offers := planner.Dedup(locals)
	if err := offers.Overlaps(offers.Layout()); err != nil {
		return nil, fmt.Errorf("open checkpoint %s: %w", path, err)
	}
	return f, nil
}

// beside says what is there instead of a path: the nearest directory above it, and
// what it has.
func beside(path string) string {
	for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
		list, err := os.ReadDir(dir)
		if err != nil && dir != filepath.Dir(dir) {
			continue
		}
		var names []string
		for _, e := range list {
			if !strings.HasPrefix(e.Name(), ".") && (dir == filepath.Dir(path) || e.IsDir()) {
				names = append(names, e.Name())
			}
		}
		if near := projections.Near(filepath.Base(path), names); near != "" {
			return fmt.Sprintf(": in %s %s", dir, near)
		}
		return fmt.Sprintf(": %s is empty", dir)
	}
}

// VerifyForeign is [data.Foreign.Verify]. Parts of tensors that no chunk
// covers are findings as well.
func VerifyForeign(ctx context.Context, f *data.Foreign, progress func(bytes int64)) (data.Report, error) {
	report, err := f.Verify(ctx, progress)
	if err != nil {
		return report, err
	}
	for _, hole := range planner.Holes(f.Manifest().Layout) {
		found := data.Finding{Kind: data.Missing, File: f.Path(), Block: -1, Offset: -1, Problem: hole.Error()}
		if region := (*planner.MissingRegionError)(nil); errors.As(hole, &region) {
			found.FQN, found.Chunk, found.Problem = region.FQN, region.Region.String(), "no file holds this part of the tensor"
		}
		report.Findings = append(report.Findings, found)
	}
	return report, nil
}

// ExportTo writes a checkpoint into a directory: see [foreign.Export].
func ExportTo(ctx context.Context, from data.Reader, dir string, o foreign.ExportOptions) (foreign.Exported, error) {
	full, err := filepath.Abs(dir)
	if err != nil {
		return foreign.Exported{}, fmt.Errorf("export to %s: %w", dir, err)
	}
	return foreign.Export(ctx, from, vfs.Default, full, o)
}
