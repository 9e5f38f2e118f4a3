package launch_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/tensor"
)

// asCommand makes the test binary a worker: "as NAME ARG...".
const asCommand = "as"

// roles are the programs that the test binary can be, by name. Each test declares
// its own.
var roles = map[string]func(ctx context.Context, args []string) error{}

// role declares a program and returns the command that starts it.
func role(name string, play func(ctx context.Context, args []string) error) []string {
	roles[name] = play
	return []string{"/proc/self/exe", asCommand, name}
}

// workerRole declares a role that is connected to its trainer.
func workerRole(name string, play func(ctx context.Context, c *client.Client) error) []string {
	return signalRole(name, func(ctx context.Context, c *client.Client, _ string) error { return play(ctx, c) })
}

// signalRole declares a role that is connected to its trainer, and whose argument, if it gets one,
// is a file by which it signals to the test. What it prints may come later than its requests, and
// than its end.
func signalRole(name string, play func(ctx context.Context, c *client.Client, file string) error) []string {
	return role(name, func(ctx context.Context, args []string) error {
		c, err := client.Connect(ctx)
		if err != nil {
			return err
		}
		defer c.Close()
		return play(ctx, c, strings.Join(args, ""))
	})
}

func act(name string, args []string) error {
	play, ok := roles[name]
	if !ok {
		return fmt.Errorf("no role %q", name)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 2*patience)
	defer cancel()
	return play(ctx, args)
}

// emit prints a line for the test.
func emit(format string, args ...any) { fmt.Printf(format+"\n", args...) }

// untilTerm blocks until the trainer ends the worker.
func untilTerm(ctx context.Context) error { return terms()(ctx) }

// terms catches SIGTERM from now on; calling the result waits for it.
func terms() func(context.Context) error {
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	return func(ctx context.Context) error {
		select {
		case <-term:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// meet is a barrier.
func meet(ctx context.Context, c *client.Client) error {
	_, err := c.Collectives().AllGather(ctx, nil)
	return err
}

// rows is the global number of rows of the sharded tensor; 1, 2 and 3 ranks
// divide it.
const rows, columns = 6, 5

// state is the state of one of world ranks at a step: a sharded tensor, a
// replicated tensor, a value shared by all and a value of its own.
func state(step int64, rank, world int) client.State {
	share := int64(rows / world)
	box := tensor.Box{Offsets: []int64{int64(rank) * share, 0}, Sizes: []int64{share, columns}}
	weight := client.Tensor{Shard: tensor.Shard{FQN: "layer.weight", DType: tensor.Int32, Global: tensor.Shape{rows, columns}, Box: box}}
	for i := range share * columns {
		weight.Data = append(weight.Data, byte(box.Offsets[0]*columns+i), byte(step), 0, 0)
	}
	bias := client.Tensor{Shard: tensor.Shard{
		FQN: "bias", DType: tensor.Uint8, Global: tensor.Shape{7}, Box: tensor.Box{Offsets: []int64{0}, Sizes: []int64{7}},
	}, Data: slices.Repeat([]byte{byte(step)}, 7)}
	return client.State{
		Tensors: []client.Tensor{weight, bias},
		Values: []client.Value{
			{FQN: "config", Data: fmt.Appendf(nil, "step %d", step)},
			{FQN: "rng", PerRank: true, Data: fmt.Appendf(nil, "rank %d at %d", rank, step)},
		},
	}
}

// overwrite makes state differ from every checkpoint.
func overwrite(s client.State) {
	for _, t := range s.Tensors {
		for i := range t.Data {
			t.Data[i] = 0xEE
		}
	}
	for _, v := range s.Values {
		for i := range v.Data {
			v.Data[i] = 0xEE
		}
	}
}

// same compares loaded state with saved state.
func same(got, want client.State) error {
	var errs []error
	for i, t := range want.Tensors {
		if !slices.Equal(got.Tensors[i].Data, t.Data) {
			errs = append(errs, fmt.Errorf("tensor %q is %v, want %v", t.FQN, got.Tensors[i].Data, t.Data))
		}
	}
	for i, v := range want.Values {
		if !slices.Equal(got.Values[i].Data, v.Data) {
			errs = append(errs, fmt.Errorf("value %q is %q, want %q", v.FQN, got.Values[i].Data, v.Data))
		}
	}
	return errors.Join(errs...)
}

// load loads a checkpoint and compares it with the state at a step.
func load(ctx context.Context, c *client.Client, ref string, step int64) error {
	got := state(0, c.Rank, c.WorldSize)
	loaded, err := c.Load(ctx, &got, client.LoadOptions{Ref: ref, Strict: true})
	if err != nil {
		return err
	}
	if loaded.Step != step {
		return fmt.Errorf("loaded step %d, want %d", loaded.Step, step)
	}
	return same(got, state(step, c.Rank, c.WorldSize))
}

// save saves the state at a step and waits for its commit.
func save(ctx context.Context, c *client.Client, step int64) error {
	s, err := c.Save(ctx, step, state(step, c.Rank, c.WorldSize), client.SaveOptions{})
	if err != nil {
		return err
	}
	return s.Wait(ctx, client.Committed)
}

// refused checks that an error is the trainer's refusal with a status.
func refused(err error, status int) error {
	var e *client.Error
	if !errors.As(err, &e) || e.Status != status {
		return fmt.Errorf("error %w, want status %d", err, status)
	}
	emit("refused %s", e.Message)
	return nil
}
