package s3

import (
	"context"
	"errors"
	"slices"
	"sync"

	minio "github.com/minio/minio-go/v7"
)

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
