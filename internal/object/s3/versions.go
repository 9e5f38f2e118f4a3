package s3

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	minio "github.com/minio/minio-go/v7"
	"golang.org/x/sync/errgroup"

	"github.com/ckptstore/ckptstore/internal/object"
)

var _ object.Versioned = (*Bucket)(nil)

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
