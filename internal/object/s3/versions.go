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

// history is what is known of the versions that a bucket keeps, until the next [Bucket.Refresh].
type history struct {
	asking chan struct{} // held by the request that asks

	mu     sync.Mutex
	answer *versioning // the last answer, or failure
	rule   *lockRule
	denied error // why versions cannot be listed or removed
}

// versioning is whether a bucket keeps versions.
type versioning struct {
	keeps  bool // it does, or has done so
	failed error
	stays  bool // the server would answer the same again
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
	latest  bool // the key shows it
}

// noVersion is the ID of the version of an object that was put while the bucket kept none.
const noVersion = "null"

// purging are the permissions that the removal of a version needs. Without the last two, a lock
// looks like a missing permission.
const purging = "s3:DeleteObjectVersion, and s3:GetObjectRetention and s3:GetObjectLegalHold where objects are locked,"

// versioned reports whether the bucket keeps versions, also if it has stopped to. It asks once, and
// again after a failure that may pass. Callers at the same time share one answer.
func (b *Bucket) versioned(ctx context.Context) (bool, error) {
	h := &b.history
	before := h.last()
	if before != nil && before.stays {
		return before.keeps, before.failed
	}
	select {
	case h.asking <- struct{}{}:
	case <-ctx.Done():
		return false, ctx.Err()
	}
	defer func() { <-h.asking }()
	if now := h.last(); now != before && now != nil {
		return now.keeps, now.failed
	}
	var found minio.BucketVersioningConfiguration
	err := b.do(ctx, request{op: "get versioning of", class: classOther}, func(ctx context.Context, c *call) (err error) {
		found, err = c.core.GetBucketVersioning(ctx, b.at.Bucket)
		return err
	})
	if err != nil && ctx.Err() != nil {
		return false, err // another caller may have more time
	}
	now := &versioning{keeps: err == nil && (found.Enabled() || found.Suspended()), failed: err, stays: err == nil || lasting(err)}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.answer = now
	return now.keeps, now.failed
}

// last returns the last answer, or nil.
func (h *history) last() *versioning {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.answer
}

// Refresh implements [object.Versioned].
func (b *Bucket) Refresh() {
	h := &b.history
	h.mu.Lock()
	defer h.mu.Unlock()
	h.answer, h.rule, h.denied = nil, nil, nil
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
	known := h.rule
	h.mu.Unlock()
	if known != nil {
		return *known, nil
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
	if err != nil && !unconfigured(err) {
		return is, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.rule = &is
	return is, nil
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
// directories there. After a failure it continues after the last key whose versions it has all.
func (b *Bucket) versions(ctx context.Context, prefix string) (all []version, dirs []string, err error) {
	r := request{op: "list versions of", key: prefix, class: classList, needs: "s3:ListBucketVersions"}
	for from, done := "", false; !done; {
		begun := from
		err := b.do(ctx, r, func(ctx context.Context, c *call) error {
			all, dirs, from = complete(all, dirs, from)
			for found := range c.core.ListObjectsIter(ctx, b.at.Bucket, minio.ListObjectsOptions{Prefix: prefix, WithVersions: true, MaxKeys: page, StartAfter: from}) {
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
					all = append(all, version{found.Key, cmp.Or(found.VersionID, noVersion), found.Size, found.IsDeleteMarker, found.IsLatest})
				}
			}
			return ctx.Err()
		})
		if err != nil {
			if all, dirs, from = complete(all, dirs, from); from == begun {
				return nil, nil, err
			}
		}
		done = err == nil
	}
	return all, dirs, nil
}

// complete returns what a list that broke off has of keys whose versions it has all, and the last
// of these keys, or from if there is none after it. Of the last key there may be more.
func complete(all []version, dirs []string, from string) ([]version, []string, string) {
	last, before := from, from
	note := func(key string) {
		switch {
		case key > last:
			last, before = key, last
		case key < last && key > before:
			before = key
		}
	}
	for _, v := range all {
		note(v.key)
	}
	for _, dir := range dirs {
		note(dir)
	}
	all = slices.DeleteFunc(all, func(v version) bool { return v.key > before })
	dirs = slices.DeleteFunc(dirs, func(dir string) bool { return dir > before })
	return all, dirs, before
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

// ListAll implements [object.Versioned]. Where versions cannot be listed, it is List.
func (b *Bucket) ListAll(ctx context.Context, dir string) ([]object.Entry, error) {
	purges, err := b.purges(ctx)
	if err != nil {
		return nil, err
	}
	if !purges {
		return b.List(ctx, dir)
	}
	prefix, err := b.below(ctx, dir)
	if err != nil {
		return nil, err
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

// purge removes all versions of some keys. A marker goes after the versions that it may hide, and
// stays while any of these does: no removal makes an old version visible. If versions may not be
// removed at all, it returns the keys that are still to be hidden.
func (b *Bucket) purge(ctx context.Context, keys []string) (shown []string, err error) {
	all, err := b.versionsOf(ctx, keys)
	if b.deny(err) {
		return keys, nil
	}
	if err != nil {
		return nil, err
	}
	shown = visible(all)
	left := &remains{keys: map[string]bool{}}
	markers := slices.DeleteFunc(slices.Clone(all), func(v version) bool { return !v.marker })
	all = slices.DeleteFunc(all, func(v version) bool { return v.marker })
	if err := b.removeVersions(ctx, all, left); err != nil {
		return nil, err
	}
	markers = slices.DeleteFunc(markers, func(v version) bool { return left.keys[v.key] })
	if err := b.removeVersions(ctx, markers, left); err != nil {
		return nil, err
	}
	if left.count > 0 && left.count == len(all)+len(markers) && left.found.Until.IsZero() && !left.found.Hold {
		// Nothing could be removed, and no lock is known. One file may have a lock that these keys
		// may not see.
		rule, err := b.locks(ctx)
		if lockable := err != nil || rule.on; (len(left.keys) > 1 || !lockable) && b.deny(left.found.Refused) {
			return shown, nil
		}
	}
	return nil, left.err()
}

// visible returns the keys that have a version and no marker that hides it.
func visible(all []version) (keys []string) {
	hidden := map[string]bool{}
	for _, v := range all {
		hidden[v.key] = hidden[v.key] || v.marker && v.latest
	}
	for key, is := range hidden {
		if !is {
			keys = append(keys, key)
		}
	}
	return keys
}

// removeVersions removes versions. It notes those that cannot be removed.
func (b *Bucket) removeVersions(ctx context.Context, all []version, left *remains) error {
	for batch := range slices.Chunk(all, page) {
		failed, err := b.removeMany(ctx, batch)
		if refusal(err) { // of all, perhaps because one is locked
			failed = map[version]error{}
			for _, v := range batch {
				failed[v] = err
			}
		} else if err != nil {
			return err
		}
		g, ctx := errgroup.WithContext(ctx)
		g.SetLimit(b.options.Depth)
		for v := range failed {
			g.Go(func() error { return b.removeVersion(ctx, v, left) })
		}
		if err := g.Wait(); err != nil {
			return err
		}
	}
	return nil
}

// removeVersion removes a version, unless the server refuses that.
func (b *Bucket) removeVersion(ctx context.Context, v version, left *remains) error {
	err := b.removeOne(ctx, v)
	if !refusal(err) {
		return err
	}
	is, unknown := b.lockOf(ctx, v, true)
	switch {
	case errors.Is(unknown, fs.ErrNotExist):
		return nil // it was removed meanwhile
	case unknown != nil && !lasting(unknown):
		return unknown
	case unknown == nil && is != lock{}:
		left.add(v, &object.LockedError{Until: is.until, Hold: is.hold})
	default:
		left.add(v, &object.LockedError{Refused: err})
	}
	return nil
}

// refusal reports whether a server refuses a removal, and would do so again.
func refusal(err error) bool {
	var answer *Error
	return errors.As(err, &answer) && answer.Status/100 == 4 && lasting(err)
}

// lasting reports whether a failure is an answer that would be the same again.
func lasting(err error) bool {
	var answer minio.ErrorResponse
	if !errors.As(err, &answer) {
		return false
	}
	is := judgeAnswer(answer, request{}, &call{})
	return is == final || is == refused
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
		is.hold = c.answer.Get("X-Amz-Object-Lock-Legal-Hold") == "ON"
		until, bad := time.Parse(time.RFC3339, c.answer.Get("X-Amz-Object-Lock-Retain-Until-Date"))
		if bad != nil && refused && !is.hold && rule.days+rule.years > 0 {
			until = found.LastModified.AddDate(rule.years, 0, rule.days)
		}
		if until.After(c.date()) {
			is.until = until
		}
		return nil
	})
	if err != nil || !refused || is != (lock{}) {
		return is, err
	}
	return b.askLock(ctx, v)
}

// askLock returns the lock of a version by requests of its own. versitygw answers HEAD without the
// lock, if the version is not the last of its key.
func (b *Bucket) askLock(ctx context.Context, v version) (is lock, err error) {
	hold := b.do(ctx, request{op: "get legal hold of", key: v.key, class: classOther, needs: "s3:GetObjectLegalHold"}, func(ctx context.Context, c *call) error {
		status, err := c.core.GetObjectLegalHold(ctx, b.at.Bucket, v.key, minio.GetObjectLegalHoldOptions{VersionID: v.id})
		is.hold = err == nil && status != nil && *status == minio.LegalHoldEnabled
		return err
	})
	retention := b.do(ctx, request{op: "get retention of", key: v.key, class: classOther, needs: "s3:GetObjectRetention"}, func(ctx context.Context, c *call) error {
		_, until, err := c.core.GetObjectRetention(ctx, b.at.Bucket, v.key, v.id)
		if err == nil && until != nil && until.After(c.date()) {
			is.until = *until
		}
		return err
	})
	for _, unknown := range []error{hold, retention} {
		if is == (lock{}) && err == nil && !unconfigured(unknown) {
			err = unknown
		}
	}
	return is, err
}

// date returns the time of an answer by the server's clock.
func (c *call) date() time.Time {
	if date, err := http.ParseTime(c.answer.Get("Date")); err == nil {
		return date
	}
	return time.Now()
}

// remains collects the versions that cannot be removed.
type remains struct {
	mu    sync.Mutex
	keys  map[string]bool
	count int
	found object.LockedError
}

// add notes a version, and why it stays.
func (r *remains) add(v version, why *object.LockedError) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.keys[v.key] = true
	r.count++
	why.Versions, why.Bytes = 1, v.size
	r.found.Add(why)
}

func (r *remains) err() error {
	if r.count == 0 {
		return nil
	}
	return &r.found
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
	locked := &remains{keys: map[string]bool{}}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(b.options.Depth)
	for _, v := range all {
		g.Go(func() error {
			is, err := b.lockOf(ctx, v, false)
			if err == nil && is != (lock{}) {
				locked.add(v, &object.LockedError{Until: is.until, Hold: is.hold})
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
