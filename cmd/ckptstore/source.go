package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// source is a checkpoint that a command reads, from a store or from another program.
type source struct {
	reader     data.Reader
	manifest   checkpoint.Manifest
	name       string // for messages
	store      string // identity of the store; empty for a checkpoint of another program
	checkpoint projections.Checkpoint
	foreign    *data.Foreign // nil for a checkpoint of a store
}

// pathHelp describes which references are paths.
const pathHelp = `REF may also be the path of a PyTorch DCP directory, a .safetensors file or a Hugging
Face directory; no store is needed then. REF is a path if it begins with /, ./ or ../,
or if it names such a directory or file. A name without / that is also a run of the
store is ambiguous and refused: use ./NAME for the path, NAME@latest for the
checkpoint.`

// spelledPath reports whether a reference can only be a path.
func spelledPath(ref string) bool {
	return filepath.IsAbs(ref) || ref == "." || ref == ".." || strings.HasPrefix(ref, "./") || strings.HasPrefix(ref, "../")
}

// checkpointAt reports whether a path has a checkpoint. Other directories do not count,
// because any directory may have the name of a run.
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

// isPath reports whether a reference is meant as a path. It looks for a bare name in
// the store first, so that an unrelated path is not mistaken for the run of that name.
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
		return false, fmt.Errorf("%q is a path and may also be in the store %s: %w; use ./%s for the path", ref, jetlog.Redacted(a.location), err, ref)
	case known && strings.Contains(ref, "@"):
		a.Warn("reading %s from the store %s; use ./%s for the path of that name", ref, jetlog.Redacted(a.location), ref)
		return false, nil
	case known:
		return false, console.Usagef("%q is a run of the store %s and a path; use %s@latest or ./%s", ref, jetlog.Redacted(a.location), ref, ref)
	}
	if a.named {
		a.Warn("reading the path ./%s: the store %s has no run or checkpoint of that name", ref, jetlog.Redacted(a.location))
	}
	return true, nil
}

// knows reports whether a store has the checkpoint of a reference, or a run with which
// the reference begins.
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

// ignored returns err unless it is the given one.
func ignored(err, one error) error {
	if errors.Is(err, one) {
		return nil
	}
	return err
}

// runOf returns the run and the trial that an argument RUN or RUN/TRIAL and the flag --trial name;
// trial is empty if neither does.
func runOf(ctx context.Context, views query.Source, arg, flag string) (run, trial string, err error) {
	if run, trial, err = answer.Named(ctx, views, arg); err != nil {
		return "", "", err
	}
	if trial != "" && flag != "" && trial != flag {
		return "", "", console.Usagef("%s and --trial %s: give one of them", arg, flag)
	}
	return run, cmp.Or(trial, flag), nil
}

// refOf returns the reference of a checkpoint: RUN@ID, and RUN/TRIAL@ID for a trial of a search.
func refOf(run, trial, id string) string {
	if trial == "" || trial == projections.DefaultTrial {
		return run + "@" + id
	}
	return run + "/" + trial + "@" + id
}

// openPath opens a checkpoint of another program.
func openPath(ctx context.Context, path string) (source, error) {
	f, err := store.OpenForeign(ctx, path)
	if errors.Is(err, fs.ErrNotExist) {
		return source{}, fmt.Errorf("%w: %w; give the path of a DCP directory, a .safetensors file or a Hugging Face directory", projections.ErrNotFound, err)
	}
	if err != nil {
		return source{}, err
	}
	s := source{reader: f, manifest: f.Manifest(), name: path, foreign: f}
	return s, f.SetUp(ctx, s.manifest, true)
}

// all is the fqn of commands that read all tensors.
const all = ""

// withSource opens the checkpoint of a reference for one command, with the log or,
// offline, by receipts alone. fqn is the tensor that the command reads, or all.
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

// withReader reads the manifest of a source and sets up its reader.
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

// offlineHelp describes references without a log.
const offlineHelp = `With --offline, REF is resolved by the receipts in the data directory alone, without
the lock, the log or the views. RUN and RUN@latest are then the run's last committed
checkpoint, which may have been superseded; tags and RUN@best:METRIC are unknown.`

// byReceipts reports whether the store must be read by its receipts, and warns if so.
// This process does not open the log if it cannot write to the store, or if other users
// can.
func (a *app) byReceipts() bool {
	why := store.ReadOnly(a.location)
	if why != nil {
		a.Warn("warning: reading the store by its receipts, as with --offline: %v", why)
	}
	return why != nil
}

// receipts returns the receipts of the data directory. It warns of damaged receipts,
// because a reference may resolve differently without them.
func (a *app) receipts(ctx context.Context) (*data.Root, []checkpoint.Receipt, error) {
	data, err := a.data()
	if err != nil {
		return nil, nil, err
	}
	list, damaged, err := data.Checkpoints(ctx)
	for _, d := range damaged {
		a.Warn("skipped: %v", d.Problem())
	}
	return data, list, err
}

// withOffline opens the checkpoint of a reference without the log.
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
		return console.Usagef("%q is a run of the store %s and a path; use ./%s, or %s@latest from another directory", ref, jetlog.Redacted(a.location), ref, ref)
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
