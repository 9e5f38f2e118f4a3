package store

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"
)

// Ensure makes a store where there is none, also where a process was killed
// while it made one. On a server a store is made by [Init] alone.
func Ensure(ctx context.Context, location string, patience time.Duration, log *slog.Logger) error {
	_, isURL, err := parseLocation(location)
	if err != nil {
		return fmt.Errorf("make the store: %w", err)
	}
	if isURL {
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
		id, err := Init(ctx, location, "")
		switch {
		case err == nil:
			log.Info("made a new store", "store", location, "id", id)
			return nil
		case errors.Is(err, ErrExists):
			return nil // another trainer was faster
		case errors.As(err, new(*fs.PathError)):
			return fmt.Errorf("%w: no store can be made in %s: name a directory that this user may write in, by --store (in Python ckptstore.init(store=…), or CKPTSTORE_STORE)", err, location)
		case !errors.Is(err, ErrLocked):
			return err
		}
		select { // another trainer is making it
		case <-tick.C:
		case <-patient.Done():
			return err
		}
	}
}
