package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/transparency-dev/merkle/rfc6962"
	"github.com/transparency-dev/tessera/api"
	"github.com/transparency-dev/tessera/api/layout"
	"github.com/transparency-dev/tessera/client"
	"github.com/transparency-dev/tessera/fsck"
	"golang.org/x/mod/sumdb/note"
	"k8s.io/klog/v2"
)

// workers of one fsck. A worker ends with its first finding, and fsck blocks when none is
// left.
const workers = 8

// fsckLog has Tessera check the log at a URL: the signature of its head, each bundle of
// entries, each tile, and the root.
func fsckLog(ctx context.Context, o options, address string, out io.Writer) error {
	klog.LogToStderr(false) // Tessera's log of each check
	klog.SetOutput(io.Discard)
	key, err := logKey(o.policy)
	if err != nil {
		return err
	}
	root, err := url.Parse(address)
	if err != nil {
		return err
	}
	source, err := client.NewHTTPFetcher(root, &http.Client{Timeout: 30 * time.Second})
	if err != nil {
		return err
	}
	honest := &fetcher{from: source}
	if err := check(ctx, o.within, key, honest); err != nil {
		return fmt.Errorf("fsck %s: %w", address, err)
	}
	fmt.Fprintf(out, "tessera fsck: %s, %d entries: head, %d bundles and %d tiles are as the entries lead to, 0 findings\n",
		key.Name(), honest.entries, honest.count(bundleKind), honest.count(tileKind))
	if !o.flip {
		return nil
	}
	for _, name := range honest.names {
		flipped := &fetcher{from: source, flip: name}
		err := check(ctx, o.within, key, flipped)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case !flipped.changed():
			return fmt.Errorf("fsck: %s was not read again", name)
		case err == nil:
			return fmt.Errorf("fsck: it passes a log with a changed bit in %s", name)
		}
	}
	fmt.Fprintf(out, "tessera fsck: refused each of %d logs with one changed bit\n", len(honest.names))
	return nil
}

// check runs Tessera's fsck once. fsck stops the program on some damaged bundles, and may
// block after findings; both are errors here.
func check(ctx context.Context, within time.Duration, key note.Verifier, from *fetcher) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	f := fsck.New(key.Name(), key, from, leafHashes(from), fsck.Opts{N: workers})
	done := make(chan error, 1)
	go func() {
		defer func() {
			if p := recover(); p != nil {
				done <- fmt.Errorf("fsck panics: %v", p)
			}
		}()
		done <- f.Check(ctx)
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("fsck does not end: %w; it found\n%v", ctx.Err(), f.Status())
	}
}

// leafHashes returns the hashes of a bundle's entries. It is that of Tessera's own
// program: its decoder of bundles, and the hasher of transparency-dev.
func leafHashes(from *fetcher) func([]byte) ([][]byte, error) {
	return func(data []byte) ([][]byte, error) {
		var bundle api.EntryBundle
		if err := bundle.UnmarshalText(data); err != nil {
			return nil, err
		}
		var hashes [][]byte
		for _, e := range bundle.Entries {
			hashes = append(hashes, rfc6962.DefaultHasher.HashLeaf(e))
		}
		from.mu.Lock()
		defer from.mu.Unlock()
		from.entries += len(hashes)
		return hashes, nil
	}
}

// Kinds of what a fetcher reads.
const (
	headKind   = "head"
	bundleKind = "bundle"
	tileKind   = "tile"
)

// fetcher passes on what another one reads, with its names, and may change one bit of
// one of them.
type fetcher struct {
	from fsck.Fetcher
	flip string // name of what is changed

	mu      sync.Mutex
	names   []string // of what was read, each once
	kinds   map[string]int
	entries int
	flipped bool
}

var _ fsck.Fetcher = (*fetcher)(nil)

func (f *fetcher) count(kind string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.kinds[kind]
}

func (f *fetcher) changed() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.flipped
}

// pass records a read, and changes a bit at an offset that depends on the kind: within
// the first entry of a bundle, and else in the middle.
func (f *fetcher) pass(kind, name string, data []byte, err error) ([]byte, error) {
	if err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if !slices.Contains(f.names, name) {
		f.names = append(f.names, name)
		if f.kinds == nil {
			f.kinds = map[string]int{}
		}
		f.kinds[kind]++
	}
	if name == f.flip && len(data) > 0 {
		at := len(data) / 2
		if kind == bundleKind {
			at = min(40, len(data)-1)
		}
		data = slices.Clone(data)
		data[at] ^= flippedBit
		f.flipped = true
	}
	return data, nil
}

// ReadCheckpoint implements [fsck.Fetcher].
func (f *fetcher) ReadCheckpoint(ctx context.Context) ([]byte, error) {
	data, err := f.from.ReadCheckpoint(ctx)
	return f.pass(headKind, "checkpoint", data, err)
}

// ReadTile implements [fsck.Fetcher].
func (f *fetcher) ReadTile(ctx context.Context, level, index uint64, width uint8) ([]byte, error) {
	data, err := f.from.ReadTile(ctx, level, index, width)
	return f.pass(tileKind, layout.TilePath(level, index, width), data, err)
}

// ReadEntryBundle implements [fsck.Fetcher].
func (f *fetcher) ReadEntryBundle(ctx context.Context, index uint64, width uint8) ([]byte, error) {
	data, err := f.from.ReadEntryBundle(ctx, index, width)
	return f.pass(bundleKind, layout.EntriesPath(index, width), data, err)
}
