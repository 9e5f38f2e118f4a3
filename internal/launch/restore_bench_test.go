package launch_test

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/tensor"
)

// timesLoads saves BYTES on all ranks in 64 tensors, or loads them several times,
// and prints how long each load took.
var timesLoads = role("times its loads", func(ctx context.Context, args []string) error {
	bytesOf, err := strconv.ParseInt(args[0], 10, 64)
	if err != nil {
		return err
	}
	c, err := client.Connect(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	const tensors = 64
	var s client.State
	columns := bytesOf / tensors / int64(c.WorldSize)
	for i := range tensors {
		shape := tensor.Shape{int64(c.WorldSize), columns}
		box := tensor.Box{Offsets: []int64{int64(c.Rank), 0}, Sizes: []int64{1, columns}}
		s.Tensors = append(s.Tensors, client.Tensor{
			Shard: tensor.Shard{FQN: fmt.Sprintf("layers.%d.weight", i), DType: tensor.Uint8, Global: shape, Box: box},
			Data:  slices.Repeat([]byte{byte(i), byte(c.Rank), 3, 5, 7, 11, 13, 17}, int(columns)/8),
		})
	}
	if c.Resume == "" {
		if err := saveAll(ctx, c, 1, s, client.SaveOptions{}); err != nil {
			return err
		}
		switch {
		case args[1] == "files":
			return nil
		case args[1] == "killed" && c.Rank == 1:
			return unix.Kill(unix.Getpid(), unix.SIGKILL)
		case args[1] == "killed":
			return untilTerm(ctx)
		}
	}
	for range 4 {
		if err := meet(ctx, c); err != nil {
			return err
		}
		for _, t := range s.Tensors {
			clear(t.Data)
		}
		began := time.Now()
		if _, err := c.Load(ctx, &s, client.LoadOptions{Ref: "latest"}); err != nil {
			return err
		}
		emit("loaded in %d", time.Since(began))
	}
	for i, t := range s.Tensors {
		if !bytes.HasPrefix(t.Data, []byte{byte(i), byte(c.Rank), 3, 5, 7}) {
			return fmt.Errorf("tensor %q is another", t.FQN)
		}
	}
	return nil
})

// BenchmarkRestore reports how long two ranks take to load 2 GB, from slots in
// shared memory, of this attempt or of one in which a rank was killed, and from
// files that are in the page cache: the first load, which has to make the memory
// that it loads into, and the median of three later ones, from the call of the
// slowest rank to its tensors; and how long the trainer takes of that, from the
// decision to the end of the reading.
func BenchmarkRestore(b *testing.B) {
	const size = 2 << 30
	for _, c := range []struct{ name, tier string }{{"slots", "slots"}, {"killed", "slots"}, {"files", "files"}} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				run, out := fmt.Sprint("restore ", time.Now().UnixNano()), newTranscript()
				command := append(slices.Clone(timesLoads), fmt.Sprint(size), c.name)
				if c.name == "files" {
					if err := runJobIn(b, config(run, 2, command, newTranscript(), newTranscript())); err != nil {
						b.Fatal(err)
					}
				}
				cfg := config(run, 2, command, out, newTranscript())
				cfg.MaxRestarts = 1
				if err := runJobIn(b, cfg); err != nil {
					b.Fatalf("%v\n%s", err, out)
				}
				var times [2][]time.Duration
				for rank := range times {
					for _, text := range out.lines(fmt.Sprintf("[rank%d] loaded in ", rank)) {
						n, err := strconv.ParseInt(text, 10, 64)
						if err != nil {
							b.Fatal(err)
						}
						times[rank] = append(times[rank], time.Duration(n))
					}
				}
				var slowest []float64
				for i := range times[0] {
					slowest = append(slowest, max(times[0][i], times[1][i]).Seconds())
				}
				var begun time.Time
				var reading []float64
				for _, r := range eventsOf(b, run) {
					switch body := r.body.(type) {
					case *events.RestoreBegun:
						begun = r.time
					case *events.RestoreCompleted:
						reading = append(reading, r.time.Sub(begun).Seconds())
						if body.Tier != c.tier || body.Bytes != size {
							b.Fatalf("restore.completed: %+v", body)
						}
					}
				}
				b.Logf("%s: loads took %.3f s, of that in the trainer %.3f s", c.name, slowest, reading)
				b.ReportMetric(slowest[0], "s-first")
				b.ReportMetric(median(slowest[1:]), "s-later")
				b.ReportMetric(median(reading[1:]), "s-trainer")
				b.ReportMetric(0, "ns/op")
			}
		})
	}
}

func median(of []float64) float64 {
	of = slices.Sorted(slices.Values(of))
	return of[len(of)/2]
}

// timed is an event's body and time.
type timed struct {
	body events.Body
	time time.Time
}

func eventsOf(tb testing.TB, run string) (out []timed) {
	tb.Helper()
	ctx, cancel := context.WithTimeout(tb.Context(), patience)
	defer cancel()
	end, err := home.Log.Last(ctx)
	if err != nil {
		tb.Fatal(err)
	}
	for r, err := range home.Log.Read(ctx, 1, end) {
		if err != nil {
			tb.Fatal(err)
		}
		if r.Scope.Run != run {
			continue
		}
		body, err := r.Body()
		if err != nil {
			tb.Fatal(err)
		}
		out = append(out, timed{body, r.Time})
	}
	return out
}
