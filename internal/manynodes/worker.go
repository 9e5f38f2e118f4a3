package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/client"
)

// finishFile, in the directory of the records, has rank 0 end the training.
const finishFile = "finish"

// worker is one rank of a run. It trains a [model], and all ranks compute each loss
// together.
type worker struct {
	c      *client.Client
	record *recorder
	dir    string
	every  int64
	pace   time.Duration
	model
	heedless bool // it does not end when it is asked to
	ringless bool // the ranks exchange no messages
	broken   string
	work     int    // hashes of a step
	slowOn   string // host on which a step takes four times as many
	step     int64
	last     int64
	waiting  *client.Save
	kept     int64 // step of the save under way
}

func runWorker(ctx context.Context, args []string) (err error) {
	start := monotonic()
	w := &worker{}
	flags := flag.NewFlagSet("worker", flag.ContinueOnError)
	flags.StringVar(&w.dir, "lives", "", "directory of the ranks' records")
	flags.Int64Var(&w.every, "every", 10, "steps between saves; 0 for none")
	flags.Int64Var(&w.last, "steps", 1<<40, "steps of the training")
	stubborn := flags.Bool("stubborn", false, "after an error do not end, and be killed")
	elastic := flags.Bool("elastic", false, "train a model that any number of ranks can train")
	flags.BoolVar(&w.heedless, "heedless", false, "do not end when asked to save and end")
	flags.BoolVar(&w.ringless, "ringless", false, "exchange no messages, only collectives")
	flags.StringVar(&w.broken, "broken-on", "", "host on which a rank fails after its first step")
	flags.IntVar(&w.work, "work", 0, "hashes that each rank computes in a step; their time is reported")
	flags.StringVar(&w.slowOn, "slow-on", "", "host on which a rank computes four times as many")
	flags.DurationVar(&w.pace, "pace", 5*time.Millisecond, "shortest time of a step")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if w.record, err = newRecorder(w.dir, identify(start)); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.record.close()) }()
	if w.c, err = client.Connect(ctx); err != nil {
		return err
	}
	defer w.c.Close()
	w.model = newBlock(w.c.Rank, w.c.WorldSize)
	if *elastic {
		w.model = newReplica(w.c.Rank, w.c.WorldSize)
	}
	if err := w.load(ctx); err != nil {
		return err
	}
	if err := w.train(ctx); err != nil {
		if *stubborn {
			select {}
		}
		return err
	}
	return w.record.record(line{What: whatEnd, Step: w.step})
}

func identify(start int64) identity {
	number := func(name string) int {
		n, err := strconv.Atoi(os.Getenv(name))
		if err != nil {
			return -1
		}
		return n
	}
	host, _ := os.Hostname()
	return identity{
		Host: host, PID: os.Getpid(), Start: start, Job: os.Getenv(client.EnvJob), Attempt: number(client.EnvAttempt),
		Rank: number("RANK"), World: number("WORLD_SIZE"), Node: number("GROUP_RANK"), Restart: number("TORCHELASTIC_RESTART_COUNT"),
		MasterAddr: os.Getenv("MASTER_ADDR"), MasterPort: number("MASTER_PORT"),
	}
}

// load continues where the trainer's checkpoint ends.
func (w *worker) load(ctx context.Context) error {
	if w.c.Resume == "" {
		return nil
	}
	state := w.state(0)
	state.Tensors[0] = w.loaded()
	for i := range state.Tensors {
		clear(state.Tensors[i].Data)
	}
	loaded, err := w.c.Load(ctx, &state, client.LoadOptions{Strict: true})
	if err != nil {
		return err
	}
	if err := binary.Read(bytes.NewReader(state.Tensors[0].Data), binary.LittleEndian, w.values()); err != nil {
		return err
	}
	for i, own := range w.own() {
		if got := state.Values[1+i].Data; string(got) != string(own.Data) {
			return fmt.Errorf("%s has the value %q of this rank, want %q", loaded.Checkpoint, got, own.Data)
		}
	}
	w.step = loaded.Step
	return w.record.record(line{What: whatLoaded, Step: w.step, Saved: loaded.Checkpoint})
}

func (w *worker) state(step int64) client.State {
	return client.State{
		Tensors: []client.Tensor{w.saved()},
		Values:  append([]client.Value{{FQN: "step", Data: []byte(fmt.Sprint(step))}}, w.own()...),
	}
}

func (w *worker) train(ctx context.Context) error {
	pace := time.NewTicker(w.pace)
	defer pace.Stop()
	for finish := false; !finish && w.step < w.last; {
		step := w.step + 1
		busy := w.compute()
		parts, over, err := w.exchange(ctx, step)
		if err != nil {
			return err
		}
		loss := w.update(parts)
		w.step, finish = step, over
		if err := w.record.record(line{What: whatStep, Step: step, Loss: bits(loss)}); err != nil {
			return err
		}
		if host, _ := os.Hostname(); host == w.broken {
			return fmt.Errorf("step %d: %s is broken", step, host)
		}
		metrics := map[string]any{"loss": loss}
		if w.work > 0 {
			metrics["busy_this_iter_s"] = busy.Seconds()
		}
		if err := w.c.Report(ctx, step, metrics); err != nil {
			return err
		}
		stop := w.c.StopRequested()
		if stop == client.Stop {
			break
		}
		finish = finish || stop == client.Preempt && !w.heedless
		if finish || step == w.last || w.every > 0 && step%w.every == 0 {
			if err := w.save(ctx); err != nil {
				return err
			}
		}
		<-pace.C
	}
	return w.committed(ctx)
}

// compute does the work of a step, and returns the CPU time that it took: other processes of the
// machine do not change it.
func (w *worker) compute() time.Duration {
	if w.work == 0 {
		return 0
	}
	n := w.work
	if host, _ := os.Hostname(); host == w.slowOn {
		n *= 4
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	began := threadTime()
	sum := sha256.Sum256(nil)
	for range n {
		sum = sha256.Sum256(sum[:])
	}
	return threadTime() - began
}

// threadTime is the CPU time of this thread.
func threadTime() time.Duration {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &now); err != nil {
		panic(err) // every kernel has this clock
	}
	return time.Duration(now.Nano())
}

// bits returns a loss in a form that is equal only for equal bits.
func bits(loss float64) string { return strconv.FormatUint(math.Float64bits(loss), 16) }

// exchange gathers the parts of all ranks, once by a collective and once around the ring
// by messages, and whether rank 0 ends the training.
func (w *worker) exchange(ctx context.Context, step int64) (parts []float64, over bool, err error) {
	own := binary.LittleEndian.AppendUint64(nil, math.Float64bits(w.partial(step)))
	if w.c.Rank == 0 {
		if _, err := os.Stat(filepath.Join(w.dir, finishFile)); err == nil {
			over = true
		}
	}
	flag := byte(0)
	if over {
		flag = 1
	}
	all, err := w.c.Collectives().AllGather(ctx, append(own, flag))
	if err != nil {
		return nil, false, err
	}
	for _, part := range all {
		parts = append(parts, math.Float64frombits(binary.LittleEndian.Uint64(part)))
	}
	over = all[0][8] == 1
	if w.ringless {
		return parts, over, nil
	}
	ring := w.c.Messenger()
	if err := ring.Send(ctx, (w.c.Rank+1)%w.c.WorldSize, own); err != nil {
		return nil, false, err
	}
	got, err := ring.Recv(ctx)
	if err != nil {
		return nil, false, err
	}
	left := (w.c.Rank + w.c.WorldSize - 1) % w.c.WorldSize
	if got.From != left || !bytes.Equal(got.Data, all[left][:8]) {
		return nil, false, fmt.Errorf("step %d: a message of rank %d with %x, want %x of rank %d", step, got.From, got.Data, all[left][:8], left)
	}
	return parts, over, nil
}

// save begins a save when the previous one is committed.
func (w *worker) save(ctx context.Context) (err error) {
	if err := w.committed(ctx); err != nil {
		return err
	}
	w.kept = w.step
	w.waiting, err = w.c.Save(ctx, w.step, w.state(w.step), client.SaveOptions{})
	return w.aborted(err)
}

// aborted records a save that was aborted. That is no failure of the training.
func (w *worker) aborted(err error) error {
	gone := new(client.AbortedError)
	if !errors.As(err, &gone) {
		return err
	}
	w.waiting = nil
	return w.record.record(line{What: whatAborted, Step: w.kept, Saved: gone.Checkpoint, Why: gone.Reason})
}

// committed waits for the save under way.
func (w *worker) committed(ctx context.Context) error {
	if w.waiting == nil {
		return nil
	}
	save := w.waiting
	if err := save.Wait(ctx, client.Committed); err != nil {
		return w.aborted(err)
	}
	w.waiting = nil
	return w.record.record(line{What: whatSaved, Step: w.kept, Saved: save.Checkpoint})
}
