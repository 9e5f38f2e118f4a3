package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// source is a checkpoint that a command reads: one of a store, or one of
// another program.
type source struct {
	reader     data.Reader
	manifest   checkpoint.Manifest
	name       string // as people call it
	store      string // identity; empty for one of another program
	checkpoint projections.Checkpoint
	foreign    *data.Foreign // nil for one of a store
}

// pathHelp says what of a REF is a path.
const pathHelp = `REF may be the path of a PyTorch DCP directory, of a .safetensors file, or of
a Hugging Face directory; then no store is needed. A REF is a path if it begins
with / or ./ or ../, or if it names such a directory or file. A name without /
that is also a run of the store is refused: ./NAME is the path, NAME@latest the
checkpoint.`

// spelledPath reports whether a reference can be nothing but a path.
func spelledPath(ref string) bool {
	return filepath.IsAbs(ref) || ref == "." || ref == ".." || strings.HasPrefix(ref, "./") || strings.HasPrefix(ref, "../")
}

// checkpointAt reports whether a path has a checkpoint. A run may have the name
// of any directory, so that no other counts.
func checkpointAt(path string) bool {
	info, err := os.Stat(path)
	if err != nil {
		return false
	}
	if !info.IsDir() {
		return true
	}
	if _, err := os.Stat(filepath.Join(path, ".metadata")); err == nil {
		return true
	}
	tensors, err := filepath.Glob(filepath.Join(path, "*.safetensors"))
	return err == nil && len(tensors) > 0
}

// isPath reports whether a reference is meant as a path. A bare name is looked
// for in the store first: what is at the path has nothing to do with a run of
// that name, and would pass for it.
func (a *app) isPath(ctx context.Context, ref string) (bool, error) {
	if spelledPath(ref) {
		return true, nil
	}
	if !checkpointAt(ref) {
		return false, nil
	}
	if strings.Contains(ref, "/") {
		return true, nil
	}
	known := false
	err := a.read(ctx, func(s *store.Store) (err error) {
		known, err = knows(ctx, s, ref)
		return err
	})
	switch {
	case errors.Is(err, store.ErrNoStore) && !a.named:
		return true, nil
	case err != nil:
		return false, fmt.Errorf("there is a path ./%s, and whether %q is also in the store %s cannot be seen: say ./%s for the path: %w", ref, ref, jetlog.Redacted(a.location), ref, err)
	case known && strings.Contains(ref, "@"):
		a.Warn("%s is read from the store %s; say ./%s for the path of that name", ref, jetlog.Redacted(a.location), ref)
		return false, nil
	case known:
		return false, console.Usagef("%q is a run of the store %s and a path: say ./%s or %s@latest", ref, jetlog.Redacted(a.location), ref, ref)
	}
	if a.named {
		a.Warn("the path ./%s is read: the store %s has no run or checkpoint of that name", ref, jetlog.Redacted(a.location))
	}
	return true, nil
}

// knows reports whether a store has a checkpoint that a reference stands for,
// or a run that it begins with.
func knows(ctx context.Context, s *store.Store, ref string) (bool, error) {
	runs, err := query.Ask(ctx, s.Views(), query.Runs, query.Params{})
	if err != nil {
		return false, err
	}
	for _, run := range runs {
		if ref == run.Name || strings.HasPrefix(ref, run.Name+"@") {
			return true, nil
		}
	}
	_, err = query.Ask(ctx, s.Views(), query.Resolve, query.Params{Ref: ref})
	if errors.Is(err, projections.ErrNotFound) || errors.Is(err, projections.ErrReference) {
		return false, nil
	}
	return err == nil || errors.Is(err, projections.ErrAmbiguous), ignored(err, projections.ErrAmbiguous)
}

// ignored is err unless it is a certain one.
func ignored(err, one error) error {
	if errors.Is(err, one) {
		return nil
	}
	return err
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

// all is the tensor that a command asks for, when it asks for any.
const all = ""

// withSource opens what a reference names for one command, with the log or,
// offline, by receipts alone. A command that asks for one tensor names it.
func (a *app) withSource(ctx context.Context, ref, fqn string, offline bool, do func(source) error) error {
	if offline || !spelledPath(ref) && a.byReceipts() {
		return a.withOffline(ctx, ref, fqn, do)
	}
	path, err := a.isPath(ctx, ref)
	if err != nil {
		return err
	}
	if path {
		return withPath(ctx, ref, do)
	}
	return a.read(ctx, func(st *store.Store) error {
		c, err := store.Committed(ctx, st.Views(), ref)
		if err != nil {
			return err
		}
		r, err := st.ReaderOf(c)
		if err != nil {
			return err
		}
		return withReader(ctx, r.Only(fqn), source{name: c.Run + "@" + c.ID, store: st.ID, checkpoint: c}, do)
	})
}

// withPath opens a checkpoint of another program for one command.
func withPath(ctx context.Context, path string, do func(source) error) error {
	s, err := openPath(ctx, path)
	if err != nil {
		return err
	}
	return do(s)
}

// withReader reads the manifest of a source and sets its reader up.
func withReader(ctx context.Context, r data.Reader, s source, do func(source) error) error {
	m, err := r.ReadMetadata(ctx)
	if err == nil {
		err = r.SetUp(ctx, m, true)
	}
	if err != nil {
		return err
	}
	s.reader, s.manifest = r, m
	return do(s)
}

// offlineHelp says what a REF may be without a log.
const offlineHelp = `With --offline the receipts in the data directory alone are read, without the
lock, the log or the views. Then RUN and RUN@latest are the checkpoint of the run
that was committed last, perhaps superseded since, and tags and RUN@best:METRIC
are not known.`

// byReceipts reports that the log of the store is not opened, because this process
// may not write there or others can, and warns of it. What the receipts say can be
// read all the same.
func (a *app) byReceipts() bool {
	why := store.ReadOnly(a.location)
	if why != nil {
		a.Warn("warning: read by its receipts, as with --offline: %v", why)
	}
	return why != nil
}

// receipts are those of the data directory. One that is damaged is warned of:
// what a reference stands for must not change because of it in silence.
func (a *app) receipts(ctx context.Context) (*data.Root, []checkpoint.Receipt, error) {
	data, err := a.data()
	if err != nil {
		return nil, nil, err
	}
	list, damaged, err := data.Checkpoints(ctx)
	for _, d := range damaged {
		a.Warn("left out: %v", d.Problem())
	}
	return data, list, err
}

// withOffline opens what a reference names, without a log.
func (a *app) withOffline(ctx context.Context, ref, fqn string, do func(source) error) error {
	if spelledPath(ref) || strings.Contains(ref, "/") && checkpointAt(ref) {
		return withPath(ctx, ref, do)
	}
	root, list, err := a.receipts(ctx)
	known := slices.ContainsFunc(list, func(r checkpoint.Receipt) bool { return ref == r.Run || strings.HasPrefix(ref, r.Run+"@") })
	switch at := checkpointAt(ref); {
	case at && errors.Is(err, store.ErrNoStore) && !a.named:
		return withPath(ctx, ref, do)
	case err != nil:
		return err
	case at && known:
		return console.Usagef("%q is a run of the store %s and a path: say ./%s, or %s@latest in another directory", ref, jetlog.Redacted(a.location), ref, ref)
	case at:
		return withPath(ctx, ref, do)
	}
	receipt, err := store.FindReceipt(list, ref)
	if err != nil {
		return err
	}
	return withReader(ctx, root.Reader(receipt.Ref).Only(fqn), source{
		name: receipt.Run + "@" + receipt.Checkpoint, store: receipt.Store, checkpoint: store.RowOf(receipt),
	}, do)
}
