package store

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/claim"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/logpeers"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/share"
	"github.com/ckptstore/ckptstore/internal/store/place"
	"github.com/ckptstore/ckptstore/internal/store/space"
)

// ErrExists reports that a store exists already.
var ErrExists = problem.New(problem.Conflict, "store exists")

// ErrNotEmpty reports foreign files in the place of a new store.
var ErrNotEmpty = problem.New(problem.Foreign, "not empty")

// Init makes a new store and returns its identity. In a directory, it renames store.json
// into place last; an interrupted init has none and is redone. With a URL, data is the
// directory for checkpoints, which every node of every job must see under that path; see
// [InitURL].
func Init(ctx context.Context, location, data string) (string, error) {
	return InitWith(ctx, location, InitOptions{Data: data})
}

// InitOptions configure [InitWith].
type InitOptions struct {
	Data   string // URL of a prefix of a bucket; empty: the checkpoints lie in the directory. With a URL: see [InitURL]
	Shared bool   // share it with a group, whose members may all write to it
	Group  string // name or number; empty: the directory's group

	// Warn receives what the operator of the bucket should change; nil: nothing does.
	Warn func(string)
}

// InitWith is [Init] with options.
func InitWith(ctx context.Context, location string, o InitOptions) (string, error) {
	data := o.Data
	location, isURL, err := parseLocation(location)
	if err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	if isURL && o.Shared {
		return "", fmt.Errorf("init %s: %w: only a directory can be shared with a group: the server decides who may write to its log", jetlog.Redacted(location), ErrLocation)
	}
	if isURL {
		made, err := InitURL(ctx, location, URLOptions{Data: data, Warn: o.Warn})
		return made.Store, err
	}
	if data != "" && !place.IsBucket(data) {
		return "", fmt.Errorf("init %s: %w: the checkpoints of a directory lie in its data/, or in a bucket: --data s3://BUCKET/PREFIX", location, ErrLocation)
	}
	if data != "" && o.Shared {
		return "", fmt.Errorf("init %s: %w: a store of a group keeps its checkpoints in its directory: the bucket's policy decides who may write there", location, ErrLocation)
	}
	dir, err := filepath.Abs(location)
	if err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	// The lock is a file in the directory: check first that the directory is free.
	if err := vacant(dir); err != nil {
		return "", fmt.Errorf("init %s: %w", dir, err)
	}
	if err := makeOwn(dir); err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	lock, err := tryLock(dir)
	if err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	if lock == nil {
		return "", fmt.Errorf("init: %w: another process holds %s", ErrLocked, filepath.Join(dir, "LOCK"))
	}
	defer func() { _ = lock.Close() }()
	if err := vacant(dir); err != nil {
		return "", fmt.Errorf("init %s: %w", dir, err)
	}
	if err := clearCutLog(dir); err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	owner := thisUser()
	if o.Shared {
		if owner, err = makeShared(dir, o.Group); err == nil {
			// Give it the directory's group.
			err = errors.Join(lock.Chown(-1, owner.GID), share.File(lock))
		}
		if err != nil {
			return "", fmt.Errorf("init: %w", err)
		}
	}
	id := identity{Product: product, Store: NewID(), Format: Format, Created: time.Now().UTC(), Owner: owner}
	subs := []string{"data", "blobs"}
	var bucket *place.Bucket
	if data != "" {
		if bucket, err = place.Open(data, nil); err != nil {
			return "", fmt.Errorf("init: %w", err)
		}
		id.Data, subs = bucket.Location(), nil
	}
	if err := createLog(ctx, filepath.Join(dir, "log"), id); err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	for _, sub := range subs {
		if err := beneath.At(dir).MkdirAll(filepath.Join(dir, sub), 0o700); err != nil {
			return "", fmt.Errorf("init: %w", err)
		}
	}
	if err := share.Tree(filepath.Join(dir, "log"), nil); err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	text, err := json.MarshalIndent(id, "", "  ")
	if err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	text = append(text, '\n')
	if bucket != nil {
		// The last step but one: an init that is interrupted before has claimed nothing.
		if err := claimPrefix(ctx, bucket, text, o.Warn); err != nil {
			return "", fmt.Errorf("init: %w", err)
		}
	}
	if err := durable.Write(filepath.Join(dir, "store.json"), text); err != nil {
		if bucket != nil {
			err = errors.Join(err, bucket.Withdraw(context.WithoutCancel(ctx)))
		}
		return "", fmt.Errorf("init: %w", err)
	}
	return id.Store, durable.SyncDir(filepath.Dir(dir))
}

// Found returns the ID of the store in a directory. It returns an error unless the store is as
// [InitWith] makes it with these options; an option that is not set fits any store.
func Found(location string, o InitOptions) (string, error) {
	dir, err := filepath.Abs(location)
	if err != nil {
		return "", fmt.Errorf("init: %w", err)
	}
	id, err := identityIn(dir)
	if err != nil {
		return "", fmt.Errorf("init %s: %w", dir, err)
	}
	differs := func(has, wanted string) error {
		return problem.Errorf(problem.Conflict, "init %s: the store there is %s, not %s: choose another directory, or leave out the option", dir, has, wanted)
	}
	if o.Data != "" {
		bucket, err := place.Open(o.Data, nil)
		if err != nil {
			return "", fmt.Errorf("init: %w", err)
		}
		if where := bucket.Location(); where != id.Data {
			return "", differs("one with its checkpoints in "+cmp.Or(id.Data, "the directory"), "one with them in "+where)
		}
	}
	if !o.Shared {
		return id.Store, nil
	}
	if id.Owner == nil || !id.Owner.Shared {
		return "", differs("of one user", "shared")
	}
	if o.Group != "" {
		gid, err := groupOf(o.Group)
		if err != nil {
			return "", fmt.Errorf("init: %w", err)
		}
		if gid != id.Owner.GID {
			return "", differs(fmt.Sprintf("shared with group %d", id.Owner.GID), fmt.Sprintf("with group %d", gid))
		}
	}
	return id.Store, nil
}

// vacant returns an error if a directory is a store, or has files other than those of an
// interrupted init, above all if it is a store whose store.json is lost.
func vacant(dir string) error {
	found := onlyLeftovers(dir)
	// Another process's init may have ended while the files were listed.
	if _, err := readIdentity(dir); !errors.Is(err, ErrNoStore) {
		return errors.Join(ErrExists, err)
	}
	return found
}

// onlyLeftovers returns an error if a directory has files other than those of an interrupted init.
func onlyLeftovers(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	ended := false
	for _, e := range entries {
		switch name := e.Name(); {
		case name == endName: // another entry makes a better error
			ended = true
			continue
		case name == lockName || name == space.BallastName || name == "log" || strings.HasPrefix(name, durable.TempPrefix):
			continue
		case name == "data" || name == "blobs" || name == runName || name == "views" && emptyDir(filepath.Join(dir, name)):
			left, err := beneath.At(dir).ReadDir(filepath.Join(dir, name))
			if err != nil {
				return err
			}
			if len(left) == 0 {
				continue
			}
		case name != "views" && name != cardName && name != auditName && name != claim.Name && name != claim.BeatName && name != readName && name != repairName: // only a store has these
			return fmt.Errorf("%s is %w (it has %q): choose an empty or a new directory", dir, ErrNotEmpty, name)
		}
		return fmt.Errorf("%w: %s has the %s of a store but no store.json: restore that file from a backup, or run `ckptstore recover --store %s`, or choose an empty directory", ErrDamaged, dir, e.Name(), dir)
	}
	if ended {
		return fmt.Errorf("init: %w: %s has the %s of a store, which had a log, but no store.json: restore that file from a backup, or choose an empty directory", ErrDamaged, dir, endName)
	}
	return nil
}

// maxCutLog is at least the size of each file of a log with one event, and less than that
// of two events.
const maxCutLog = 704

// clearCutLog removes the log of an interrupted init, whose store was never reported. It
// judges by the files, not by a server: a server may see a damaged log as an empty or a
// short one.
func clearCutLog(dir string) error {
	path := filepath.Join(dir, "log")
	size, err := largestFile(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return err
	case size > maxCutLog:
		return fmt.Errorf("%w: %s has a log of more than its first event but no store.json: restore that file from a backup, or run `ckptstore recover`, or move the log away", ErrDamaged, dir)
	}
	return os.RemoveAll(path)
}

func largestFile(dir string) (size int64, err error) {
	err = beneath.At(filepath.Dir(dir)).WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		info, err := e.Info()
		if err == nil {
			size = max(size, info.Size())
		}
		return err
	})
	return size, err
}

func createLog(ctx context.Context, dir string, id identity) error {
	server, err := jetlog.StartServer(ctx, jetlog.ServerOptions{Dir: dir})
	if err != nil {
		return err
	}
	defer server.Shutdown()
	log, err := jetlog.Connect(ctx, server.OwnerOptions())
	if err != nil {
		return err
	}
	defer log.Close()
	return create(ctx, log, &events.StoreCreated{Store: id.Store, Data: "data", Bucket: id.Data})
}

func create(ctx context.Context, log *jetlog.Log, of *events.StoreCreated) error {
	of.Format = Format
	created, err := events.NewDecision(Stamp("init"), events.Aggregate{}, of)
	if err != nil {
		return err
	}
	return log.Create(ctx, created)
}

// URLOptions configure [InitURL].
type URLOptions struct {
	Data     string  // absolute path of a directory that every node of every job sees, or URL of a prefix of a bucket
	Replicas int     // servers that keep a copy of the log; 0: three on a cluster that has them, else one
	Access   *Access // nil reads the environment

	Warn func(string) // as in [InitOptions]
}

// Made describes a new store.
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
		return Made{}, fmt.Errorf("init %s: %w: it is not a URL", url, ErrLocation)
	}
	if !filepath.IsAbs(o.Data) && !place.IsBucket(o.Data) {
		return Made{}, fmt.Errorf("init %s: %w: --data must be the absolute path of a directory that every node sees, or s3://BUCKET/PREFIX, got %q", where, ErrLocation, o.Data)
	}
	var bucket *place.Bucket
	if place.IsBucket(o.Data) {
		if bucket, err = place.Open(o.Data, nil); err != nil {
			return Made{}, fmt.Errorf("init: %w", err)
		}
		o.Data = bucket.Location()
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
	case err == nil && bucket == nil && info.Last == 1 && created.Data == o.Data && !exists(filepath.Join(o.Data, markName)):
		// An init that was interrupted before its last step.
		if err := log.CreateBuckets(ctx); err != nil {
			return Made{}, fmt.Errorf("init: %w", err)
		}
		return finish(o.Data, created.Store, where, info.Replicas)
	case err == nil && created.Data == o.Data:
		// Stores of earlier versions have no buckets until they are needed.
		if err := log.CreateBuckets(ctx); err != nil {
			return Made{}, fmt.Errorf("init: %w", err)
		}
		return Made{}, fmt.Errorf("init %s: %w: it is %s, with its data in %s, and has all that it needs", where, ErrExists, created.Store, created.Data)
	case err == nil:
		return Made{}, fmt.Errorf("init %s: %w: it is %s, with its data in %s", where, ErrExists, created.Store, created.Data)
	case !errors.Is(err, jetlog.ErrNoLog):
		return Made{}, fmt.Errorf("init %s: existing data is not overwritten: %w", where, damage(err))
	}
	if bucket != nil {
		return initInBucket(ctx, log, bucket, where, o.Warn)
	}
	// The directory outlives a log that cannot be seen, as when its server runs with
	// another key. A new log in its place would destroy it.
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
	if err := create(ctx, log, &events.StoreCreated{Store: id, Data: o.Data}); err != nil {
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

// initInBucket makes a store whose log is on a server and whose data is in a bucket. It claims
// the prefix first: of two that claim it, one has a log.
func initInBucket(ctx context.Context, log *jetlog.Log, bucket *place.Bucket, where string, warn func(string)) (_ Made, err error) {
	id := NewID()
	text, err := json.MarshalIndent(identity{Product: product, Store: id, Format: Format, Created: time.Now().UTC()}, "", "  ")
	if err != nil {
		return Made{}, fmt.Errorf("init: %w", err)
	}
	if err := claimPrefix(ctx, bucket, append(text, '\n'), warn); err != nil {
		return Made{}, fmt.Errorf("init: %w", err)
	}
	if err := create(ctx, log, &events.StoreCreated{Store: id, Data: bucket.Location()}); err != nil {
		return Made{}, fmt.Errorf("init: %w", errors.Join(err, bucket.Withdraw(context.WithoutCancel(ctx))))
	}
	if err := log.CreateBuckets(ctx); err != nil {
		return Made{}, fmt.Errorf("init: %w", err)
	}
	info, err := log.Info(ctx)
	if err != nil {
		return Made{}, fmt.Errorf("init: %w", err)
	}
	return Made{Store: id, Location: where, Replicas: info.Replicas}, nil
}

// claimPrefix makes the mark of a new store in a bucket.
func claimPrefix(ctx context.Context, bucket *place.Bucket, mark []byte, warn func(string)) error {
	warnings, err := bucket.Claim(ctx, mark)
	if warn == nil {
		return err
	}
	for _, text := range warnings {
		warn(bucket.Location() + ": " + text)
	}
	return err
}

// finish records durably whose data is in dir.
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

// Ensure makes a store if none exists, also after a process was killed while making it.
// On a server only [Init] makes a store.
func Ensure(ctx context.Context, location string, patience time.Duration, log *slog.Logger) error {
	_, isURL, err := parseLocation(location)
	if err != nil {
		return fmt.Errorf("make the store: %w", err)
	}
	if isURL || logpeers.Replicated(location) {
		return nil
	}
	patient, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := os.Lstat(filepath.Join(location, "store.json")); err == nil || !errors.Is(err, os.ErrNotExist) {
			return nil // opening it reports the cause
		}
		id, err := Init(ctx, location, "")
		switch {
		case err == nil:
			log.Info("store created", "store", location, "id", id)
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

// Remove deletes the store in a directory, with its data in a bucket if it has one there, and the
// directory. It returns [ErrLocked] while a process has the store open, and nil if the directory
// does not exist. If another store has taken over the bucket's prefix, that is left as it is.
func Remove(ctx context.Context, dir string) error {
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	id, err := readIdentity(dir)
	if errors.Is(err, ErrNoStore) {
		if err := vacant(dir); err != nil { // not the leftovers of an init
			return fmt.Errorf("remove: %w", err)
		}
	} else if errors.Is(err, ErrForeign) {
		return fmt.Errorf("remove: %w", err)
	}
	lock, err := tryLock(dir)
	if err != nil {
		return fmt.Errorf("remove: %w", err)
	}
	if lock == nil {
		return fmt.Errorf("remove: %w: another process holds %s: wait for it or end it", ErrLocked, filepath.Join(dir, lockName))
	}
	if err := clearBucket(ctx, id); err != nil {
		return fmt.Errorf("remove the checkpoints of store %s: %w", dir, errors.Join(err, lock.Close()))
	}
	return errors.Join(os.RemoveAll(dir), lock.Close())
}

// clearBucket removes the data of a store from its bucket.
func clearBucket(ctx context.Context, id identity) (err error) {
	if id.Data == "" {
		return nil
	}
	b, err := place.Open(id.Data, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	mark, err := b.Mark(ctx)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // cleared by a removal that was interrupted
	}
	if err != nil {
		return err
	}
	if there := (identity{}); json.Unmarshal(mark, &there) != nil || there.Store != id.Store {
		return nil
	}
	return b.Clear(ctx)
}
