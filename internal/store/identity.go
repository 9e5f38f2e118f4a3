package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/logpeers"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/store/place"
	"github.com/ckptstore/ckptstore/internal/store/sockets"
)

// identity is store.json.
type identity struct {
	Product string    `json:"product"`
	Store   string    `json:"store"`
	Format  int       `json:"format"`
	Created time.Time `json:"created"`
	// For a store recovered from receipts: its earlier identities, the newest first, and
	// the sequence at which its log ended then.
	Formerly  []string `json:"formerly,omitempty"`
	Recovered uint64   `json:"recovered,omitempty"`
	// Copy names a backup or a restored store. Store is the identity in its log, which it
	// shares with the original.
	Copy string `json:"copy,omitempty"`
	// Data is the URL of the bucket that has the checkpoints and blobs; empty if they are in
	// the directory.
	Data string `json:"data,omitempty"`
	// Owner is the user or group that the directory belongs to; nil in a store of an earlier version.
	// Earlier versions ignore it.
	Owner *ownerRecord `json:"owner,omitempty"`
}

// runtime returns the name of the directory for sockets. A copy has its own.
func (id identity) runtime() string {
	if id.Copy != "" {
		return id.Copy
	}
	return id.Store
}

const product = "ckptstore"

// readIdentity reads and checks DIR/store.json. It returns an error if an interrupted
// recovery is unfinished.
func readIdentity(dir string) (identity, error) {
	if err := recovering(dir); err != nil {
		return identity{}, err
	}
	return identityIn(dir)
}

func recovering(dir string) error {
	if path := filepath.Join(dir, recoverName); exists(path) {
		return fmt.Errorf("%w: %s records an unfinished recovery: run the same `ckptstore recover` again, which finishes it", ErrDamaged, path)
	}
	return nil
}

func identityIn(dir string) (identity, error) {
	path := filepath.Join(dir, "store.json")
	data, err := readFile(path)
	if errors.Is(err, os.ErrNotExist) {
		if cut := unfinished(dir); cut != nil {
			return identity{}, cut
		}
	}
	if errors.Is(err, os.ErrNotExist) && logpeers.Replicated(dir) {
		return identity{}, fmt.Errorf("%w in %s with a log of one copy: its log is in three copies, %s to %s or on the disks of its nodes: this command cannot use it; `ckptstore ls` and a job with --log-replicas 3 can", ErrNoStore, dir, logpeers.CopyDir(dir, 0), filepath.Base(logpeers.CopyDir(dir, logpeers.Copies-1)))
	}
	if errors.Is(err, os.ErrNotExist) && hasData(dir) {
		return identity{}, fmt.Errorf("%w in %s: store.json is missing, but data/ exists: restore that file from a backup, or run `ckptstore recover --store %s`; `ckptstore ls --offline` lists the checkpoints", ErrNoStore, dir, dir)
	}
	if errors.Is(err, syscall.ENOTDIR) {
		return identity{}, fmt.Errorf("%w in %s: it is a file: name a directory with --store", ErrNoStore, dir)
	}
	if errors.Is(err, os.ErrNotExist) {
		return identity{}, fmt.Errorf("%w in %s: make one with `ckptstore init --store %s`, or name another with --store", ErrNoStore, dir, dir)
	}
	if err != nil {
		return identity{}, fmt.Errorf("open store: %w", err)
	}
	var id identity
	if err := json.Unmarshal(data, &id); err != nil {
		return id, fmt.Errorf("%w: %s is not valid JSON: %w: restore the file from a backup, or run `ckptstore recover`; `ckptstore ls --offline` still lists the checkpoints", ErrDamaged, path, err)
	}
	switch {
	case id.Product != product:
		return id, fmt.Errorf("%w: %s was written by %q, not by %s: name another directory with --store", ErrForeign, path, id.Product, product)
	case id.Format > Format:
		return id, fmt.Errorf("%w: %s has format %d, this program knows format %d: upgrade it", ErrNewer, path, id.Format, Format)
	case id.Format < 1 || id.Store == "":
		return id, fmt.Errorf("%w: %s has no identity or format: restore the file from a backup, or run `ckptstore recover`", ErrDamaged, path)
	}
	return id, nil
}

// hasData reports whether a directory may hold checkpoints. After an interrupted init it
// does not.
func hasData(dir string) bool {
	entries, err := beneath.At(dir).ReadDir(filepath.Join(dir, "data"))
	return err == nil && len(entries) > 0
}

// ErrLocation reports a location that is neither a directory nor the URL of a server that
// can hold a log.
var ErrLocation = problem.New(problem.Invalid, "bad store location")

// IsURL reports whether a location names a server rather than a directory.
func IsURL(location string) bool {
	_, isURL, err := parseLocation(location)
	return isURL && err == nil
}

// parseLocation returns a directory unchanged, or a list of URLs with their schemes in
// lower case. Text that only looks like a URL is an error: a directory of that name would
// surprise the user.
func parseLocation(location string) (normal string, isURL bool, err error) {
	if place.IsBucket(location) {
		return "", true, fmt.Errorf("%w %s: a bucket has the checkpoints of a store, not its log: name the store's directory or server, or read the bucket alone with `--offline --store %s`", ErrLocation, place.Redacted(location), place.Redacted(location))
	}
	head, after, ok := strings.Cut(location, ":")
	if !ok || !strings.HasPrefix(after, "/") || strings.ContainsAny(head, "/.") {
		return location, false, nil // a directory, perhaps of a strange name
	}
	var list []string
	for _, text := range strings.Split(location, ",") {
		text = strings.TrimSpace(text)
		scheme, rest, ok := strings.Cut(text, ":")
		if !ok || !strings.HasPrefix(rest, "/") {
			list = append(list, text) // HOST:PORT, after a first URL
			continue
		}
		scheme = strings.ToLower(scheme)
		if !strings.HasPrefix(rest, "//") || scheme != "nats" && scheme != "tls" {
			return "", true, fmt.Errorf("%w %s: it looks like a URL; supported are nats://HOST:PORT and tls://HOST:PORT; write a directory of such a name as ./NAME",
				ErrLocation, jetlog.Redacted(location))
		}
		list = append(list, scheme+":"+rest)
	}
	return strings.Join(list, ","), true, nil
}

// Whereabouts tells a process where the owner of a store can be found.
type Whereabouts struct {
	ID       string
	Location string // an absolute path, or a URL as it was given
	Name     string // the location for messages: a URL without its password
	Runtime  string // private directory for sockets of this store; Locate makes it
	Dir      string // with the store's files, shared by all machines; behind a URL, that of the data
}

// Identity returns a store's ID without opening its log or making its runtime directory.
// It connects only to a URL.
func Identity(ctx context.Context, o Options) (string, error) {
	location, isURL, err := parseLocation(o.Location)
	if err != nil {
		return "", fmt.Errorf("find the store: %w", err)
	}
	if isURL || logpeers.Replicated(location) {
		s, err := Open(ctx, o)
		if err != nil {
			return "", err
		}
		return s.ID, s.Close()
	}
	dir, err := filepath.Abs(location)
	if err != nil {
		return "", fmt.Errorf("find the store: %w", err)
	}
	id, err := identityIn(dir)
	return id.Store, err
}

// Locate finds a store without opening it. It touches neither lock nor log of a directory.
// It asks the server of a URL for the store's identity.
func Locate(ctx context.Context, o Options) (Whereabouts, error) {
	location, isURL, err := parseLocation(o.Location)
	if err != nil {
		return Whereabouts{}, fmt.Errorf("find the store: %w", err)
	}
	if isURL || logpeers.Replicated(location) {
		s, err := Open(ctx, o)
		if err != nil {
			return Whereabouts{}, err
		}
		return Whereabouts{s.ID, location, s.Location, s.Runtime, s.Dir()}, s.Close()
	}
	dir, err := filepath.Abs(location)
	if err != nil {
		return Whereabouts{}, fmt.Errorf("find the store: %w", err)
	}
	id, err := readIdentity(dir)
	if err != nil {
		return Whereabouts{}, err
	}
	runtime, err := sockets.Dir(id.runtime())
	if err != nil {
		return Whereabouts{}, fmt.Errorf("find the store %s: %w", dir, unusable(err))
	}
	return Whereabouts{id.Store, dir, dir, runtime, dir}, nil
}

// unusable converts the error of a runtime directory: an invalid identity is damage of the store.
func unusable(err error) error {
	if errors.Is(err, sockets.ErrIdentity) {
		return fmt.Errorf("%w: %w", ErrDamaged, err)
	}
	return err
}

// markName is the file that identifies the store whose data is in the data location of a
// server's store. Without it, a mount point with nothing mounted would receive checkpoints
// that no other machine sees.
const markName = "location.json"

// where is the location of a server store's data on this machine.
type where struct {
	dir    string // with data/ and blobs/; "" if they are in a bucket
	bucket string
	store  string
	owned  bool   // a process owns the directory and serves its log
	on     string // host of that process
}

// locate finds the data: where the log's first event records it, or next to a log that is
// served from a store's directory, under the same path as there.
func locate(ctx context.Context, log *jetlog.Log, created events.StoreCreated) (where, error) {
	if filepath.IsAbs(created.Data) {
		return where{dir: created.Data, store: created.Store}, nil
	}
	if place.IsBucket(created.Data) {
		return where{bucket: created.Data, store: created.Store}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	served, err := log.Served(ctx)
	if err != nil {
		return where{}, fmt.Errorf("find the data of store %s: it is next to its log, in %q of a directory that no `ckptstore serve --listen` reports: %w", created.Store, created.Data, err)
	}
	if served.Store != created.Store || !filepath.IsAbs(served.Directory) {
		return where{}, fmt.Errorf("%w: find the data of store %s: its server reports store %s in %q", ErrForeign, created.Store, served.Store, served.Directory)
	}
	return where{dir: served.Directory, bucket: created.Bucket, store: created.Store, owned: true, on: served.Host}, nil
}

// probe checks that the directory is this store's and, with a test file, that it can be
// written and read here. A reader makes no file. probe returns the identity in the
// directory.
func (p where) probe(reader bool) (id identity, err error) {
	if p.owned {
		id, err = readIdentity(p.dir)
	} else {
		id, err = readMark(p.dir)
	}
	if errors.Is(err, ErrNoStore) || errors.Is(err, os.ErrNotExist) {
		err = fmt.Errorf("%s: nothing there identifies it as the data of store %s: %w", p.dir, p.store, os.ErrNotExist)
	}
	if err == nil && id.Store != p.store {
		err = fmt.Errorf("%w: %s holds the data of store %s, not of %s", ErrForeign, p.dir, id.Store, p.store)
	}
	if err == nil && !reader {
		err = tryOut(p.dir)
	}
	switch {
	case err == nil:
		return id, nil
	case p.owned:
		return id, fmt.Errorf("data location: %w: it is served by %s from there: share that directory (NFS and the like) and mount it on this machine under the same path", err, p.on)
	}
	return id, fmt.Errorf("data location: %w: the log records that this store's data is there: mount it on this machine", err)
}

// readMark reads the identity of the store whose data is in dir.
func readMark(dir string) (identity, error) {
	var id identity
	path := filepath.Join(dir, markName)
	text, err := readFile(path)
	if err != nil {
		return id, err
	}
	if err := json.Unmarshal(text, &id); err != nil || id.Product != product || id.Store == "" {
		return id, errors.Join(fmt.Errorf("%w: %s does not identify the store of this data", ErrDamaged, path), err)
	}
	return id, nil
}

// tryOut writes a file in dir and reads it back.
func tryOut(dir string) error {
	f, err := os.CreateTemp(dir, ".probe-*")
	if err != nil {
		return fmt.Errorf("probe the data location: %w", err)
	}
	name := f.Name()
	_, err = f.WriteString("probe")
	err = errors.Join(err, f.Close())
	if err == nil {
		var back []byte
		if back, err = os.ReadFile(name); err == nil && string(back) != "probe" {
			err = fmt.Errorf("%s reads back %q", name, back)
		}
	}
	if err = errors.Join(err, os.Remove(name)); err != nil {
		return fmt.Errorf("probe the data location: %w", err)
	}
	return nil
}
