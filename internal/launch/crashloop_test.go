package launch_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/tensor"
)

// weight is a state of one number.
func weight(w float32) client.State {
	full := tensor.Box{Offsets: []int64{0}, Sizes: []int64{1}}
	return client.State{Tensors: []client.Tensor{{
		Shard: tensor.Shard{FQN: "w", DType: tensor.Float32, Global: tensor.Shape{1}, Box: full},
		Data:  binary.LittleEndian.AppendUint32(nil, math.Float32bits(w)),
	}}}
}

// learnsNaN saves a good step and a bad one. Resuming from the bad one fails each
// time; a program without checks would train on forever.
var learnsNaN = workerRole("learns NaN", func(ctx context.Context, c *client.Client) error {
	if c.Resume == "" {
		for i, w := range []float32{0.5, float32(math.NaN())} {
			s, err := c.Save(ctx, int64(20*(i+1)), weight(w), client.SaveOptions{})
			if err != nil {
				return err
			}
			if err := s.Wait(ctx, client.Committed); err != nil {
				return err
			}
		}
		return errors.New("the machine fails")
	}
	got := weight(0)
	if _, err := c.Load(ctx, &got, client.LoadOptions{}); err != nil {
		return err
	}
	if w := math.Float32frombits(binary.LittleEndian.Uint32(got.Tensors[0].Data)); w != w {
		return errors.New("the loss is NaN")
	}
	emit("resumed %s", c.Resume)
	return nil
})

// If attempts fail alike after resuming from the same checkpoint, the job reports
// it, with what else to do. The budget ends them, and the waits grow.
func TestCrashLoop(t *testing.T) {
	t.Parallel()
	j := newJob(t, 1, learnsNaN...)
	j.cfg.MaxRestarts, j.cfg.ShortLife = 3, time.Nanosecond // the attempts live long enough
	failed := j.fails()
	says := fmt.Sprintf("failed alike after resuming from step-40.a1: the checkpoint or the code may be bad; `ckptstore ls %[1]s` lists earlier ones, resume from one with --resume %[1]s@NAME", runOf(t))
	wantText(t, j.log, "attempts 2 and 3 "+says, "after=100ms")
	if strings.Contains(j.log.String(), "attempts 1 and 2 ") {
		t.Errorf("the first attempt has committed a checkpoint:\n%s", j.log)
	}
	if text := failed.Error(); failed.Attempt != 4 || !strings.Contains(text, "attempts 2 to 4 "+says) {
		t.Errorf("%s", text)
	}
	again := newJob(t, 1, learnsNaN...)
	again.cfg.Resume = runOf(t) + "@step-20"
	wantText(t, again.must().out, "resumed step-20.a1\n")
}
