package s3

import (
	"context"
	"errors"
	"io/fs"
	"net/http"
	"sync"
	"time"

	minio "github.com/minio/minio-go/v7"
	"golang.org/x/sync/errgroup"

	"github.com/ckptstore/ckptstore/internal/object"
)

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
