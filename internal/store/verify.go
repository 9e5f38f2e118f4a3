package store

import (
	"context"
	"fmt"
	"sync"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/projections"
)

// VerifyOptions say how to verify several checkpoints.
type VerifyOptions struct {
	Quick    bool              // no chunk is read: see [data.VerifyOptions]
	Progress func(bytes int64) // told how many bytes are read so far, by one goroutine at a time; may be nil
}

// VerifyAll verifies committed checkpoints, several at a time. A file that more
// than one of them has a link to is read once. Digests of adopted files that are
// not known yet are learned, unless it is quick or the store was opened to read, and
// recorded, as by [Store.Learn]. The reports are in the order of the checkpoints.
func (s *Store) VerifyAll(ctx context.Context, list []projections.Checkpoint, o VerifyOptions) ([]data.Report, error) {
	s.learning.Lock()
	defer s.learning.Unlock()
	together := data.NewTogether()
	return verifyAll(ctx, together, len(list), o.Progress, func(ctx context.Context, i int, progress func(int64)) (data.Report, error) {
		if !o.Quick {
			report, err := s.learnOne(ctx, list[i], data.LearnOptions{Progress: progress, Together: together})
			return s.owed(list[i], report), err
		}
		digest, err := checkpoint.ParseDigest(list[i].Manifest)
		if err != nil {
			return data.Report{}, fmt.Errorf("verify %s@%s: %w", list[i].Run, list[i].ID, err)
		}
		report, err := s.Data.VerifyWith(ctx, RefOf(list[i]), digest, data.VerifyOptions{Progress: progress, Quick: true, Together: together})
		return s.owed(list[i], report), err
	})
}

// VerifyReceipts verifies checkpoints by what their receipts say, as
// [Store.VerifyAll] does by the log; it learns nothing.
func VerifyReceipts(ctx context.Context, root *data.Root, list []checkpoint.Receipt, o VerifyOptions) ([]data.Report, error) {
	together := data.NewTogether()
	return verifyAll(ctx, together, len(list), o.Progress, func(ctx context.Context, i int, progress func(int64)) (data.Report, error) {
		return root.VerifyWith(ctx, list[i].Ref, list[i].Manifest, data.VerifyOptions{Progress: progress, Quick: o.Quick, Together: together})
	})
}

// verifyAll adds up the progress of n verifications.
func verifyAll(ctx context.Context, together *data.Together, n int, progress func(int64), verify func(context.Context, int, func(int64)) (data.Report, error)) ([]data.Report, error) {
	reports := make([]data.Report, n)
	var mu sync.Mutex
	sum := int64(0)
	err := together.Each(ctx, n, func(ctx context.Context, i int) (err error) {
		before := int64(0)
		reports[i], err = verify(ctx, i, func(read int64) {
			mu.Lock()
			defer mu.Unlock()
			sum, before = sum+read-before, read
			if progress != nil {
				progress(sum)
			}
		})
		return err
	})
	return reports, err
}
