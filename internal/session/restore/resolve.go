package restore

import (
	"context"
	"fmt"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
)

// Ask is the part of a rank's request that concerns all participants of the load.
type Ask struct {
	Rank     int    `json:"rank"`
	Ref      string `json:"ref,omitempty"`
	Strict   bool   `json:"strict,omitempty"`
	Verifies bool   `json:"verifies,omitempty"`
	Refused  string `json:"refused,omitempty"`
}

func askOf(rank int, req client.LoadRequest) Ask {
	return Ask{Rank: rank, Ref: req.Ref, Strict: req.Strict, Verifies: req.Verifies, Refused: req.Refused}
}

// resolution is the checkpoint of a load, open for the ranks of one node.
type resolution struct {
	ckpt     projections.Checkpoint
	reader   data.Reader
	manifest checkpoint.Manifest
	unread   []string // keys that no participant asks for
	verifies bool     // every participant verifies what it copies
	took     time.Duration
}

// resolve decides, once for all ranks, which checkpoint load n reads. asks are those
// of all participants, in the order of their ranks. keys are the FQNs that they ask
// for.
func (c *Config) resolve(ctx context.Context, n int, asks []Ask, keys map[string]bool) (resolution, error) {
	var at resolution
	began := time.Now()
	ref, strict := asks[0].Ref, false
	at.verifies = true // all or none: a rank that did not wait would continue where others fail
	for _, a := range asks {
		if a.Ref != ref {
			return at, fmt.Errorf("load %d: rank %d asks for %q and rank %d for %q", n, asks[0].Rank, ref, a.Rank, a.Ref)
		}
		strict = strict || a.Strict
		at.verifies = at.verifies && a.Verifies
	}
	if ref == "" {
		ref = c.Resume
	}
	if ref == "" {
		return at, fmt.Errorf("load %d: there is nothing to resume from; check the context's resume field, or name a checkpoint", n)
	}
	var err error
	if at.reader, at.ckpt, err = c.reader(ctx, ref); err != nil {
		return at, err
	}
	if at.manifest, err = at.reader.ReadMetadata(ctx); err != nil {
		return at, unreadable(at.ckpt, err)
	}
	if err := at.reader.SetUp(ctx, at.manifest, true); err != nil {
		return at, err
	}
	at.unread = planner.Unread(at.manifest.Layout, keys)
	if strict && len(at.unread) > 0 {
		return at, fmt.Errorf("load %d of %s: %w", n, at.ckpt.ID, &planner.UnreadError{FQNs: at.unread})
	}
	at.took = time.Since(began)
	return at, c.Log.Begun(ctx, &events.RestoreBegun{
		Attempt: c.Attempt, Load: n, Checkpoint: at.ckpt.ID, From: c.from(at.ckpt), WorldSize: c.World,
	})
}

// Report is what a node has read for its participants of a load.
type Report struct {
	Parts  []Part `json:"parts"`            // by rank, ascending
	Slots  int64  `json:"slots,omitempty"`  // bytes that came from shared memory
	Peers  int64  `json:"peers,omitempty"`  // bytes that came from replicas of other nodes' slots
	Passed int64  `json:"passed,omitempty"` // bytes that another node has read from files and passed on
	Files  int64  `json:"files,omitempty"`  // bytes that came from files
	Wanted int64  `json:"wanted,omitempty"`

	// Durations in seconds, as in the event. Those of several nodes are the longest.
	Resolve *float64 `json:"resolve_s,omitempty"`
	Read    *float64 `json:"read_s,omitempty"`
	Check   *float64 `json:"check_s,omitempty"`
}

// longer returns the longer of two durations. Nil is an unknown one.
func longer(a, b *float64) *float64 {
	if a == nil || b != nil && *b > *a {
		return b
	}
	return a
}

// Part is what one rank reads: see [events.LoadPlan].
type Part struct {
	Rank  int   `json:"rank"`
	Reads int   `json:"reads"`
	Bytes int64 `json:"bytes"`
}

// completed records the reads of every rank and the completion of load n.
func (c *Config) completed(ctx context.Context, n int, checkpoint string, unread []string, got Report) error {
	plans := make([]*events.LoadPlan, len(got.Parts))
	for i, p := range got.Parts {
		plans[i] = &events.LoadPlan{Attempt: c.Attempt, Load: n, Checkpoint: checkpoint, Rank: p.Rank, Reads: p.Reads, Bytes: p.Bytes}
	}
	return c.Log.Completed(ctx, plans, &events.RestoreCompleted{
		Attempt: c.Attempt, Load: n, Checkpoint: checkpoint, Tier: tierOf(got), Bytes: got.Slots + got.Peers + got.Passed + got.Files, Slots: got.Slots,
		Peers: got.Peers, Passed: got.Passed, Wanted: got.Wanted, Unread: unread,
		Resolve: got.Resolve, Read: got.Read, Check: got.Check,
	})
}

// failed records why load n failed. It takes the group's own context: the one of the
// load may have ended.
func (c *Config) failed(n int, checkpoint string, why error) error {
	return c.Log.Failed(c.Work, &events.RestoreFailed{Attempt: c.Attempt, Load: n, Checkpoint: checkpoint, Error: why.Error()})
}
