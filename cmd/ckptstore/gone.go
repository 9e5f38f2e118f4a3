package main

import (
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/ckptstore/ckptstore/internal/problem"
)

// goneEvery is how often a process looks whether the directory of its store is there.
const goneEvery = 200 * time.Millisecond

// exitWhenGone ends this process when a directory was removed, or another is in its
// place, until ctx ends. It ends at once: whatever else it wrote, to close the log in
// order too, could be written into a new store of that name.
func exitWhenGone(ctx context.Context, dir string, log *slog.Logger) {
	was, err := os.Stat(dir)
	if err != nil {
		return // what is opened there says why
	}
	go func() {
		tick := time.NewTicker(goneEvery)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if !gone(dir, was) {
				continue
			}
			log.Error("the directory of the store was removed, or another is in its place: this process ends, and writes nothing more", "store", dir)
			os.Exit(problem.NoStore.Ckptstore())
		}
	}()
}

// gone reports whether a directory is another than it was, or is being removed: no
// command takes the file away that says what store it is.
func gone(dir string, was fs.FileInfo) bool {
	is, err := os.Stat(dir)
	if err == nil && os.SameFile(is, was) {
		_, err = os.Lstat(filepath.Join(dir, "store.json"))
	} else if err == nil {
		return true
	}
	return errors.Is(err, fs.ErrNotExist)
}
