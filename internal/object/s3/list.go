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
	var entries []object.Entry
	seen := map[string]bool{} // a list that was continued may repeat a directory
	err := b.list(ctx, prefix, false, page, func(found minio.ObjectInfo) bool {
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

// Remove implements [object.Backend]. In a bucket with versions the space is freed when their
// rules remove them.
func (b *Bucket) Remove(ctx context.Context, names ...string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	var keys []string
	var problems error
	for _, name := range names {
		if err := object.Validate(name); err != nil {
			problems = errors.Join(problems, err)
			continue
		}
		key := b.at.key(name)
		if strings.ContainsFunc(key, func(r rune) bool { return r < 0x20 || r == 0xfffe || r == 0xffff }) {
			problems = errors.Join(problems, b.removeOne(ctx, key)) // XML cannot name it
			continue
		}
		keys = append(keys, key)
	}
	if len(keys) == 1 {
		return errors.Join(problems, b.removeOne(ctx, keys[0]))
	}
	for batch := range slices.Chunk(keys, page) {
		problems = errors.Join(problems, b.removeMany(ctx, batch))
	}
	return problems
}

func (b *Bucket) removeOne(ctx context.Context, key string) error {
	err := b.do(ctx, request{op: "remove", key: key, class: classDelete}, func(ctx context.Context, c *call) error {
		return c.core.RemoveObject(ctx, b.at.Bucket, key, minio.RemoveObjectOptions{})
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// removeMany removes keys in one request. Those that the server could not remove for a reason
// that may pass are removed one by one.
func (b *Bucket) removeMany(ctx context.Context, keys []string) error {
	failed := map[string]error{}
	err := b.do(ctx, request{op: fmt.Sprintf("remove %d files below", len(keys)), key: common(keys), class: classDelete}, func(ctx context.Context, c *call) error {
		left := map[string]bool{}
		for _, key := range keys {
			left[key] = true
		}
		clear(failed)
		results, err := c.core.RemoveObjectsWithIter(ctx, b.at.Bucket, func(yield func(minio.ObjectInfo) bool) {
			for _, key := range keys {
				if !yield(minio.ObjectInfo{Key: key}) {
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
			if result.Err != nil {
				failed[result.ObjectName] = result.Err
			}
			delete(left, result.ObjectName)
		}
		for key := range left {
			failed[key] = fmt.Errorf("the answer does not name it: %w", errAnswer)
		}
		return ctx.Err()
	})
	if err != nil {
		return err
	}
	var problems error
	for _, key := range keys {
		if failed[key] != nil {
			problems = errors.Join(problems, b.removeOne(ctx, key))
		}
	}
	return problems
}

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
