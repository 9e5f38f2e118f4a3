package viewdb_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/projections/viewdb"
)

var _ viewdb.Source = (*jetlog.Log)(nil)

// A view follows a real log: appended events become visible, the next decision is
// accepted at the end of a trial's lane, and a rebuilt view is the same.
func TestFollowRealLog(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	server, err := jetlog.StartServer(ctx, jetlog.ServerOptions{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Shutdown()
	log, err := jetlog.Connect(ctx, jetlog.Options{
		Dial: func(context.Context) (net.Conn, error) { return server.Dial() },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	ids := 0
	stamp := func() events.Stamp {
		ids++
		return events.Stamp{ID: fmt.Sprintf("e%d", ids), Source: "test", Time: epoch}
	}
	decision := func(agg events.Aggregate, body events.Body) events.Decision {
		d, err := events.NewDecision(stamp(), agg, body)
		if err != nil {
			t.Fatal(err)
		}
		return d
	}
	if err := log.Create(ctx, decision(events.Aggregate{}, events.StoreCreated{Store: storeID, Format: 1})); err != nil {
		t.Fatal(err)
	}

	db := open(t, nil, t.TempDir())
	defer shut(t, db)
	stop := follow(t, db, log)
	main := events.Aggregate{Run: "demo", Trial: projections.DefaultTrial}
	last, lane := uint64(0), uint64(0)
	for _, body := range []events.Body{
		events.GroupStarted{Attempt: 1, Job: "J1", WorldSize: 1, Ranks: []events.RankPlacement{{}}},
		events.CheckpointBegun{Attempt: 1, Checkpoint: "step-1.a1", Name: "step-1", Step: 1, WorldSize: 1, Participants: []int{0}},
		events.CheckpointCommitted{Attempt: 1, Checkpoint: "step-1.a1", Manifest: "m", Bytes: 1},
	} {
		if last, err = log.Decide(ctx, decision(main, body), lane); err != nil {
			t.Fatal(err)
		}
		fact, err := events.NewFact(stamp(), events.Scope{Run: main.Run, Trial: main.Trial, Actor: events.Rank(0)},
			events.Metrics{Attempt: 1, Iteration: ids, Step: int64(ids), Metrics: map[string]any{"loss": 0.5}})
		if err != nil {
			t.Fatal(err)
		}
		sequences, err := log.Append(ctx, fact)
		if err != nil {
			t.Fatal(err)
		}
		await(t, db, sequences[0])
		err = db.View(func(r projections.Reader) error {
			trial, err := projections.GetTrial(r, main.Run, main.Trial)
			if lane = trial.LaneSeq; lane != last {
				t.Errorf("the lane ends at %d, want %d", lane, last)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if got := latest(t, db); got != "step-1.a1" {
		t.Fatalf("latest is %q", got)
	}
	if err := stop(); !errors.Is(err, context.Canceled) {
		t.Fatalf("Follow returned %v", err)
	}

	sum, cursor, err := db.Digest()
	if err != nil || cursor != 7 {
		t.Fatalf("the cursor is %d, %v", cursor, err)
	}
	m, err := viewdb.Replay(ctx, log, cursor)
	if err != nil || digest(t, m) != sum {
		t.Fatalf("the replay differs (%v)", err)
	}
	again := open(t, vfs.NewMem(), "views")
	defer shut(t, again)
	if err := again.CatchUp(ctx, log); err != nil {
		t.Fatal(err)
	}
	if rebuilt, at, err := again.Digest(); err != nil || at != cursor || rebuilt != sum {
		t.Fatalf("the rebuilt rows at %d differ (%v)", at, err)
	}
}
