package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/durable"
)

// URLOptions say how to make a store on a server.
type URLOptions struct {
	Data     string  // absolute path of a directory that every node of every job sees
	Replicas int     // servers that keep a copy of the log; 0: three on a cluster that has them, else one
	Access   *Access // nil reads the environment
}

// Made says what was made.
type Made struct {
	Store    string `json:"store"`
	Location string `json:"location"` // without its password
	Replicas int    `json:"replicas"`
}

// InitURL makes a new store on a NATS server.
func InitURL(ctx context.Context, url string, o URLOptions) (Made, error) {
	url, isURL, err := parseLocation(url)
	where := jetlog.Redacted(url)
	if err != nil {
		return Made{}, fmt.Errorf("init: %w", err)
	}
	if !isURL {
		return Made{}, fmt.Errorf("init %s: %w: it is no URL", url, ErrLocation)
	}
	if o.Data == "" || !filepath.IsAbs(o.Data) {
		return Made{}, fmt.Errorf("init %s: %w: --data must be the absolute path of a directory that every node sees, got %q", where, ErrLocation, o.Data)
	}
	if o.Replicas < 0 || o.Replicas > 5 || o.Replicas > 0 && o.Replicas%2 == 0 {
		return Made{}, fmt.Errorf("init %s: %w: --replicas %d: want 1, 3 or 5: an even number survives no more failures than the odd one below it", where, ErrLocation, o.Replicas)
	}
	log, err := dialURL(ctx, url, o.Access, jetlog.Options{Replicas: o.Replicas})
	if err != nil {
		return Made{}, fmt.Errorf("init: %w", err)
	}
	defer log.Close()
	created, info, err := log.Open(ctx)
	switch {
	case err == nil && info.Last == 1 && created.Data == o.Data && !exists(filepath.Join(o.Data, markName)):
		// An init that was cut before its last step.
		if err := log.CreateBuckets(ctx); err != nil {
			return Made{}, fmt.Errorf("init: %w", err)
		}
		return finish(o.Data, created.Store, where, info.Replicas)
	case err == nil && created.Data == o.Data:
		// Stores of earlier versions have no buckets until somebody needs them.
		if err := log.CreateBuckets(ctx); err != nil {
			return Made{}, fmt.Errorf("init: %w", err)
		}
		return Made{}, fmt.Errorf("init %s: %w: it is %s, with its data in %s, and has all that it needs", where, ErrExists, created.Store, created.Data)
	case err == nil:
		return Made{}, fmt.Errorf("init %s: %w: it is %s, with its data in %s", where, ErrExists, created.Store, created.Data)
	case !errors.Is(err, jetlog.ErrNoLog):
		return Made{}, fmt.Errorf("init %s: what is there is not written over: %w", where, damage(err))
	}
	// The directory outlives a log that cannot be seen, as when its server runs
	// with another key. A log made in its place would destroy it.
	if id, err := readMark(o.Data); err == nil {
		return Made{}, fmt.Errorf("init %s: %w: %s holds the data of store %s, and the server does not show its log: start the server as it was, with its directory and key; for another store, choose another --data",
			where, ErrExists, o.Data, id.Store)
	} else if !errors.Is(err, os.ErrNotExist) {
		return Made{}, fmt.Errorf("init: %w", err)
	}
	if err := os.MkdirAll(o.Data, 0o700); err != nil {
		return Made{}, fmt.Errorf("init: %w", err)
	}
	for _, sub := range []string{"data", "blobs"} {
		if err := beneath.At(o.Data).MkdirAll(filepath.Join(o.Data, sub), 0o700); err != nil {
			return Made{}, fmt.Errorf("init: %w", err)
		}
	}
	if err := tryOut(o.Data); err != nil {
		return Made{}, err
	}
	id := NewID()
	if err := create(ctx, log, id, o.Data); err != nil {
		return Made{}, fmt.Errorf("init: %w", err)
	}
	if err := log.CreateBuckets(ctx); err != nil {
		return Made{}, fmt.Errorf("init: %w", err)
	}
	if info, err = log.Info(ctx); err != nil {
		return Made{}, fmt.Errorf("init: %w", err)
	}
	return finish(o.Data, id, where, info.Replicas)
}

// finish says durably whose data is in dir.
func finish(dir, id, where string, replicas int) (Made, error) {
	text, err := json.MarshalIndent(identity{Product: product, Store: id, Format: Format, Created: time.Now().UTC()}, "", "  ")
	if err == nil {
		err = durable.Write(filepath.Join(dir, markName), append(text, '\n'))
	}
	if err != nil {
		return Made{}, fmt.Errorf("init: %w", err)
	}
	return Made{Store: id, Location: where, Replicas: replicas}, nil
}
