package jetlog

import (
	"context"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go/jetstream"
)

// CreateBuckets makes the buckets of leases and cursors that are not there, each
// with as many copies as the log has, so that clients need no permission to
// make streams. A bucket that is there with other copies is [ErrUnsafe]. The log
// must be open.
func (l *Log) CreateBuckets(ctx context.Context) error {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	all := func(subject string) bool {
		return subject == apiAccount || strings.HasPrefix(subject, "$JS.API.") && strings.Contains(subject, ".KV_CKPT_")
	}
	err := l.retry(concerning(ctx, all), func(ctx context.Context) error {
		info, err := l.ours(ctx)
		if err != nil {
			return err
		}
		for _, b := range []struct{ name, is string }{{Leases, leasesAre}, {Cursors, cursorsAre}, {Witnesses, witnessesAre}} {
			kv, err := l.bucket(ctx, b.name, b.is)
			if err != nil {
				return err
			}
			status, err := kv.Status(ctx)
			if err != nil {
				return err
			}
			got, ok := status.(*jetstream.KeyValueBucketStatus)
			if ok && got.StreamInfo().Config.Replicas != info.Config.Replicas {
				return fmt.Errorf("%w: bucket %s has %d copies and the log has %d: run `nats stream edit KV_%s --replicas %d`",
					ErrUnsafe, b.name, got.StreamInfo().Config.Replicas, info.Config.Replicas, b.name, info.Config.Replicas)
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("make the buckets of the log at %s: %w", l.opts.where(), err)
	}
	return nil
}
