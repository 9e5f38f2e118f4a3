package s3

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"

	minio "github.com/minio/minio-go/v7"

	"github.com/ckptstore/ckptstore/internal/object"
)

// page is the number of keys in one request of a list or a removal: the most that servers
// accept.
const page = 1000

// Stat implements [object.Backend]. A directory costs a second request.
func (b *Bucket) Stat(ctx context.Context, name string) (object.Info, error) {
	if err := b.check(ctx, name); err != nil {
		return object.Info{}, err
	}
	o := &opened{b: b, ctx: ctx, key: b.at.key(name)}
	info, err := o.Stat()
	if !errors.Is(err, fs.ErrNotExist) {
		return info, err
	}
	missing := err
	err = b.list(ctx, b.at.key(name)+"/", true, 1, func(minio.ObjectInfo) bool {
		info.Dir = true
		return false
	})
	if err == nil && !info.Dir {
		err = missing
	}
	return info, err
}

// List implements [object.Backend]. A missing directory is empty.
func (b *Bucket) List(ctx context.Context, dir string) ([]object.Entry, error) {
	prefix, err := b.below(ctx, dir)
	if err != nil {
		return nil, err
	}
	var entries []object.Entry
	seen := map[string]bool{} // a list that was continued may repeat a directory
	err = b.list(ctx, prefix, false, page, func(found minio.ObjectInfo) bool {
		name, isDir := strings.CutSuffix(strings.TrimPrefix(found.Key, prefix), "/")
		if name == "" || seen[name] {
			return true // a marker of the directory itself
		}
		seen[name] = true
		info := object.Info{Size: found.Size, Modified: found.LastModified}
		if isDir {
			info = object.Info{Dir: true}
		}
		entries = append(entries, object.Entry{Name: name, Info: &info})
		return true
	})
	if err != nil {
		return nil, err
	}
	return entries, nil
}

// below returns what the keys in a directory begin with.
func (b *Bucket) below(ctx context.Context, dir string) (prefix string, err error) {
	prefix = b.at.key("")
	if dir != "" {
		if err := b.check(ctx, dir); err != nil {
			return "", err
		}
		prefix = b.at.key(dir)
	}
	if prefix != "" {
		prefix += "/"
	}
	return prefix, nil
}

// list calls use for each object and directory with a prefix, until it returns false. After a
// failure it continues after the last one.
func (b *Bucket) list(ctx context.Context, prefix string, recursive bool, size int, use func(minio.ObjectInfo) bool) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	without, last, done := false, "", false
	for !done {
		begun := last
		err := b.do(ctx, request{op: "list", key: prefix, class: classList}, func(ctx context.Context, c *call) error {
			for found := range c.core.ListObjectsIter(ctx, b.at.Bucket, minio.ListObjectsOptions{
				Prefix: prefix, Recursive: recursive, MaxKeys: size, StartAfter: last, FetchOwner: &without,
			}) {
				if found.Err != nil {
					return found.Err
				}
				if !strings.HasPrefix(found.Key, prefix) {
					return fmt.Errorf("key %.100q is not below %.100q: %w", found.Key, prefix, errPermanent)
				}
				last = max(last, found.Key)
				if !use(found) {
					break
				}
			}
			return ctx.Err() // a list that ends with its context looks complete
		})
		if err != nil && last == begun {
			return err
		}
		done = err == nil
	}
	return nil
}

// Remove implements [object.Backend]. In a bucket with versions it removes those of the files too,
// unless a permission is missing: see [Bucket.Unfreed].
func (b *Bucket) Remove(ctx context.Context, names ...string) error {
	return b.remove(ctx, names, b.purges)
}

// Hide implements [object.Versioned].
func (b *Bucket) Hide(ctx context.Context, names ...string) error {
	return b.remove(ctx, names, func(context.Context) (bool, error) { return false, nil })
}

// remove removes files, with their versions if purges returns true.
func (b *Bucket) remove(ctx context.Context, names []string, purges func(context.Context) (bool, error)) error {
	if err := ctx.Err(); err != nil || len(names) == 0 {
		return err
	}
	keys, problems := b.keys(names)
	purge, err := purges(ctx)
	if err != nil {
		return err
	}
	if purge {
		keys, err = b.purge(ctx, keys)
		if problems != nil && err != nil { // of two kinds of errors, that of locks is the lesser
			return fmt.Errorf("%w; %s", problems, err.Error())
		}
		if err != nil {
			return err
		}
	}
	all := make([]version, len(keys))
	for i, key := range keys {
		all[i].key = key
	}
	for batch := range slices.Chunk(all, page) {
		failed, err := b.removeMany(ctx, batch)
		problems = errors.Join(problems, err)
		for _, v := range batch {
			if failed[v] != nil {
				problems = errors.Join(problems, b.removeOne(ctx, v))
			}
		}
	}
	return problems
}

// removeOne removes a version, or the name if it has no ID.
func (b *Bucket) removeOne(ctx context.Context, v version) error {
	r := request{op: "remove", key: v.key, class: classDelete}
	if v.id != "" {
		r.op, r.needs = "remove version "+v.id+" of", purging
	}
	err := b.do(ctx, r, func(ctx context.Context, c *call) error {
		return c.core.RemoveObject(ctx, b.at.Bucket, v.key, minio.RemoveObjectOptions{VersionID: v.id})
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// removeMany removes versions, or names, in one request. It returns those that the server did not
// remove, perhaps for a reason that passes. Those that XML cannot name are among them, and a
// single one.
func (b *Bucket) removeMany(ctx context.Context, all []version) (failed map[version]error, err error) {
	failed = map[version]error{}
	var sent []version
	for _, v := range all {
		if len(all) == 1 || strings.ContainsFunc(v.key, func(r rune) bool { return r < 0x20 || r == 0xfffe || r == 0xffff }) {
			failed[v] = errUntried
			continue
		}
		sent = append(sent, v)
	}
	if len(sent) == 0 {
		return failed, nil
	}
	type target struct{ key, id string }
	keys := make([]string, len(sent))
	for i, v := range sent {
		keys[i] = v.key
	}
	refused := map[target]error{}
	err = b.do(ctx, request{op: fmt.Sprintf("remove %d files below", len(sent)), key: common(keys), class: classDelete}, func(ctx context.Context, c *call) error {
		left := map[target]bool{}
		for _, v := range sent {
			left[target{v.key, v.id}] = true
		}
		clear(refused)
		results, err := c.core.RemoveObjectsWithIter(ctx, b.at.Bucket, func(yield func(minio.ObjectInfo) bool) {
			for _, v := range sent {
				if !yield(minio.ObjectInfo{Key: v.key, VersionID: v.id}) {
					return
				}
			}
		}, minio.RemoveObjectsOptions{})
		if err != nil {
			return err
		}
		for result := range results {
			if result.Err != nil && (result.ObjectName == "" || c.status/100 != 2) {
				return result.Err // of the request
			}
			of := target{result.ObjectName, result.ObjectVersionID}
			if sent[0].id == "" {
				of.id = "" // that of the marker, on some servers
			}
			if result.Err != nil {
				refused[of] = result.Err
			}
			delete(left, of)
		}
		for of := range left {
			refused[of] = fmt.Errorf("the answer does not name it: %w", errAnswer)
		}
		return ctx.Err()
	})
	if err != nil {
		return nil, err
	}
	for _, v := range sent {
		if refusal := refused[target{v.key, v.id}]; refusal != nil {
			failed[v] = refusal
		}
	}
	return failed, nil
}

var errUntried = errors.New("it was not tried")

// common returns the directory of all keys, for errors.
func common(keys []string) string {
	dir := path.Dir(keys[0])
	for _, key := range keys {
		for dir != "." && !strings.HasPrefix(key, dir+"/") {
			dir = path.Dir(dir)
		}
	}
	if dir == "." {
		return ""
	}
	return dir
}
