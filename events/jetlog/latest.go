package jetlog

import (
	"context"
	"errors"
	"fmt"
)

// Latest is the sequence of the last event whose subject matches one of the
// filters, 0 when there is none. The log is not read for it.
func (l *Log) Latest(ctx context.Context, filters ...string) (uint64, error) {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	last := uint64(0)
	for _, filter := range filters {
		err := l.retry(ctx, func(ctx context.Context) error {
			if err := l.known(ctx); err != nil {
				return err
			}
			e, err := l.get(ctx, msgGet{LastFor: filter})
			if errors.Is(err, errNoMessage) {
				return nil
			}
			last = max(last, e.Sequence)
			return err
		})
		if err != nil {
			return 0, fmt.Errorf("last event under %s at %s: %w", filter, l.opts.where(), err)
		}
	}
	return last, nil
}
