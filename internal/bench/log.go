package bench

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/store"
)

// logBench is `bench log --json`. Latencies are those of single appends, from the call
// to the acknowledgement that the event is durable.
type logBench struct {
	Bench           string  `json:"bench"`
	Events          int     `json:"events"`
	Writers         int     `json:"writers"`
	Outstanding     int     `json:"outstanding"` // appends in flight of one writer
	Sync            string  `json:"sync"`
	Through         string  `json:"through"` // direct, front or both
	EventsPerSecond float64 `json:"events_per_second"`
	P50             float64 `json:"p50_ms"`
	P99             float64 `json:"p99_ms"`
	FsyncP50        float64 `json:"fsync_p50_ms"` // of 4 KiB in the same directory, before and after

	// With --through both, the figures above are of direct appends.
	FrontEventsPerSecond float64 `json:"front_events_per_second,omitempty"`
	FrontP50             float64 `json:"front_p50_ms,omitempty"`
	FrontP99             float64 `json:"front_p99_ms,omitempty"`
	Ratio                float64 `json:"ratio,omitempty"` // of the rates of one round, front over direct: the median of all rounds

	// With --audit, the figures above are of a store without tamper evidence.
	Audit *auditBench `json:"audit,omitempty"`
}

const (
	throughDirect = "direct"
	throughFront  = "front"
	throughBoth   = "both"
)

func (a *bench) logVerb() *cobra.Command {
	b := logBench{Bench: "log", Sync: "always"}
	dir, audit := "", false
	c := &cobra.Command{
		Use: "log", Short: "Time durable appends to the log by many writers", Args: console.Args(cobra.NoArgs),
		Long: `Time appends to an embedded log that syncs before it acknowledges. Each writer
keeps --outstanding appends of one event in flight. At the end the log must have
them all. The log is in a new directory, which is removed afterwards.

The writers share one connection: within the process, as an owner has it, or
with --through front over TCP on loopback and with a token, as clients of
'ckptstore serve --listen' do, where each event is checked. --through both
appends --events each way, in alternating rounds, and compares the two.

--audit appends --events to each of two new stores, in alternating rounds. The
owner of the second keeps tamper evidence, as after 'ckptstore audit keygen'.
Both owners keep views, as any owner does. A round ends when all of its events
are acknowledged and in the views, and in the second store also hashed. The
ratio is that of the rates, the second store over the first: the median of five
rounds. Publishing a signed head takes up to half a second more, which no rate
includes; head_ms has it.`,
		RunE: func(c *cobra.Command, _ []string) error {
			if b.Events < 1 || b.Writers < 1 || b.Outstanding < 1 {
				return console.Usagef("--events %d --writers %d --outstanding %d: want at least 1 of each", b.Events, b.Writers, b.Outstanding)
			}
			if !slices.Contains([]string{throughDirect, throughFront, throughBoth}, b.Through) {
				return console.Usagef("--through %q: want %s, %s or %s", b.Through, throughDirect, throughFront, throughBoth)
			}
			if audit && b.Through != throughDirect {
				return console.Usagef("--audit --through %s: the evidence is compared with direct appends only", b.Through)
			}
			run := b.run
			if audit {
				run = b.runAudit
			}
			err := scratch(dir, func(dir string) error { return run(c.Context(), dir) })
			if err != nil {
				return err
			}
			return console.Emit(a.Console, b, []logBench{b}, func(w *tabwriter.Writer, _ bool) {
				console.Row(w, "EVENTS", "WRITERS", "OUTSTANDING", "SYNC", "THROUGH", "EVENTS/S", "P50", "P99", "FSYNC P50")
				through := b.Through
				if through == throughBoth {
					through = throughDirect
				}
				console.Row(w, b.Events, b.Writers, b.Outstanding, b.Sync, through, fmt.Sprintf("%.0f", b.EventsPerSecond), ms(b.P50), ms(b.P99), ms(b.FsyncP50))
				if b.Through == throughBoth {
					console.Row(w, b.Events, b.Writers, b.Outstanding, b.Sync, fmt.Sprintf("%s (%.3f)", throughFront, b.Ratio), fmt.Sprintf("%.0f", b.FrontEventsPerSecond), ms(b.FrontP50), ms(b.FrontP99), ms(b.FsyncP50))
				}
				if x := b.Audit; x != nil {
					console.Row(w, b.Events, b.Writers, b.Outstanding, b.Sync, fmt.Sprintf("with audit (%.3f)", x.Ratio), fmt.Sprintf("%.0f", x.EventsPerSecond), ms(x.P50), ms(x.P99), ms(b.FsyncP50))
				}
			})
		},
	}
	f := c.Flags()
	f.IntVar(&b.Events, "events", 200_000, "events to append")
	f.IntVar(&b.Writers, "writers", 64, "concurrent writers")
	f.IntVar(&b.Outstanding, "outstanding", 4, "appends that a writer keeps in flight")
	f.StringVar(&b.Through, "through", throughDirect, "direct, front or both")
	f.BoolVar(&audit, "audit", false, "compare a store with another, which keeps tamper evidence")
	f.StringVar(&dir, "dir", ".", "parent of the new directory, which determines the measured disk")
	return c
}

func ms(v float64) string { return fmt.Sprintf("%.3gms", v) }

// logRounds is the number of rounds of each way that are compared.
const logRounds = 5

func (b *logBench) run(ctx context.Context, dir string) error {
	return withBenchLog(ctx, dir, b.Through != throughDirect, func(direct, front *jetlog.Log) error {
		logs := []wanted{{direct, b.Events}}
		if b.Through == throughBoth {
			logs[0].events *= 2
		}
		return b.between(ctx, dir, logs, func() (err error) {
			switch b.Through {
			case throughBoth:
				err = b.compare(ctx, direct, front)
			case throughFront:
				b.EventsPerSecond, b.P50, b.P99, err = one(b.round(ctx, front, b.Events))
			default:
				b.EventsPerSecond, b.P50, b.P99, err = one(b.round(ctx, direct, b.Events))
			}
			return err
		})
	})
}

// wanted is how many events a log must have at the end, without the first.
type wanted struct {
	log    *jetlog.Log
	events int
}

// between measures the disk before and after do, and checks the logs.
func (b *logBench) between(ctx context.Context, dir string, logs []wanted, do func() error) error {
	const syncs = 50 // on each side of the run: the speed of a disk varies
	fsync, err := fsyncs(dir, syncs)
	if err == nil {
		err = do()
	}
	if err != nil {
		return err
	}
	after, err := fsyncs(dir, syncs)
	if err != nil {
		return err
	}
	for _, w := range logs {
		last, err := w.log.Last(context.WithoutCancel(ctx))
		if err != nil {
			return err
		}
		if want := uint64(1) + uint64(w.events); last != want { //nolint:gosec // above zero
			return fmt.Errorf("the log ends at event %d after %d acknowledged appends, want %d", last, w.events, want)
		}
	}
	b.FsyncP50 = quantile(sorted(append(fsync, after...)), 0.5)
	return nil
}

// one returns the outcome of a single round.
func one(took []time.Duration, rate float64, err error) (perSecond, p50, p99 float64, _ error) {
	if err != nil {
		return 0, 0, 0, err
	}
	sorted(took)
	return rate, quantile(took, 0.5), quantile(took, 0.99), nil
}

// compare compares the front with direct appends.
func (b *logBench) compare(ctx context.Context, direct, front *jetlog.Log) error {
	each := func(log *jetlog.Log) way {
		return func(events int) ([]time.Duration, float64, error) { return b.round(ctx, log, events) }
	}
	of, ratio, err := inTurns(b.Events, each(direct), each(front))
	if err != nil {
		return err
	}
	b.EventsPerSecond, b.P50, b.P99 = of[0].rate, of[0].p50, of[0].p99
	b.FrontEventsPerSecond, b.FrontP50, b.FrontP99, b.Ratio = of[1].rate, of[1].p50, of[1].p99, ratio
	return nil
}

// way appends events in one of two ways. It returns the duration of each append, and the
// rate.
type way func(events int) ([]time.Duration, float64, error)

// outcome is what the rounds of one way led to.
type outcome struct{ rate, p50, p99 float64 }

// inTurns alternates two ways over logRounds rounds, and reverses their order each time.
// The ratio is the median of those of the rounds, the second way over the first.
func inTurns(events int, first, second way) (of [2]outcome, ratio float64, err error) {
	var took [2][]time.Duration
	var rates [2][]float64
	var ratios []float64
	left := events
	for round := range logRounds {
		n := left / (logRounds - round)
		left -= n
		if n == 0 {
			continue
		}
		var rate [2]float64
		for turn := range 2 {
			at := (turn + round) % 2
			runtime.GC() // release the garbage of the turn before
			some, r, err := []way{first, second}[at](n)
			if err != nil {
				return of, 0, err
			}
			rate[at], took[at] = r, append(took[at], some...)
			rates[at] = append(rates[at], r)
		}
		ratios = append(ratios, rate[1]/rate[0])
	}
	for at := range of {
		sorted(took[at])
		of[at] = outcome{middle(rates[at]), quantile(took[at], 0.5), quantile(took[at], 0.99)}
	}
	return of, middle(ratios), nil
}

// round appends events events. It returns the duration of each append, and the rate of
// all.
func (b *logBench) round(ctx context.Context, log *jetlog.Log, events int) ([]time.Duration, float64, error) {
	took := make([]time.Duration, events)
	var next atomic.Int64
	begin := time.Now()
	writers, ctx := errgroup.WithContext(ctx)
	for rank := range b.Writers {
		for range b.Outstanding {
			writers.Go(func() error {
				for i := int(next.Add(1)); i <= events; i = int(next.Add(1)) {
					fact, err := benchReport(rank, i)
					if err != nil {
						return err
					}
					start := time.Now()
					if _, err := log.Append(ctx, fact); err != nil {
						return err
					}
					took[i-1] = time.Since(start)
				}
				return nil
			})
		}
	}
	err := writers.Wait()
	return took, float64(events) / time.Since(begin).Seconds(), err
}

// withBenchLog creates a log, and connects to it in the process and, if listen is set,
// through a front.
func withBenchLog(ctx context.Context, dir string, listen bool, do func(direct, front *jetlog.Log) error) (err error) {
	o := jetlog.ServerOptions{Dir: filepath.Join(dir, "log")}
	token := store.NewID()
	if listen {
		o.Listen = &jetlog.Listen{Address: "127.0.0.1:0", Token: token}
	}
	return benchLogWith(ctx, o, func(server *jetlog.Server, direct *jetlog.Log, _ string) error {
		if !listen {
			return do(direct, nil)
		}
		addr, err := server.Listen(ctx)
		if err != nil {
			return err
		}
		front, err := jetlog.Connect(ctx, jetlog.Options{URL: "nats://" + addr.String(), Token: token})
		if err != nil {
			return err
		}
		defer front.Close()
		if _, _, err := front.Open(ctx); err != nil {
			return errors.Join(errors.New("through the front"), err)
		}
		return do(direct, front)
	})
}
