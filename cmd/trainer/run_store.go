package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/ckptstore/ckptstore/store"
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
