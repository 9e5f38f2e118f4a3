package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/storm/check"
	"github.com/ckptstore/ckptstore/internal/storm/content"
	"github.com/ckptstore/ckptstore/tensor"
)

// waitLimit bounds every wait of a worker for its trainer. A paused owner and a slow
// machine together do not take longer.
const waitLimit = 5 * time.Minute

// worker is one rank of a run. It trains nothing, and saves the state that package
// content defines.
type worker struct {
	c       *client.Client
	journal *journal
	every   int64
	step    int64
	last    int64 // 0: continues until asked to stop
	waiting *client.Save
	saved   int64 // the step of the save in waiting
}

func runWorker(ctx context.Context, args []string) error {
	var (
		w     worker
		acks  string
		more  int64
		joins joining
		flags = flag.NewFlagSet("worker", flag.ContinueOnError)
	)
	flags.StringVar(&acks, "acks", "", "directory of the files of acknowledgements")
	flags.Int64Var(&w.every, "every", 4, "steps between saves")
	flags.Int64Var(&more, "more", 0, "steps after which the worker ends; 0 for never")
	joins.flags(flags)
	if err := flags.Parse(args); err != nil {
		return err
	}
	if joins.agent != "" {
		if err := joins.join(ctx); err != nil {
			return err
		}
	}
	var err error
	if w.c, err = client.Connect(ctx); err != nil {
		return err
	}
	defer w.c.Close()
	if w.journal, err = openJournal(acks, w.c); err != nil {
		return err
	}
	if err := w.resume(ctx); err != nil {
		return err
	}
	if more > 0 {
		w.last = w.step + more
	}
	return w.train(ctx)
}

// resume loads the checkpoint that the trainer names and compares every bit of it.
func (w *worker) resume(ctx context.Context) error {
	if w.c.Resume == "" {
		return w.journal.record(check.Line{Kind: check.Fresh})
	}
	got := w.state(0)
	for i := range got.Tensors {
		clear(got.Tensors[i].Data)
	}
	ctx, cancel := context.WithTimeout(ctx, waitLimit)
	defer cancel()
	loaded, err := w.c.Load(ctx, &got, client.LoadOptions{Ref: w.c.Resume, Strict: true})
	if err != nil {
		return err
	}
	w.step = loaded.Step
	line := check.Line{Kind: check.Resume, Checkpoint: loaded.Checkpoint, Step: w.step}
	want := w.state(w.step)
	for i, t := range want.Tensors {
		if !bytes.Equal(t.Data, got.Tensors[i].Data) {
			line.Wrong = append(line.Wrong, t.FQN)
		}
	}
	for i, v := range want.Values {
		if !bytes.Equal(v.Data, got.Values[i].Data) {
			line.Wrong = append(line.Wrong, v.FQN)
		}
	}
	if err := w.journal.record(line); err != nil {
		return err
	}
	if len(line.Wrong) > 0 {
		return fmt.Errorf("%s was resumed with wrong bytes of %s", loaded.Checkpoint, strings.Join(line.Wrong, ", "))
	}
	return nil
}

// train runs until its last step, or until the trainer asks it to stop.
func (w *worker) train(ctx context.Context) error {
	for stop := ""; stop == "" && (w.last == 0 || w.step < w.last); {
		w.step++
		if err := w.c.Report(ctx, w.step, map[string]any{"loss": 1 / float64(w.step)}); err != nil {
			return err
		}
		if stop = w.c.StopRequested(); stop == client.Stop {
			break
		}
		if stop == client.Preempt || w.step%w.every == 0 || w.step == w.last {
			if err := w.save(ctx); err != nil {
				return err
			}
		}
		pause(ctx, 5*time.Millisecond) // a step's computation
	}
	return w.committed(ctx)
}

// save begins a save when the previous one is committed.
func (w *worker) save(ctx context.Context) (err error) {
	if err := w.committed(ctx); err != nil {
		return err
	}
	if err := w.journal.record(check.Line{Kind: check.Saving, Step: w.step}); err != nil {
		return err
	}
	w.saved = w.step
	w.waiting, err = w.c.Save(ctx, w.step, w.state(w.step), client.SaveOptions{})
	if gone := new(client.AbortedError); errors.As(err, &gone) {
		return w.journal.record(check.Line{Kind: check.Aborted, Checkpoint: gone.Checkpoint, Step: w.saved, Reason: gone.Reason})
	}
	return err
}

// committed waits for the save under way, and records its outcome.
func (w *worker) committed(ctx context.Context) error {
	if w.waiting == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, waitLimit)
	defer cancel()
	save := w.waiting
	w.waiting = nil
	line := check.Line{Kind: check.Ack, Checkpoint: save.Checkpoint, Step: w.saved}
	err := save.Wait(ctx, client.Committed)
	if gone := new(client.AbortedError); errors.As(err, &gone) {
		line.Kind, line.Reason = check.Aborted, gone.Reason
		err = nil
	}
	if err != nil {
		return err
	}
	return w.journal.record(line)
}

func (w *worker) state(step int64) (s client.State) {
	of := content.Of(w.c.Run, w.c.Rank, w.c.WorldSize, step)
	for _, t := range of.Tensors {
		dtype, err := tensor.ParseDType(t.DType)
		if err != nil {
			panic(err) // impossible: package content uses only known names
		}
		s.Tensors = append(s.Tensors, client.Tensor{
			Shard: tensor.Shard{FQN: t.FQN, DType: dtype, Global: t.Global, Box: tensor.Box{Offsets: t.Offsets, Sizes: t.Sizes}},
			Data:  t.Data,
		})
	}
	for _, v := range of.Values {
		s.Values = append(s.Values, client.Value{FQN: v.FQN, PerRank: v.PerRank, Data: v.Data})
	}
	return s
}

// journal is one rank's file of acknowledgements. It outlives the rank's processes.
type journal struct {
	file *os.File
	who  check.Line
}

func openJournal(dir string, c *client.Client) (*journal, error) {
	path := filepath.Join(dir, check.JournalName(c.Run, c.Rank))
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	return &journal{file, check.Line{Run: c.Run, Rank: c.Rank, World: c.WorldSize, Attempt: c.Attempt}}, nil
}

// record returns when the line is durable. It starts with a line feed, because the
// previous process may have been killed within a line.
func (j *journal) record(line check.Line) error {
	line.Run, line.Rank, line.World, line.Attempt = j.who.Run, j.who.Rank, j.who.World, j.who.Attempt
	text, err := json.Marshal(line)
	if err != nil {
		return err
	}
	if _, err := j.file.Write(framed(0x0a, text)); err != nil {
		return err
	}
	return j.file.Sync()
}

// framed returns text between two ends, in one piece for one write.
func framed(end byte, text []byte) []byte {
	return append(append([]byte{end}, text...), end)
}
