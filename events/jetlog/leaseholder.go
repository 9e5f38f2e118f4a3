package jetlog

import (
	"context"
	"fmt"
	"time"
)

// LeaseHolder is who holds the lease called name, as [Log.Lease] would say it,
// expired or not; nil if nobody does. It takes nothing: somebody may acquire the
// lease, and its holder release it, right after.
func (l *Log) LeaseHolder(ctx context.Context, name string) (held *LeaseHeldError, err error) {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	e := &Lease{l: l, name: name}
	err = l.retry(e.concerned(ctx), func(ctx context.Context) error {
		held = nil
		if err := l.known(ctx); err != nil {
			return err
		}
		now, err := e.read(ctx)
		if err != nil || now.revision == 0 {
			return err
		}
		left, err := e.left(ctx, now)
		if err != nil {
			return err
		}
		held = &LeaseHeldError{Name: name, Holder: now.value.Holder, Until: time.Now().Add(left), revision: now.revision}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("ask who holds lease %q at %s: %w", name, l.opts.where(), err)
	}
	return held, nil
}
