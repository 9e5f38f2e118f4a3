package bench

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"sync/atomic"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/ckptstore/ckptstore/internal/bytesize"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/object/s3"
	"github.com/ckptstore/ckptstore/planner"
)

// bucketBench is `bench bucket --json`. Seconds are medians of benchRuns runs.
type bucketBench struct {
	Bench    string        `json:"bench"`
	Location string        `json:"location"`
	Ranks    int           `json:"ranks"`
	Tensors  int           `json:"tensors"` // of each rank
	Bytes    int64         `json:"bytes"`   // of all ranks together
	Part     int           `json:"part_bytes"`
	Span     int64         `json:"span_bytes"`
	Put      bucketSide    `json:"put"`
	Get      bucketSide    `json:"get"`
	Prices   object.Prices `json:"usd"`
}

// bucketSide is one direction. Raw is the same bytes in the same parts or spans, by the same
// client, as many at a time, from and to warm memory, without digests and checks.
type bucketSide struct {
	Seconds    float64 `json:"seconds"`
	RawSeconds float64 `json:"raw_seconds"`
	Rate       float64 `json:"bytes_per_second"`
	RawRate    float64 `json:"raw_bytes_per_second"`
	Ratio      float64 `json:"ratio"`          // of the rates
	CPU        float64 `json:"cpu_per_gb"`     // seconds of this process
	RawCPU     float64 `json:"raw_cpu_per_gb"` // seconds of this process
	Requests   string  `json:"requests"`       // of one save or load
	Dollars    float64 `json:"usd"`            // of those requests
	OverRead   float64 `json:"over_read,omitempty"`
}

func (a *bench) bucketVerb() *cobra.Command {
	b := bucketBench{Bench: "bucket", Prices: object.Standard()}
	text := ""
	c := &cobra.Command{
		Use: "bucket URL", Short: "Time saves to a bucket and loads from it, compared with raw requests", Args: console.Args(cobra.ExactArgs(1)),
		Long: `Save --size bytes of --ranks ranks to the bucket s3://BUCKET/PREFIX, and load
them. A save sends each rank's slot in shared memory in parts, with the digests
of every chunk, and commits. A load reads all ranks' bytes into memory that was
touched before, and compares every block with its checksum.

Before or after each, in turns, the same bytes are sent and read raw: by the same
client, in the same parts and spans, as many at a time, without digests and
checks. ratio is the rate of the save or load over the raw rate. Both are
repeated five times after a first run; each figure is the median. Every byte of
the last load is compared with the slots. The objects are below
PREFIX/bench-…, and are removed afterwards.`,
		Example: `  ckptstore bench bucket 's3://models/bench?region=eu-central-1' --size 8GB --ranks 8`,
		RunE: func(c *cobra.Command, args []string) (err error) {
			if b.Bytes, err = console.ParseSize(text); err != nil {
				return console.Usagef("--size: %w", err)
			}
			if b.Ranks < 1 || b.Tensors < 1 || b.Bytes < int64(b.Ranks)*int64(b.Tensors) {
				return console.Usagef("--ranks %d --tensors %d --size %s: want at least one of each, and a byte a tensor", b.Ranks, b.Tensors, text)
			}
			if err := b.run(c.Context(), args[0]); err != nil {
				return err
			}
			return console.Emit(a.Console, b, []bucketBench{b}, func(w *tabwriter.Writer, _ bool) {
				console.Row(w, "", "BYTES", "SECONDS", "BYTES/S", "RAW BYTES/S", "RATIO", "CPU S/GB", "RAW CPU S/GB", "USD", "REQUESTS")
				for _, s := range []struct {
					name string
					of   bucketSide
				}{{"put", b.Put}, {"get", b.Get}} {
					console.Row(w, s.name, bytesize.Text(b.Bytes), fmt.Sprintf("%.3f", s.of.Seconds), fmt.Sprintf("%.4g", s.of.Rate), fmt.Sprintf("%.4g", s.of.RawRate),
						fmt.Sprintf("%.3f", s.of.Ratio), fmt.Sprintf("%.3f", s.of.CPU), fmt.Sprintf("%.3f", s.of.RawCPU), fmt.Sprintf("%.5f", s.of.Dollars), s.of.Requests)
				}
			})
		},
	}
	f := c.Flags()
	f.IntVar(&b.Ranks, "ranks", 4, "ranks that save")
	f.IntVar(&b.Tensors, "tensors", 32, "tensors of each rank")
	f.StringVar(&text, "size", "1GB", "bytes of all ranks together")
	f.Var(&b.Prices, "prices", "of 1000 PUT and LIST requests, of 1000 GET and HEAD requests, and of a GiB a month, in US dollars")
	return c
}

// run computes the figures.
func (b *bucketBench) run(ctx context.Context, where string) (err error) {
	at, err := s3.Parse(where)
	if err != nil {
		return err
	}
	at.Prefix = path.Join(at.Prefix, fmt.Sprintf("bench-%x", time.Now().UnixNano()))
	b.Location = at.String()
	bucket, err := s3.New(at, s3.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, bucket.Close()) }()
	root := data.OpenBucket(bucket)
	root.OfStore("bench")
	s := &benchSaver{root: root}
	defer s.close()
	each := b.Bytes / int64(b.Ranks) / int64(b.Tensors)
	b.Bytes, b.Span = each*int64(b.Ranks)*int64(b.Tensors), bucket.Reading().Span
	for rank := range b.Ranks {
		if err := s.addRank(rank, b.Tensors, each); err != nil {
			return err
		}
	}
	raw := &rawBucket{bucket: bucket, ranks: s.ranks}
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		err = errors.Join(err, raw.remove(end))
		for _, old := range s.base {
			err = errors.Join(err, root.RemoveCommitted(end, old.Ref))
		}
	}()
	var put, get sideRuns
	for n := range benchRuns + 1 {
		s.change(n, 1)
		s.stage()
		if err := raw.sum(ctx); err != nil {
			return err
		}
		if err := put.turn(n, b.Bytes, bucket, func() (time.Duration, error) {
			took, _, err := s.save(ctx, n)
			return took, err
		}, func() (time.Duration, error) { return raw.put(ctx) }); err != nil {
			return err
		}
		l, err := loaderOf(ctx, root, s)
		if err != nil {
			return err
		}
		read := int64(0)
		if err := get.turn(n, b.Bytes, bucket, func() (time.Duration, error) {
			began := time.Now()
			read, err = l.reader.ReadData(ctx, l.wants, l.reads, l)
			return time.Since(began), err
		}, func() (time.Duration, error) { return raw.get(ctx, b.Span) }); err != nil {
			return err
		}
		if err := l.same(s); err != nil {
			return err
		}
		b.Get.OverRead = float64(read) / float64(b.Bytes)
	}
	b.Part = raw.part
	over := b.Get.OverRead
	b.Put, b.Get = put.side(b.Bytes, b.Prices), get.side(b.Bytes, b.Prices)
	b.Get.OverRead = over
	return nil
}

// sideRuns are the runs of one direction.
type sideRuns struct {
	seconds, raw, cpu, rawCPU []float64
	asked                     s3.Requests // by the last run
}

// turn runs a save or load and the raw requests, in an order that alternates. The first turn
// does not count.
func (r *sideRuns) turn(n int, size int64, bucket *s3.Bucket, ours, raw func() (time.Duration, error)) error {
	gb := float64(size) / 1e9
	measure := func(do func() (time.Duration, error), seconds, cpu *[]float64) error {
		before := cpuSeconds(syscall.RUSAGE_SELF)
		took, err := do()
		if err != nil || n == 0 {
			return err
		}
		*seconds, *cpu = append(*seconds, took.Seconds()), append(*cpu, (cpuSeconds(syscall.RUSAGE_SELF)-before)/gb)
		return nil
	}
	turns := []func() error{
		func() error {
			before := bucket.Requests()
			err := measure(ours, &r.seconds, &r.cpu)
			r.asked = since(bucket.Requests(), before)
			return err
		},
		func() error { return measure(raw, &r.raw, &r.rawCPU) },
	}
	if n%2 == 0 {
		turns[0], turns[1] = turns[1], turns[0]
	}
	return errors.Join(turns[0](), turns[1]())
}

// since returns the requests after before.
func since(now, before s3.Requests) s3.Requests {
	return s3.Requests{
		Get: now.Get - before.Get, Head: now.Head - before.Head, Put: now.Put - before.Put, Part: now.Part - before.Part,
		Create: now.Create - before.Create, Complete: now.Complete - before.Complete, Abort: now.Abort - before.Abort,
		List: now.List - before.List, Delete: now.Delete - before.Delete, Other: now.Other - before.Other,
		Sent: now.Sent - before.Sent, Received: now.Received - before.Received,
		Repeated: now.Repeated - before.Repeated, Throttled: now.Throttled - before.Throttled,
	}
}

func (r *sideRuns) side(size int64, prices object.Prices) bucketSide {
	out := bucketSide{Seconds: middle(r.seconds), RawSeconds: middle(r.raw), CPU: middle(r.cpu), RawCPU: middle(r.rawCPU), Requests: r.asked.String()}
	out.Rate, out.RawRate = float64(size)/out.Seconds, float64(size)/out.RawSeconds
	out.Ratio = out.Rate / out.RawRate
	n := r.asked
	out.Dollars = prices.Puts(int(n.Put+n.Part+n.Create+n.Complete+n.List)) + prices.Gets(int(n.Get+n.Head))
	return out
}

// loaderOf plans a load of the last save onto the same ranks.
func loaderOf(ctx context.Context, root *data.Root, s *benchSaver) (*benchLoader, error) {
	m, err := root.Reader(s.base[0].Ref).WithManifest(s.base[0].Manifest).ReadMetadata(ctx)
	if err != nil {
		return nil, err
	}
	l := &benchLoader{reader: root.Reader(s.base[0].Ref)}
	for rank, r := range s.ranks {
		for _, it := range r.items {
			l.wants = append(l.wants, checkpoint.Want{Shard: it.Shard, Rank: rank})
		}
	}
	if err := l.prepare(ctx, m); err != nil {
		return nil, err
	}
	// The indexes are read before the time begins, as in a training that loads more than once.
	_, err = planner.NewLoader(m.Layout).Load(l.wants)
	return l, err
}

// same compares what was loaded with the slots.
func (l *benchLoader) same(s *benchSaver) error {
	n := 0
	for rank, r := range s.ranks {
		for i := range r.items {
			if want, _ := r.Item(i); !bytes.Equal(want, l.parts[n]) {
				return fmt.Errorf("%q of rank %d was loaded with different bytes than were staged", r.items[i].Shard.FQN, rank)
			}
			n++
		}
	}
	return nil
}

// rawBucket sends the slots as they are, and reads them back.
type rawBucket struct {
	bucket *s3.Bucket
	ranks  []*benchRank
	sums   [][]uint32 // of the parts of each slot
	part   int
	memory []byte
}

func (r *rawBucket) name(rank int) string { return fmt.Sprintf("raw/r%05d", rank) }

// sum takes the checksums that the requests need, outside of the time.
func (r *rawBucket) sum(ctx context.Context) error {
	u, err := r.bucket.Create(ctx, r.name(0), int64(len(r.ranks[0].slot)), object.Replace)
	if err != nil {
		return err
	}
	r.part = u.Piece()
	u.Abort() // nothing was sent
	r.sums = make([][]uint32, len(r.ranks))
	for rank, of := range r.ranks {
		for at := 0; at < len(of.slot); at += r.part {
			r.sums[rank] = append(r.sums[rank], crc32c.Checksum(of.slot[at:min(at+r.part, len(of.slot))]))
		}
	}
	return nil
}

func (r *rawBucket) put(ctx context.Context) (time.Duration, error) {
	began := time.Now()
	g, ctx := errgroup.WithContext(ctx)
	for rank, of := range r.ranks {
		g.Go(func() error {
			u, err := r.bucket.Create(ctx, r.name(rank), int64(len(of.slot)), object.Replace)
			if err != nil {
				return err
			}
			defer u.Abort()
			to, ok := u.(object.Gatherer)
			if !ok || u.Piece() != r.part {
				return fmt.Errorf("the bucket has parts of %d bytes, not %d", u.Piece(), r.part)
			}
			var parts errgroup.Group
			parts.SetLimit(to.GatherDepth())
			for i, sum := range r.sums[rank] {
				at := i * r.part
				parts.Go(func() error {
					return to.WriteFrom([][]byte{of.slot[at:min(at+r.part, len(of.slot))]}, int64(at), sum)
				})
			}
			if err := parts.Wait(); err != nil {
				return err
			}
			return u.Commit(ctx)
		})
	}
	err := g.Wait()
	return time.Since(began), err
}

func (r *rawBucket) get(ctx context.Context, span int64) (time.Duration, error) {
	total := int64(0)
	for _, of := range r.ranks {
		total += int64(len(of.slot))
	}
	if r.memory == nil {
		r.memory = make([]byte, total)
		for at := 0; at < len(r.memory); at += 4096 {
			r.memory[at] = 1
		}
	}
	began := time.Now()
	var read atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(r.bucket.Reading().Depth)
	base := int64(0)
	for rank, of := range r.ranks {
		f, err := r.bucket.Open(ctx, r.name(rank))
		if err != nil {
			return 0, err
		}
		defer func() { _ = f.Close() }() // nothing was written to it
		for at := int64(0); at < int64(len(of.slot)); at += span {
			into := r.memory[base+at:][:min(span, int64(len(of.slot))-at)]
			g.Go(func() error {
				body, err := f.(object.Ranger).ReadRange(at, int64(len(into)))
				if err != nil {
					return err
				}
				n, err := io.ReadFull(body, into)
				read.Add(int64(n))
				return errors.Join(err, body.Close())
			})
		}
		base += int64(len(of.slot))
	}
	err := g.Wait()
	if took := time.Since(began); err != nil || read.Load() == total {
		return took, err
	}
	return 0, fmt.Errorf("read %d bytes raw, want %d", read.Load(), total)
}

func (r *rawBucket) remove(ctx context.Context) error {
	names := make([]string, len(r.ranks))
	for rank := range r.ranks {
		names[rank] = r.name(rank)
	}
	return r.bucket.Remove(ctx, names...)
}
