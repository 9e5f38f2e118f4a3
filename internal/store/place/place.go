// Package place opens the place of a store's data outside of its directory: a prefix of a
// bucket.
//
//	s3://bucket/prefix/location.json   identifies the store; made once, never replaced
//	s3://bucket/prefix/data/           checkpoints, as in a directory: see package data
//	s3://bucket/prefix/blobs/          event bodies that are too large for the log
package place

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path"
	"strings"

	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/s3"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Scheme begins the URL of a bucket.
const Scheme = "s3://"

// MarkName is the object that identifies the store whose data has a prefix.
const MarkName = "location.json"

// mostMark is more bytes than a mark has.
const mostMark = 1 << 16

// ErrTaken reports a prefix that another store has claimed.
var ErrTaken = problem.New(problem.Conflict, "the prefix belongs to a store")

// IsBucket reports whether the place of data is the URL of a bucket.
func IsBucket(where string) bool {
	return len(where) >= len(Scheme) && strings.EqualFold(where[:len(Scheme)], Scheme)
}

// Redacted returns the URL of a bucket without what should not be in it, for messages.
func Redacted(where string) string {
	at, err := s3.Parse(where)
	if err != nil {
		before, _, _ := strings.Cut(where, "?")
		scheme, rest, _ := strings.Cut(before, "://")
		if _, host, secret := strings.Cut(rest, "@"); secret {
			rest = host
		}
		return scheme + "://" + rest
	}
	return at.String()
}

// Bucket is a prefix of a bucket that has, or will have, the data of one store.
type Bucket struct {
	at               s3.Location
	top, data, blobs *s3.Bucket
}

// Open parses the URL of a bucket, and finds its credentials when the first request is made.
// It makes no request.
func Open(where string, log *slog.Logger) (*Bucket, error) {
	at, err := s3.Parse(where)
	if err != nil {
		return nil, err
	}
	b := &Bucket{at: at}
	for below, of := range map[string]**s3.Bucket{"": &b.top, "data": &b.data, "blobs": &b.blobs} {
		under := at
		under.Prefix = path.Join(at.Prefix, below)
		if *of, err = s3.New(under, s3.Options{Logger: log}); err != nil {
			return nil, errors.Join(err, b.Close())
		}
	}
	return b, nil
}

// Close waits for uploads that are being abandoned, and closes the connections.
func (b *Bucket) Close() error {
	var errs []error
	for _, of := range []*s3.Bucket{b.data, b.blobs, b.top} {
		if of != nil {
			errs = append(errs, of.Close())
		}
	}
	return errors.Join(errs...)
}

// Location returns the URL in its canonical form, which a store records.
func (b *Bucket) Location() string { return b.at.String() }

// Data returns the backend of the checkpoints.
func (b *Bucket) Data() object.Backend { return b.data }

// Blobs returns the backend of large event bodies.
func (b *Bucket) Blobs() object.Backend { return b.blobs }

// Mark returns the mark of the store whose data this is. Without one, the error is
// [fs.ErrNotExist].
func (b *Bucket) Mark(ctx context.Context) ([]byte, error) {
	return b.top.Get(ctx, MarkName, mostMark)
}

// Claim makes the mark of a store, after it has tried out whether the bucket keeps the
// promises that a store needs. A mark that is there already is [ErrTaken], and so is a prefix
// in which something else is. It returns what the operator of the bucket should change.
func (b *Bucket) Claim(ctx context.Context, mark []byte) (warnings []string, err error) {
	there, err := b.Mark(ctx)
	if err == nil {
		return nil, fmt.Errorf("%w: %s has the mark %s; choose another prefix, or remove that object if its store was never made",
			ErrTaken, b.top.Path(MarkName), strings.TrimSpace(string(there)))
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	in, err := b.top.List(ctx, "")
	if err != nil {
		return nil, err
	}
	if len(in) > 0 {
		return nil, fmt.Errorf("%w: %s is not empty: it has %q; choose an empty prefix", ErrTaken, b.Location(), in[0].Name)
	}
	found, err := b.top.Probe(ctx)
	if err != nil {
		return nil, err
	}
	if err := b.write(ctx, mark, object.Exclusive); errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("%w: another init has just claimed %s", ErrTaken, b.Location())
	} else if err != nil {
		return nil, err
	}
	return found.Warnings, nil
}

// TakeOver replaces the mark: the prefix is another store's from then on, which was recovered
// from what is there.
func (b *Bucket) TakeOver(ctx context.Context, mark []byte) error {
	return b.write(ctx, mark, object.Replace)
}

func (b *Bucket) write(ctx context.Context, mark []byte, mode object.Mode) error {
	u, err := b.top.Create(ctx, MarkName, int64(len(mark)), mode)
	if err != nil {
		return err
	}
	defer u.Abort()
	if _, err := u.WriteAt(mark, 0); err != nil {
		return err
	}
	return u.Commit(ctx)
}

// Clear removes everything below the prefix, the mark last: a Clear that was interrupted can be
// repeated by the store whose mark it is.
func (b *Bucket) Clear(ctx context.Context) error {
	for _, in := range []*s3.Bucket{b.data, b.blobs} {
		if err := clearDir(ctx, in, ""); err != nil {
			return err
		}
	}
	return b.Withdraw(ctx)
}

// clearDir removes the files in a directory and below it. A bucket has no directories, so they go
// with their files.
func clearDir(ctx context.Context, in object.Backend, dir string) error {
	entries, err := in.List(ctx, dir)
	if err != nil {
		return err
	}
	var files []string
	for _, e := range entries {
		name := path.Join(dir, e.Name)
		if e.Info == nil || !e.Info.Dir {
			files = append(files, name)
		} else if err := clearDir(ctx, in, name); err != nil {
			return err
		}
	}
	return in.Remove(ctx, files...)
}

// Withdraw removes the mark of a store that could not be made, or that was cleared.
func (b *Bucket) Withdraw(ctx context.Context) error { return b.top.Remove(ctx, MarkName) }
