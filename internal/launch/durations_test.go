package launch_test

import (
	"context"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/projections"
)

// injected is the delay of a rank's step or write: longer than any other part of a save, even
// on a busy machine.
const injected = 2 * time.Second

// slowRank is a storage that writes one rank late.
type slowRank struct {
	passesOn
	rank int
}

// Writer implements data.Storage.
func (s slowRank) Writer(at data.Location) data.Writer { return slowWrites{at.Writer, s.rank} }

type slowWrites struct {
	data.Writer
	rank int
}

// WriteData implements data.Writer.
func (w slowWrites) WriteData(ctx context.Context, rank int, items []checkpoint.Item, src data.Source) (data.Written, error) {
	if rank == w.rank {
		<-time.After(injected)
	}
	return w.Writer.WriteData(ctx, rank, items, src)
}

// lateStep reports, saves and loads. The step of rank 0 is late, before its report.
var lateStep = workerRole("saves after a late step of rank 0", func(ctx context.Context, c *client.Client) error {
	for step := range int64(2) {
		if c.Rank == 0 && step == 1 {
			<-time.After(injected)
		}
		if err := c.Report(ctx, step, map[string]any{"loss": 1}); err != nil {
			return err
		}
	}
	if c.Rank == 0 {
		<-time.After(injected) // so that it saves late too
	}
	s, err := c.Save(ctx, 1, state(1, c.Rank, c.WorldSize), client.SaveOptions{})
	if err == nil {
		err = s.Wait(ctx, client.Committed)
	}
	if err != nil {
		return err
	}
	return load(ctx, c, s.Checkpoint, 1)
})

// A rank whose write is slow is blamed for its write, and a rank whose step is late for its
// step alone: the durations tell them apart.
func TestDurationsBlameTheRightRank(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, lateStep...)
	j.store.Storage = slowRank{rank: 1}
	j.must()

	reports := bodiesOf[events.Metrics](t, runOf(t))
	if len(reports) != 2 {
		t.Fatalf("%d reports", len(reports))
	}
	if late := reports[1].Slowest; late == nil || late.Rank != 0 || late.Late < injected.Seconds()/2 {
		t.Errorf("the slowest rank of the step is %+v, want rank 0", late)
	}
	save, err := query.Ask(t.Context(), home.Views(), query.Save, query.Params{Ref: runOf(t) + "@step-1.a1"})
	if err != nil {
		t.Fatal(err)
	}
	p := save.Checkpoint.Phases
	if p == nil || p.Slowest != 1 || p.Write == nil || *p.Write < injected.Seconds() {
		t.Fatalf("phases %+v, want rank 1 as the slowest, by its write", p)
	}
	if len(save.Writes) != 2 {
		t.Fatalf("writes %+v", save.Writes)
	}
	for rank, w := range save.Writes {
		known := func(name string, s *float64) {
			if s == nil || *s < 0 {
				t.Errorf("%s of rank %d is %v", name, rank, s)
			}
		}
		known("waited_s", w.Waited)
		known("copied_s", w.Copied)
		known("queued_s", w.Queued)
		known("digest_s", w.Digest)
		known("write_s", w.Write.Write)
		known("sync_s", w.Sync)
		if w.SealedStored.IsZero() || w.CompletedStored.IsZero() {
			t.Errorf("rank %d was stored at %v and %v", rank, w.SealedStored, w.CompletedStored)
		}
	}
	slow, fast := save.Writes[1], save.Writes[0]
	if *slow.Write.Write < injected.Seconds() || *slow.Write.Write < *fast.Write.Write {
		t.Errorf("rank 1 wrote for %v s, rank 0 for %v s: the delay was in rank 1's write", *slow.Write.Write, *fast.Write.Write)
	}
	// Rank 0 saved late, and neither its copy nor its write was slow: that is not in its bars.
	if work := *fast.Copied + *fast.Write.Write; work >= *slow.Copied+*slow.Write.Write {
		t.Errorf("rank 0 has %v s of work in its save", work)
	}
	c := save.Checkpoint
	if c.ManifestTook == nil || c.BegunStored.IsZero() || c.StagedStored.Before(c.BegunStored) || c.EndedStored.Before(c.StagedStored) {
		t.Errorf("the save was begun at %v, staged at %v and ended at %v; its manifest took %v", c.BegunStored, c.StagedStored, c.EndedStored, c.ManifestTook)
	}
	restored := one[events.RestoreCompleted](t, runOf(t))
	if restored.Resolve == nil || restored.Read == nil {
		t.Errorf("the load was not measured: %+v", restored)
	}
	rows, err := query.Ask(t.Context(), home.Views(), query.Restores, query.Params{Run: runOf(t), Trial: projections.DefaultTrial, Attempt: 1})
	if err != nil || len(rows) != 1 || rows[0].ResolveTook == nil || rows[0].ReadTook == nil {
		t.Errorf("loads %+v, %v", rows, err)
	}
}
