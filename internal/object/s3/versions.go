package s3

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	minio "github.com/minio/minio-go/v7"
	"golang.org/x/sync/errgroup"

	"github.com/ckptstore/ckptstore/internal/object"
)

var _ object.Versioned = (*Bucket)(nil)

// history is what is known of the versions that a bucket keeps.
type history struct {
	mu     sync.Mutex
	asked  bool
	keeps  bool  // it keeps versions, or has kept some
	failed error // of the question
	rule   *lockRule
	denied error // why versions cannot be listed or removed
}

// lockRule is the rule of a bucket by which objects are locked.
type lockRule struct {
	on          bool // they can be
	days, years int  // that each stays, unless it has a lock of its own
}

// version is a version of an object, or a marker that it was removed.
type version struct {
	key, id string
	size    int64
	marker  bool
}

// noVersion is the ID of the version of an object that was put while the bucket kept none.
const noVersion = "null"

// purging are the permissions that the removal of a version needs. Without the last two, a lock
// looks like a missing permission.
const purging = "s3:DeleteObjectVersion, and s3:GetObjectRetention and s3:GetObjectLegalHold where objects are locked,"

// versioned reports whether the bucket keeps versions, also if it has stopped to. It asks once.
func (b *Bucket) versioned(ctx context.Context) (bool, error) {
	h := &b.history
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.asked {
		return h.keeps, h.failed
	}
	err := b.do(ctx, request{op: "get versioning of", class: classOther}, func(ctx context.Context, c *call) error {
		found, err := c.core.GetBucketVersioning(ctx, b.at.Bucket)
		h.keeps = found.Enabled() || found.Suspended()
		return err
	})
	var answer *Error
	h.asked, h.failed = err == nil || errors.As(err, &answer) && answer.Code != "", err
	return h.keeps, err
}

// purges reports whether Remove removes versions. Where that is unknown, it does not.
func (b *Bucket) purges(ctx context.Context) (bool, error) {
	keeps, err := b.versioned(ctx)
	if ctx.Err() != nil {
		return false, err
	}
	return keeps && b.denial() == nil, nil
}

// locks returns the rule by which objects of the bucket are locked. It asks once.
func (b *Bucket) locks(ctx context.Context) (lockRule, error) {
	h := &b.history
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.rule != nil {
		return *h.rule, nil
	}
	var is lockRule
	err := b.do(ctx, request{op: "get object lock of", class: classOther}, func(ctx context.Context, c *call) error {
		enabled, _, n, unit, err := c.core.GetObjectLockConfig(ctx, b.at.Bucket)
		is = lockRule{on: enabled == "Enabled"}
		switch {
		case n == nil || unit == nil:
		case *unit == minio.Years:
			is.years = int(*n)
		default:
			is.days = int(*n)
		}
		return err
	})
	if err == nil || unconfigured(err) {
		h.rule, err = &is, nil
	}
	return is, err
}

func (b *Bucket) denial() error {
	b.history.mu.Lock()
	defer b.history.mu.Unlock()
	return b.history.denied
}

// deny remembers that versions cannot be listed or removed, if that is what a failure means.
func (b *Bucket) deny(err error) bool {
	var answer *Error
	if !errors.As(err, &answer) || !slices.Contains([]string{"AccessDenied", "AllAccessDisabled", "Forbidden", "MethodNotAllowed", "NotImplemented", "APINotSupported"}, answer.Code) {
		return false
	}
	b.history.mu.Lock()
	defer b.history.mu.Unlock()
	b.history.denied = err
	return true
}

// Unfreed implements [object.Versioned].
func (b *Bucket) Unfreed(ctx context.Context) (why, err error) {
	if _, err := b.versioned(ctx); err != nil {
		return nil, err
	}
	return b.denial(), nil
}

// versions lists the versions and markers with a prefix, up to the next slash, and the
// directories there.
func (b *Bucket) versions(ctx context.Context, prefix string) (all []version, dirs []string, err error) {
	err = b.do(ctx, request{op: "list versions of", key: prefix, class: classList, needs: "s3:ListBucketVersions"}, func(ctx context.Context, c *call) error {
		all, dirs = nil, nil
		for found := range c.core.ListObjectsIter(ctx, b.at.Bucket, minio.ListObjectsOptions{Prefix: prefix, WithVersions: true, MaxKeys: page}) {
			if found.Err != nil {
				return found.Err
			}
			rest, below := strings.CutPrefix(found.Key, prefix)
			switch {
			case !below:
				return fmt.Errorf("key %.100q is not below %.100q: %w", found.Key, prefix, errPermanent)
			case found.VersionID == "" && strings.HasSuffix(rest, "/"):
				dirs = append(dirs, found.Key)
			default:
				all = append(all, version{found.Key, cmp.Or(found.VersionID, noVersion), found.Size, found.IsDeleteMarker})
			}
		}
		return ctx.Err()
	})
	return all, dirs, err
}

// versionsOf lists the versions and markers of some keys, and of no other.
func (b *Bucket) versionsOf(ctx context.Context, keys []string) (all []version, err error) {
	in := map[string][]string{}
	for _, key := range keys {
		in[path.Dir(key)] = append(in[path.Dir(key)], key)
	}
	for dir, keys := range in {
		prefix := dir + "/"
		switch {
		case len(keys) == 1:
			prefix = keys[0]
		case dir == ".":
			prefix = ""
		}
		found, _, err := b.versions(ctx, prefix)
		if err != nil {
			return nil, err
		}
		wanted := make(map[string]bool, len(keys))
		for _, key := range keys {
			wanted[key] = true
		}
		all = append(all, slices.DeleteFunc(found, func(v version) bool { return !wanted[v.key] })...)
	}
	return all, nil
}

// Stored implements [object.Versioned]. Where versions cannot be listed, it is List.
func (b *Bucket) Stored(ctx context.Context, dir string) ([]object.Entry, error) {
	purges, err := b.purges(ctx)
	if err != nil {
		return nil, err
	}
	if !purges {
		return b.List(ctx, dir)
	}
	prefix := b.at.key("")
	if dir != "" {
		if err := b.check(ctx, dir); err != nil {
			return nil, err
		}
		prefix = b.at.key(dir)
	}
	if prefix != "" {
		prefix += "/"
	}
	all, dirs, err := b.versions(ctx, prefix)
	if b.deny(err) {
		return b.List(ctx, dir)
	}
	if err != nil {
		return nil, err
	}
	var entries []object.Entry
	at := map[string]*object.Info{}
	for _, v := range all {
		name := strings.TrimPrefix(v.key, prefix)
		if name == "" || strings.HasSuffix(name, "/") {
			continue // a marker of the directory itself
		}
		info := at[name]
		if info == nil {
			info = &object.Info{}
			at[name] = info
			entries = append(entries, object.Entry{Name: name, Info: info})
		}
		info.Size += v.size
	}
	for _, dir := range dirs {
		name := strings.TrimSuffix(strings.TrimPrefix(dir, prefix), "/")
		if at[name] == nil {
			at[name] = &object.Info{Dir: true}
			entries = append(entries, object.Entry{Name: name, Info: at[name]})
		}
	}
	return entries, nil
}

// purge removes all versions of some keys. denied reports that it may not.
func (b *Bucket) purge(ctx context.Context, keys []string) (denied bool, err error) {
	all, err := b.versionsOf(ctx, keys)
	if err != nil {
		return b.deny(err), err
	}
	locked := &lockedVersions{}
	for batch := range slices.Chunk(all, page) {
		failed, err := b.removeMany(ctx, batch)
		if refusal(err) { // of all, perhaps because one is locked
			failed = map[version]error{}
			for _, v := range batch {
				failed[v] = err
			}
		} else if err != nil {
			return false, err
		}
		g, ctx := errgroup.WithContext(ctx)
		g.SetLimit(b.options.Depth)
		for v := range failed {
			g.Go(func() error { return b.removeVersion(ctx, v, locked) })
		}
		if err := g.Wait(); err != nil {
			return b.deny(err), err
		}
	}
	return false, locked.err()
}

// removeVersion removes a version, unless it is locked.
func (b *Bucket) removeVersion(ctx context.Context, v version, locked *lockedVersions) error {
	err := b.removeOne(ctx, v)
	if !refusal(err) {
		return err
	}
	if is, unknown := b.lockOf(ctx, v, true); unknown == nil && locked.add(v, is) {
		return nil
	}
	return err
}

// refusal reports whether a server refuses a request, and would do so again.
func refusal(err error) bool {
	var answer *Error
	return errors.As(err, &answer) && answer.Status/100 == 4
}

// lock is what keeps a version from being removed.
type lock struct {
	until time.Time
	hold  bool
}

// lockOf returns the lock of a version, or the zero lock if it has none, or had one until now.
// Some servers do not tell a lock that is the bucket's rule: if the removal was refused, and a lock
// would explain that, it is the reason.
func (b *Bucket) lockOf(ctx context.Context, v version, refused bool) (is lock, err error) {
	if v.marker {
		return is, nil
	}
	rule, err := b.locks(ctx)
	if err != nil || !rule.on {
		return is, err
	}
	err = b.do(ctx, request{op: "look at", key: v.key, class: classHead}, func(ctx context.Context, c *call) error {
		found, err := c.core.StatObject(ctx, b.at.Bucket, v.key, minio.StatObjectOptions{VersionID: v.id})
		if err != nil {
			return err
		}
		now, bad := http.ParseTime(c.answer.Get("Date"))
		if bad != nil {
			now = time.Now()
		}
		is.hold = c.answer.Get("X-Amz-Object-Lock-Legal-Hold") == "ON"
		until, bad := time.Parse(time.RFC3339, c.answer.Get("X-Amz-Object-Lock-Retain-Until-Date"))
		if bad != nil && refused && !is.hold && rule.days+rule.years > 0 {
			until = found.LastModified.AddDate(rule.years, 0, rule.days)
		}
		if until.After(now) {
			is.until = until
		}
		return nil
	})
	return is, err
}

// lockedVersions collects versions that are locked.
type lockedVersions struct {
	mu    sync.Mutex
	found object.LockedError
}

// add reports whether a version is locked.
func (l *lockedVersions) add(v version, is lock) bool {
	if is == (lock{}) {
		return false
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.found.Add(&object.LockedError{Versions: 1, Bytes: v.size, Until: is.until, Hold: is.hold})
	return true
}

func (l *lockedVersions) err() error {
	if l.found.Versions == 0 {
		return nil
	}
	return &l.found
}

// Locked implements [object.Versioned].
func (b *Bucket) Locked(ctx context.Context, names ...string) error {
	purges, err := b.purges(ctx)
	if err != nil || !purges {
		return err
	}
	if rule, err := b.locks(ctx); err != nil || !rule.on {
		return err
	}
	keys, err := b.keys(names)
	if err != nil {
		return err
	}
	all, err := b.versionsOf(ctx, keys)
	if err != nil {
		return err
	}
	locked := &lockedVersions{}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(b.options.Depth)
	for _, v := range all {
		g.Go(func() error {
			is, err := b.lockOf(ctx, v, false)
			if err == nil {
				locked.add(v, is)
			}
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	return locked.err()
}

// keys returns the keys of names.
func (b *Bucket) keys(names []string) (keys []string, err error) {
	for _, name := range names {
		if bad := object.Validate(name); bad != nil {
			err = errors.Join(err, bad)
			continue
		}
		keys = append(keys, b.at.key(name))
	}
	return keys, err
}
