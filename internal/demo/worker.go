package demo

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/collective"
	"github.com/ckptstore/ckptstore/internal/demo/digits"
)

// Metrics that the demo's workers report in addition to the loss.
const (
	metricState    = "state_sha256"    // of all full tensors, before a save
	metricRestored = "restored_sha256" // of all full tensors, after a load
	metricFrom     = "restored_from"   // the checkpoint's ID
	metricAccuracy = "accuracy"        // on the test split, at the last step
)

// workerOptions define how long the demo's model trains.
type workerOptions struct {
	steps     int64
	saveEvery int64
	seed      uint64
	killRank  int           // ends itself with SIGKILL in the first attempt, …
	killStep  int64         // … in this step's save, after its begin and before its seal
	timeout   time.Duration // of one collective
	delay     time.Duration // longer work of each step
}

func (o workerOptions) args() []string {
	return []string{
		"demo-worker", fmt.Sprint("--steps=", o.steps), fmt.Sprint("--save-every=", o.saveEvery), fmt.Sprint("--seed=", o.seed),
		fmt.Sprint("--kill-rank=", o.killRank), fmt.Sprint("--kill-step=", o.killStep),
	}
}

// WorkerCommand returns one rank of the demo: an example of a worker in Go. It calls
// leaveSignals first: the program must not answer them.
func WorkerCommand(leaveSignals func()) *cobra.Command {
	var o workerOptions
	c := &cobra.Command{
		Use: "demo-worker", Hidden: true, Args: cobra.NoArgs,
		Short: "Train the demo's model; started by `trainer run` or `trainer demo`",
		RunE: func(c *cobra.Command, _ []string) error {
			leaveSignals() // the client holds back the signals that the trainer answers
			return trainDigits(c.Context(), o)
		},
	}
	c.Flags().Int64Var(&o.steps, "steps", 240, "steps to train in all")
	c.Flags().Int64Var(&o.saveEvery, "save-every", 40, "steps between checkpoints")
	c.Flags().Uint64Var(&o.seed, "seed", 1, "of the weights and of the ranks' random states")
	c.Flags().IntVar(&o.killRank, "kill-rank", -1, "rank that kills itself in its first attempt")
	c.Flags().Int64Var(&o.killStep, "kill-step", 0, "step in whose save that rank kills itself")
	c.Flags().DurationVar(&o.delay, "delay", 0, "longer work of this node's ranks in each step")
	c.Flags().DurationVar(&o.timeout, "collective-timeout", collective.DefaultTimeout, "longest duration of one collective")
	return c
}

// rank is one rank of the demo's training.
type rank struct {
	workerOptions
	c      *client.Client
	model  *digits.Model
	group  digits.Exchange
	report map[string]any // what the next report contains in addition to the loss
	waited time.Duration  // in collectives, for other ranks
	stop   string         // the trainer's request at the last report; the same on all ranks
}

func trainDigits(ctx context.Context, o workerOptions) error {
	c, err := client.Connect(ctx)
	if err != nil {
		return err
	}
	defer c.Close()
	g := collective.New(c.Collectives(), collective.Options{Timeout: o.timeout})
	r := &rank{
		workerOptions: o, c: c, model: digits.New(c.Rank, c.WorldSize, o.seed),
		report: map[string]any{},
	}
	r.group = digits.ExchangeFunc(func(ctx context.Context, own []byte) ([][]byte, error) {
		began := time.Now()
		defer func() { r.waited += time.Since(began) }()
		return g.AllGatherBytes(ctx, own)
	})
	rate, err := hyper(c.Config, "learning_rate", digits.LearningRate)
	if err != nil {
		return err
	}
	noise, err := hyper(c.Config, "noise", digits.Noise)
	if err != nil {
		return err
	}
	r.model.Set(rate, noise)
	if c.Resume != "" {
		if err := r.restore(ctx); err != nil {
			return err
		}
	}
	var last *client.Save
	for r.stop == "" && r.model.Iteration() < o.steps {
		if last, err = r.step(ctx, last); err != nil {
			return err
		}
	}
	if last != nil {
		return last.Wait(ctx, client.Committed)
	}
	return nil
}

// hyper returns a number of the trial's configuration.
func hyper(config map[string]any, name string, otherwise float32) (float32, error) {
	switch v := config[name].(type) {
	case nil:
		return otherwise, nil
	case float64:
		return float32(v), nil
	default:
		return 0, fmt.Errorf("configuration %s is %v: want a number", name, v)
	}
}

// step trains, reports and, when due, saves. It returns the newest save.
func (r *rank) step(ctx context.Context, last *client.Save) (*client.Save, error) {
	began := time.Now()
	r.waited = 0
	if r.delay > 0 {
		select {
		case <-time.After(r.delay):
		case <-ctx.Done():
			return last, context.Cause(ctx)
		}
	}
	loss, err := r.model.Step(ctx, r.group)
	if err != nil {
		return last, err
	}
	r.report[client.BusyThisIter] = (time.Since(began) - r.waited).Seconds()
	step := r.model.Iteration()
	r.report["loss"] = loss
	save := step%r.saveEvery == 0 || step == r.steps
	if save {
		if r.report[metricState], err = r.model.Digest(ctx, r.group); err != nil {
			return last, err
		}
	}
	if step == r.steps {
		if r.report[metricAccuracy], err = r.model.Accuracy(ctx, r.group); err != nil {
			return last, err
		}
	}
	if err := r.c.Report(ctx, step, r.report); err != nil {
		return last, err
	}
	r.report = map[string]any{}
	if r.stop = r.c.StopRequested(); !save && r.stop != client.Preempt {
		return last, nil
	}
	s, err := r.save(ctx, step)
	if errors.Is(err, client.ErrSkipped) {
		return last, nil // as `trainer run --when-busy=skip` requests
	}
	return s, err
}

func (r *rank) state() client.State {
	var s client.State
	for _, t := range r.model.Tensors() {
		s.Tensors = append(s.Tensors, client.Tensor{Shard: t.Shard, Data: t.Data})
	}
	s.Values = []client.Value{{FQN: "rng", PerRank: true, Optional: true, Data: r.model.RNG()}}
	return s
}

func (r *rank) save(ctx context.Context, step int64) (*client.Save, error) {
	if r.c.Rank != r.killRank || step != r.killStep || r.c.Attempt != 1 {
		return r.c.Save(ctx, step, r.state(), client.SaveOptions{})
	}
	s, err := r.c.Begin(ctx, step, r.state(), client.SaveOptions{})
	if err != nil {
		return nil, err
	}
	if err := s.Wait(ctx, client.Begun); err != nil {
		return nil, err
	}
	// This rank will never seal: no other end is as sudden.
	return nil, errors.Join(syscall.Kill(syscall.Getpid(), syscall.SIGKILL), errors.New("alive after SIGKILL"))
}

// restore loads the checkpoint to resume from, whatever its layout. Ranks that did not
// exist when it was saved start with a new random state.
func (r *rank) restore(ctx context.Context) error {
	s := r.state()
	saved, err := collective.BroadcastObject(ctx, collective.New(r.c.Collectives(), collective.Options{}), 0, r.c.Resume)
	if err != nil {
		return err
	}
	got, err := r.c.Load(ctx, &s, client.LoadOptions{Ref: saved, Strict: true})
	if err != nil {
		return err
	}
	if err := r.model.SetRNG(s.Values[0].Data); err != nil {
		return err
	}
	r.report[metricFrom] = got.Checkpoint
	r.report[metricRestored], err = r.model.Digest(ctx, r.group)
	return err
}
