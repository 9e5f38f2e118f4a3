package stream

import (
	"context"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/data/scan"
	"github.com/ckptstore/ckptstore/internal/object"
	"golang.org/x/sync/errgroup"
)

// sender sends a data file from where its items lie, without a copy: digests are taken from
// the source's memory, and each piece is sent with the sum of the bytes that were digested. If
// a byte changes in between, the backend refuses the piece. Memory does not depend on the
// amount of data, and a piece is as large as the backend likes it: with copies, pieces of
// 32 MiB to 8 connections would cost each rank 350 MiB.
//
//	caller   digest │ digest │ digest │ digest
//	piece           └── send ─────────────┘
//	piece                    └── send ─────────────┘
//
// The items need not end where pieces do: a piece has several runs of memory.
type sender struct {
	to   object.Gatherer
	used func(bytes int64) // as in [stream]
	size int64             // of a piece

	off  int64 // of the piece that is gathered
	runs [][]byte
	n    int64 // bytes in it
	sum  uint32

	sending *errgroup.Group
	ctx     context.Context // ends with the first piece that fails

	digesting time.Duration
}

// Send is [Write] without a copy, to an upload that is a gatherer, from a source whose items stay in
// place until Send returns. It returns the time in which it computed digests.
func Send(ctx context.Context, up object.Upload, to object.Gatherer, header []byte, used func(bytes int64), x checkpoint.Index, order []int, src Source) (digesting time.Duration, err error) {
	s := &sender{to: to, used: used, size: int64(up.Piece())}
	s.sending, s.ctx = errgroup.WithContext(ctx)
	s.sending.SetLimit(max(to.GatherDepth(), 1))
	err = s.items(header, x, order, src)
	if failed := s.sending.Wait(); failed != nil {
		return 0, failed // the cause of err
	}
	return s.digesting, err
}

func (s *sender) items(header []byte, x checkpoint.Index, order []int, src Source) error {
	digest := scan.NewDigester(0)
	defer digest.Free()
	if err := s.add(header, func([]byte) {}); err != nil {
		return err
	}
	for _, i := range order {
		e := &x.Entries[i]
		data, err := Item(s.ctx, src, i, e.Item)
		if err != nil {
			return err
		}
		digest.Begin(e.Item.Bytes)
		if err := s.add(data, digest.Add); err != nil {
			return err
		}
		e.Digest, e.Sums = digest.End()
	}
	return s.flush()
}

// add puts bytes into pieces, and sends those that are full. It calls take for each step of
// them before it sums the step, so that both passes go over bytes in the cache, and bytes
// that change after they were digested are not sent under the right sum.
func (s *sender) add(data []byte, take func([]byte)) error {
	for len(data) > 0 {
		if err := s.ctx.Err(); err != nil {
			return err
		}
		step := data[:min(int64(len(data)), scan.StepSize, s.size-s.n)]
		data = data[len(step):]
		began := time.Now()
		if !object.Readable(func() {
			take(step)
			s.sum = crc32c.Update(s.sum, step)
		}) {
			return object.ErrUnreadable
		}
		s.digesting += time.Since(began)
		s.gather(step)
		if s.n == s.size {
			if err := s.flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

// gather adds a run of memory to the piece, or makes its last run longer.
func (s *sender) gather(step []byte) {
	s.n += int64(len(step))
	if k := len(s.runs) - 1; k >= 0 {
		last := s.runs[k]
		if joined := last[:len(last):cap(last)]; cap(last) >= len(last)+len(step) {
			joined = joined[:len(last)+len(step)]
			if &joined[len(last)] == &step[0] {
				s.runs[k] = joined
				return
			}
		}
	}
	s.runs = append(s.runs, step)
}

// flush sends the gathered piece while others are gathered. It waits if as many as the backend
// can use are being sent.
func (s *sender) flush() error {
	if s.n == 0 {
		return s.ctx.Err()
	}
	runs, off, n, sum := s.runs, s.off, s.n, s.sum
	s.runs, s.off, s.n, s.sum = nil, s.off+s.n, 0, 0
	s.sending.Go(func() error {
		if err := s.to.WriteFrom(runs, off, sum); err != nil {
			return err
		}
		if s.used != nil {
			s.used(n)
		}
		return nil
	})
	return s.ctx.Err()
}
