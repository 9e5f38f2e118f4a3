package bench

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/store"
)

// scratch runs do with a directory for one benchmark, next to the data that it stands
// for, so that the measured disk is the same.
func scratch(beside string, do func(dir string) error) (err error) {
	dir, err := os.MkdirTemp(beside, ".ckptstore-bench-*")
	if err != nil {
		return fmt.Errorf("make a directory for the benchmark: %w: name a writable one with --dir", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	return do(dir)
}

// benchLog runs an embedded log in dir that syncs before it acknowledges, as the owner
// of a store does.
func benchLog(ctx context.Context, dir string, do func(*jetlog.Log, string) error) error {
	return benchLogWith(ctx, jetlog.ServerOptions{Dir: filepath.Join(dir, "log")}, func(_ *jetlog.Server, log *jetlog.Log, id string) error { return do(log, id) })
}

// benchLogWith is benchLog for callers that need the server too.
func benchLogWith(ctx context.Context, o jetlog.ServerOptions, do func(*jetlog.Server, *jetlog.Log, string) error) error {
	// A cancelled start would continue to write to the directory.
	server, err := jetlog.StartServer(context.WithoutCancel(ctx), o)
	if err != nil {
		return err
	}
	defer server.Shutdown()
	log, err := jetlog.Connect(ctx, jetlog.Options{Dial: func(context.Context) (net.Conn, error) { return server.Dial() }})
	if err != nil {
		return err
	}
	defer log.Close()
	id := store.NewID()
	created, err := events.NewDecision(store.Stamp("bench"), events.Aggregate{}, &events.StoreCreated{Store: id, Format: store.Format, Data: "data"})
	if err != nil {
		return err
	}
	if err := log.Create(ctx, created); err != nil {
		return err
	}
	return do(server, log, id)
}

const benchRun = "bench"

// benchReport returns a rank's report after an iteration: most of any log.
func benchReport(rank, iteration int) (events.Fact, error) {
	return events.NewFact(store.Stamp("bench"), events.Scope{Run: benchRun, Trial: "main", Actor: events.Rank(rank)}, &events.Metrics{
		Attempt: 1, Iteration: iteration, Step: int64(iteration), Seconds: 0.25,
		Metrics: map[string]any{"loss": 1 / float64(iteration), "lr": 0.001, "grad_norm": 1.5},
	})
}

// quantile returns the value below which the given share of sorted durations lies, in
// milliseconds.
func quantile(sorted []time.Duration, share float64) float64 {
	at := min(int(share*float64(len(sorted))), len(sorted)-1)
	return sorted[at].Seconds() * 1e3
}

// fsyncs times appends of 4 KiB to a file in dir, each with its fsync.
func fsyncs(dir string, n int) (took []time.Duration, err error) {
	f, err := os.OpenFile(filepath.Join(dir, "fsync"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	block := make([]byte, 4096)
	for range n {
		begin := time.Now()
		if _, err := f.Write(block); err != nil {
			return nil, err
		}
		if err := f.Sync(); err != nil {
			return nil, err
		}
		took = append(took, time.Since(begin))
	}
	return took, nil
}

func sorted(d []time.Duration) []time.Duration {
	slices.Sort(d)
	return d
}
