package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/store"
	"github.com/ckptstore/ckptstore/web"
	"github.com/ckptstore/ckptstore/worker"
)

// ensureStore makes a store where there is none, also where a trainer was
// killed while it made one.
func ensureStore(ctx context.Context, location string, patience time.Duration, log *slog.Logger) error {
	if store.IsURL(location) {
		return nil
	}
	patient, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := os.Lstat(filepath.Join(location, "store.json")); err == nil || !errors.Is(err, os.ErrNotExist) {
			return nil // opening it says what is wrong with it
		}
		id, err := store.Init(ctx, location, "")
		switch {
		case err == nil:
			log.Info("made a new store", "store", location, "id", id)
			return nil
		case errors.Is(err, store.ErrExists):
			return nil // another trainer was faster
		case !errors.Is(err, store.ErrLocked):
			return err
		}
		select { // another trainer is making it
		case <-tick.C:
		case <-patient.Done():
			return err
		}
	}
}

// views are the questions of a job, put to the store.
type views struct{ source web.Source }

var _ worker.Views = views{}

// Trial implements worker.Views.
func (v views) Trial(ctx context.Context, run, trial string) (projections.Trial, error) {
	return web.Ask(ctx, v.source, web.Trial, web.Params{Run: run, Trial: trial})
}

// Attempts implements worker.Views.
func (v views) Attempts(ctx context.Context, run, trial string) ([]projections.Attempt, error) {
	return web.Ask(ctx, v.source, web.Attempts, web.Params{Run: run, Trial: trial})
}

// OpenCheckpoints implements worker.Views.
func (v views) OpenCheckpoints(ctx context.Context, run, trial string) ([]projections.Checkpoint, error) {
	return web.Ask(ctx, v.source, web.OpenCheckpoints, web.Params{Run: run, Trial: trial})
}

// Resolve implements worker.Views.
func (v views) Resolve(ctx context.Context, ref string) (projections.Checkpoint, error) {
	return web.Ask(ctx, v.source, web.Resolve, web.Params{Ref: ref})
}
