package launch_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/gpu"
	"github.com/ckptstore/ckptstore/internal/launch/backend"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/projections"
)

var hasFunction = role("has a user function", func(ctx context.Context, _ []string) error {
	emit("sees %s by %s", os.Getenv("CUDA_VISIBLE_DEVICES"), os.Getenv("BY_THE_BACKEND"))
	c, err := client.Connect(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	emit("function of rank %d", c.Rank)
	return nil
})

func devices(uuids ...string) (out []gpu.Device) {
	for i, uuid := range uuids {
		out = append(out, gpu.Device{UUID: uuid, Index: i})
	}
	return out
}

func Test01StartOrder(t *testing.T) {
	j := newJob(t, 2, hasFunction...)
	j.cfg.Devices, j.cfg.GPUsPerWorker = devices("GPU-b", "GPU-a"), 1
	share := true
	j.cfg.ShareDevices = &share
	var h *hooks
	h = hooked(t, j, map[string]func(context.Context, *backend.Group) error{
		"init": func(_ context.Context, g *backend.Group) error {
			for rank, w := range g.Workers { // allocated and created
				if want := []string{"GPU-a", "GPU-b"}[rank]; w.Rank != rank || !slices.Equal(w.Devices, []string{want}) {
					t.Errorf("worker %d is %+v", rank, w)
				}
				if len(w.Env) > 0 {
					t.Errorf("devices are shared before the init hook: %v", w.Env)
				}
			}
			return nil
		},
		"start": func(_ context.Context, g *backend.Group) error {
			for _, w := range g.Workers { // shared
				if w.Env["CUDA_VISIBLE_DEVICES"] != "GPU-a,GPU-b" {
					t.Errorf("rank %d is given %v", w.Rank, w.Env)
				}
				w.Env["BY_THE_BACKEND"] = fmt.Sprint("rank ", w.Rank)
			}
			if s := h.sockets(); len(s) > 0 {
				t.Errorf("sessions before OnStart: %q", s)
			}
			return nil
		},
		"training": func(context.Context, *backend.Group) error {
			if s := h.sockets(); len(s) != 2 {
				t.Errorf("sessions before OnTrainingStart: %q", s)
			}
			if h.hears("function") {
				t.Error("the user function runs before OnTrainingStart has ended")
			}
			return nil
		},
	})
	h.holds = true
	j.must()
	h.wantCalls("init", "start", "training", "shutdown")
	for rank := range 2 {
		wantText(t, j.out, fmt.Sprintf("[rank%d] sees GPU-a,GPU-b by rank %d\n", rank, rank), fmt.Sprintf("[rank%d] function of rank %d\n", rank, rank))
	}
	ranks := one[events.GroupStarted](t, runOf(t)).Ranks
	if !slices.Equal(ranks[0].Devices, []string{"GPU-a"}) || !slices.Equal(ranks[1].Devices, []string{"GPU-b"}) {
		t.Errorf("group.started: %+v", ranks)
	}
}

var rankZeroConnects = role("connects on rank 0 alone", func(ctx context.Context, _ []string) error {
	if os.Getenv("RANK") != "0" {
		return untilTerm(ctx)
	}
	_, err := client.Connect(ctx)
	return err
})

// A program that sends no hello does not delay the others forever.
func Test01HeldHelloEnds(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, rankZeroConnects...)
	j.cfg.Collective = shortly
	hooked(t, j, nil).holds = true
	failed := j.fails()
	if failed.Rank != 0 || !strings.Contains(strings.Join(failed.Tail, ""), "before all 2 ranks have connected") {
		t.Errorf("%+v", failed)
	}
}

var sitsConnected = workerRole("sits connected", func(ctx context.Context, c *client.Client) error {
	term := terms()
	emit("sits")
	return term(ctx)
})

func Test03ShutdownIsGraceful(t *testing.T) {
	t.Parallel()
	t.Run("asked for", func(t *testing.T) {
		t.Parallel()
		j := newJob(t, 2, sitsConnected...)
		h := hooked(t, j, map[string]func(context.Context, *backend.Group) error{
			"shutdown": func(context.Context, *backend.Group) error {
				if n := len(survivors(t, j.cfg.Job)); n != 2 {
					t.Errorf("%d workers live when the backend is shut down, want 2", n)
				}
				return errors.New("rank 1 is dead")
			},
		})
		j.start()
		j.out.await(t, 1, "[rank0] sits")
		j.out.await(t, 1, "[rank1] sits")
		h.awaitCall("training")
		j.cancel(errStop)
		if err := j.wait(); !errors.Is(err, errStop) || strings.Contains(err.Error(), "rank 1 is dead") {
			t.Errorf("error %v", err)
		}
		wantText(t, j.log, "level=WARN", "did not shut down in order", "rank 1 is dead")
		h.wantCalls("init", "start", "training", "shutdown")
	})
	t.Run("all have ended well", func(t *testing.T) {
		t.Parallel()
		j := newJob(t, 2, helloOnly...)
		h := hooked(t, j, map[string]func(context.Context, *backend.Group) error{
			"shutdown": func(context.Context, *backend.Group) error { return errors.New("no peer") },
		})
		j.must()
		wantText(t, j.log, "no peer")
		h.wantCalls("init", "start", "training", "shutdown")
	})
	t.Run("a worker has died", func(t *testing.T) {
		t.Parallel()
		j := newJob(t, 2, shell("exit 3")...)
		j.cfg.MaxRestarts = 1
		h := hooked(t, j, nil)
		_ = j.fails()
		h.wantCalls("init", "start", "init", "start")
	})
}

func Test04DeathDuringStartup(t *testing.T) {
	t.Parallel()
	t.Run("restarts the whole group", func(t *testing.T) {
		t.Parallel()
		j := newJob(t, 2, shell(`echo attempt $CKPTSTORE_ATTEMPT
			[ $CKPTSTORE_ATTEMPT = 2 ] && exit
			[ $RANK = 1 ] && exit 3
			exec sleep 1000`)...)
		j.cfg.MaxRestarts = 1
		j.must()
		wantText(t, j.out, "[rank1] attempt 1\n", "[rank0] attempt 2\n", "[rank1] attempt 2\n")
		wantText(t, j.log, `cause="rank 1 exited with code 3"`)
		if n := len(bodiesOf[events.TrainingStarted](t, runOf(t))); n != 0 {
			t.Errorf("training has started %d times without a hello", n)
		}
	})
	t.Run("within the budget", func(t *testing.T) {
		t.Parallel()
		j := newJob(t, 1, shell("exit 3")...)
		j.cfg.MaxRestarts = 2
		if failed := j.fails(); failed.Attempt != 3 || failed.Restarts != 2 {
			t.Errorf("%+v", failed)
		}
	})
	t.Run("in a hook", func(t *testing.T) {
		t.Parallel()
		j := newJob(t, 1, shell("exit 0")...)
		j.cfg.MaxRestarts = 2
		h := hooked(t, j, map[string]func(context.Context, *backend.Group) error{
			"start": func(_ context.Context, g *backend.Group) error {
				if g.Attempt < 3 {
					return errors.New("no network")
				}
				return nil
			},
		})
		j.must()
		h.wantCalls("init", "start", "init", "start", "init", "start", "shutdown")
		wantText(t, j.log, `cause="backend hooks: OnStart: no network"`)
		if n := len(bodiesOf[events.WorkerExited](t, runOf(t))); n != 1 {
			t.Errorf("%d workers have ended, want 1: a group that the backend refuses has none", n)
		}
	})
	t.Run("while the backend starts the training", func(t *testing.T) {
		t.Parallel()
		j := newJob(t, 2, diesAfterHello...)
		j.cfg.Grace = 10 * patience
		hooked(t, j, map[string]func(context.Context, *backend.Group) error{
			"training": func(ctx context.Context, _ *backend.Group) error {
				<-ctx.Done()
				return ctx.Err()
			},
		})
		if failed := j.fails(); failed.Rank != 1 || !strings.HasPrefix(failed.Cause, "rank 1 exited with code 1") {
			t.Errorf("%+v", failed)
		}
	})
}

var diesAfterHello = workerRole("dies after its hello", func(ctx context.Context, c *client.Client) error {
	if c.Rank == 1 {
		return errors.New("a bug")
	}
	return untilTerm(ctx)
})

func Test05Budget(t *testing.T) {
	t.Parallel()
	for restarts, lives := range map[int]int{0: 1, 2: 3, -1: 5} {
		t.Run(fmt.Sprint("max-restarts ", restarts), func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 1, shell(fmt.Sprintf(`[ $CKPTSTORE_ATTEMPT = %d ] || exit 1`, lives))...)
			j.cfg.MaxRestarts = restarts
			j.cfg.ShortLife = time.Nanosecond
			j.must() // as many failures as there are restarts
			if n := len(bodiesOf[events.GroupStarted](t, runOf(t))); n != lives {
				t.Errorf("%d attempts, want %d", n, lives)
			}
		})
	}
}

var mixes = workerRole("mixes results", func(ctx context.Context, c *client.Client) error {
	if c.Rank == 0 {
		return refused(c.Report(ctx, 1, map[string]any{"loss": 1.0}), 409)
	}
	term := terms()
	if err := meet(ctx, c); err == nil {
		return errors.New("rank 0 came to the collective")
	}
	return term(ctx)
})

func Test10MixedResults(t *testing.T) {
	t.Parallel()
	t.Run("some report and others end", TestUnequalReports)
	t.Run("all end", TestNoReport)
	t.Run("some report and others wait elsewhere", func(t *testing.T) {
		t.Parallel()
		j := newJob(t, 2, mixes...)
		j.cfg.Collective = time.Second
		failed := j.fails()
		if !strings.Contains(failed.Cause, "ranks [1] have not reported") || !strings.Contains(failed.Cause, "while ranks [0] have") {
			t.Errorf("%+v", failed)
		}
	})
}

var reportsHalf = workerRole("reports in part", func(ctx context.Context, c *client.Client) error {
	term := terms()
	if err := c.Report(ctx, 1, map[string]any{"loss": float64(c.Rank + 7)}); err != nil {
		return err
	}
	if c.Rank == 0 {
		emit("reports again")
		return c.Report(ctx, 2, map[string]any{"loss": 3.0})
	}
	return term(ctx)
})

func Test12Reports(t *testing.T) {
	t.Parallel()
	t.Run("differing checkpoints are an error", TestLoadDisagreement)
	t.Run("rank 0's are the trial's, and partial ones are discarded", func(t *testing.T) {
		t.Parallel()
		j := newJob(t, 2, reportsHalf...).start()
		j.out.await(t, 1, "[rank0] reports again")
		j.cancel(errStop)
		if err := j.wait(); !errors.Is(err, errStop) {
			t.Errorf("error %v", err)
		}
		got := one[events.Metrics](t, runOf(t))
		if got.Step != 1 || got.Metrics["loss"] != 7.0 || len(got.Others) != 1 || got.Others[0].Metrics["loss"] != 8.0 {
			t.Errorf("%+v", got)
		}
		wantText(t, j.log, "last reports discarded", "ranks [0] reported while ranks [1] have ended")
		if trial := trialOf(t); trial.Status != projections.Paused || trial.Iterations != 1 {
			t.Errorf("trial %+v", trial)
		}
	})
}

// upper is a backend whose reports travel under other names.
func upper(data map[string]any) (map[string]any, error) {
	out := map[string]any{}
	for k, v := range data {
		out[strings.ToUpper(k)] = v
	}
	return out, nil
}

// DecodeData implements backend.Backend.
func (h *hooks) DecodeData(data map[string]any) (map[string]any, error) {
	out := map[string]any{}
	for k, v := range data {
		if k != strings.ToUpper(k) {
			return nil, fmt.Errorf("metric %q was not encoded", k)
		}
		out[strings.ToLower(k)] = v
	}
	return out, nil
}

var reportsEncoded = role("reports what is encoded", func(ctx context.Context, _ []string) error {
	for _, opts := range [][]client.Option{{client.WithEncoding(upper)}, nil} {
		c, err := client.Connect(ctx, opts...)
		if err != nil {
			return err
		}
		defer c.Close()
		metrics := map[string]any{"loss": 2.5}
		if err := c.Report(ctx, 1, metrics); opts == nil {
			return refused(err, 400)
		} else if err != nil {
			return err
		}
		if !maps.Equal(metrics, map[string]any{"loss": 2.5}) {
			return fmt.Errorf("the caller's metrics are %v now", metrics)
		}
	}
	return nil
})

func Test09EncodedReportsAreDecoded(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, reportsEncoded...)
	hooked(t, j, nil)
	j.must()
	if got := one[events.Metrics](t, runOf(t)); !maps.Equal(got.Metrics, map[string]any{"loss": 2.5}) {
		t.Errorf("%+v", got)
	}
	wantText(t, j.out, `refused backend hooks: decode a report: metric "loss" was not encoded`)
}

// stopsFirst stops the job when it starts to train, and lets the trainer learn of it
// only after all workers have ended.
type stopsFirst struct {
	session.Log
	*job
}

// Append implements session.Log.
func (l stopsFirst) Append(ctx context.Context, facts ...events.Fact) ([]uint64, error) {
	if facts[0].Kind == (events.TrainingStarted{}).Kind() {
		l.cancel(errStop)
		for len(survivors(l.t, l.cfg.Job)) > 0 {
			<-time.After(time.Millisecond)
		}
		<-time.After(shortly) // until their parent has seen it
	}
	return l.Log.Append(ctx, facts...)
}

// A job whose workers end well because it was stopped has not completed, whether the
// trainer learns of their ends or of the stop first.
func TestStoppedJobHasNotCompleted(t *testing.T) {
	t.Parallel()
	for n := range 6 {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			j := newJob(t, 1, sitsConnected...)
			j.store.Log = stopsFirst{home.Log, j}
			j.start()
			if err := j.wait(); !errors.Is(err, errStop) {
				t.Errorf("error %v, want that of the stop", err)
			}
		})
	}
}
