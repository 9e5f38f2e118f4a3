package bench

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/tensor"
)

// nodesCommand is the process of all nodes of `bench nodes`.
const nodesCommand = "nodes-agents"

// nodesEvent is the command that forwards an event to a node.
const nodesEvent = "event"

func (a *bench) nodesAgentsVerb() *cobra.Command {
	return &cobra.Command{
		Use: nodesCommand, Hidden: true, Args: console.Args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) error { return a.fakeNodes(c.Context(), c.InOrStdin()) },
	}
}

// fakeNode is one node: its connections are real, and its ranks are not.
type fakeNode struct {
	order nodesOrder
	ranks []int
	link  *nodes.Link
	log   *jetlog.Log
	actor events.Actor
	plans []*events.LocalPlan // with fingerprints only
	bytes int64               // of each rank
	last  string              // digest of the fingerprints that the log lists
	heard heard
}

// fakeNodes obeys the coordinating process.
func (a *bench) fakeNodes(ctx context.Context, in io.Reader) error {
	lines := bufio.NewScanner(in)
	var order nodesOrder
	if !lines.Scan() {
		return errors.New("no order")
	}
	if err := json.Unmarshal(lines.Bytes(), &order); err != nil {
		return err
	}
	all := make([]*fakeNode, order.Nodes)
	for i := range all {
		all[i] = &fakeNode{order: order, actor: events.Node(i + 1), heard: heard{of: map[string]chan struct{}{}}}
	}
	say := func(format string, args ...any) { fmt.Fprintf(a.Out, format+"\n", args...) }
	say("ready")
	for lines.Scan() {
		verb, n, _ := strings.Cut(lines.Text(), " ")
		switch verb {
		case "join":
			if err := each(ctx, all, (*fakeNode).join); err != nil {
				return err
			}
			if err := each(ctx, all, (*fakeNode).start); err != nil {
				return err
			}
			say("started")
		case "save":
			id := "step-" + n + ".a1"
			err := each(ctx, all, func(f *fakeNode, ctx context.Context) error { return f.save(ctx, "step-"+n) })
			if err != nil {
				return err
			}
			say("committed %s", id)
		default:
			return fmt.Errorf("no order %q", lines.Text())
		}
	}
	return each(ctx, all, (*fakeNode).end)
}

// each does something on all nodes at once.
func each(ctx context.Context, all []*fakeNode, do func(*fakeNode, context.Context) error) error {
	g, ctx := errgroup.WithContext(ctx)
	for i, f := range all {
		g.Go(func() error {
			if err := do(f, ctx); err != nil {
				return fmt.Errorf("node %d: %w", i+1, err)
			}
			return nil
		})
	}
	return g.Wait()
}

func (f *fakeNode) join(ctx context.Context) (err error) {
	index := 0
	if _, err := fmt.Sscanf(string(f.actor), "n%d", &index); err != nil {
		return err
	}
	f.link, err = nodes.Join(ctx, nodes.JoinConfig{
		Address: f.order.Address, Token: f.order.Token,
		Self: nodes.Node{Index: index, Key: fmt.Sprint(index), Procs: f.order.Ranks / f.order.Nodes, Version: "bench"},
	})
	return err
}

// start waits for the placement, connects to the log through the endpoint, and plans what
// the ranks save.
func (f *fakeNode) start(ctx context.Context) error {
	var place session.Nodes
	select {
	case c := <-f.link.Commands():
		if err := json.Unmarshal(c.Body, &place); err != nil {
			return err
		}
	case <-f.link.Done():
		return f.link.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
	f.ranks = place[f.link.Index()]
	var err error
	f.log, err = jetlog.Connect(ctx, jetlog.Options{Timeout: nodesTimeout, Dial: func(ctx context.Context) (net.Conn, error) {
		return f.link.Dial(ctx, "/v1/store/"+string(store.LogDoor))
	}})
	if err != nil {
		return err
	}
	go f.hear()
	prints := planner.Fingerprints(f.order.Ranks, nil)
	for _, rank := range f.ranks {
		local := f.local(rank)
		f.bytes = local.Items[0].Bytes
		f.plans = append(f.plans, &events.LocalPlan{
			Attempt: 1, Rank: rank, Fingerprint: prints(local).String(), Plan: events.InlineBlob(checkpoint.EncodeLocal(local)),
		})
	}
	return nil
}

// nodesColumns is the number of columns of the tensor. Each rank saves one row.
const nodesColumns = 1 << 20

func (f *fakeNode) local(rank int) checkpoint.Local {
	shape := tensor.Shape{int64(f.order.Ranks), nodesColumns}
	s := tensor.Shard{FQN: "model.weight", DType: tensor.BFloat16, Global: shape, Box: part(shape.Full(), 0, rank, f.order.Ranks)}
	return checkpoint.Local{Rank: rank, Items: []checkpoint.Item{{Shard: s, Bytes: s.Bytes()}}}
}

// save is one save of the node's ranks, which have sealed their bytes.
func (f *fakeNode) save(ctx context.Context, name string) error {
	id := name + ".a1"
	planned, committed := f.heard.wait(events.GlobalPlan{}.Kind(), id), f.heard.wait(events.CheckpointCommitted{}.Kind(), id)
	step := int64(0)
	if _, err := fmt.Sscanf(name, "step-%d", &step); err != nil {
		return err
	}
	var seals []*events.WriteSealed
	var writes []*events.WriteCompleted
	var short []*events.LocalPlan
	var full []events.Fact
	for _, p := range f.plans {
		own := *p
		own.Checkpoint, own.Name, own.Step = id, name, step
		fact, err := events.NewFact(store.Stamp("bench"), f.scope(events.Rank(p.Rank)), &own)
		if err != nil {
			return err
		}
		full = append(full, fact)
		brief := own
		brief.Plan = events.Blob{}
		short = append(short, &brief)
		seals = append(seals, &events.WriteSealed{Attempt: 1, Checkpoint: id, Rank: p.Rank, Bytes: f.bytes})
		index := checkpoint.Sum(fmt.Append(nil, id, p.Rank)).String()
		writes = append(writes, &events.WriteCompleted{
			Attempt: 1, Checkpoint: id, Rank: p.Rank, IndexDigest: index, BytesWritten: f.bytes,
			Files: []events.File{{Name: checkpoint.DataFile(p.Rank), Size: f.bytes + 128}, {Name: checkpoint.IndexFile(p.Rank), Size: 400}},
		})
	}
	var err error
	if step == 0 {
		_, err = f.log.Append(ctx, full...)
	} else {
		err = f.plan(ctx, short)
	}
	if err != nil {
		return err
	}
	if err := f.append(ctx, events.JoinSeals(seals)); err != nil {
		return err
	}
	select {
	case <-planned:
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := f.append(ctx, events.JoinWrites(writes)...); err != nil {
		return err
	}
	select {
	case <-committed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// hear obeys the coordinating process until the link ends.
func (f *fakeNode) hear() {
	for c := range f.link.Commands() {
		var e session.Forwarded
		if c.Kind != nodesEvent || json.Unmarshal(c.Body, &e) != nil {
			continue
		}
		event, err := events.Decode(e.Event)
		if err != nil {
			continue
		}
		body, err := event.Body()
		if err != nil {
			continue
		}
		switch b := body.(type) {
		case *events.GlobalPlan:
			close(f.heard.wait(b.Kind(), b.Checkpoint))
		case *events.CheckpointCommitted:
			close(f.heard.wait(b.Kind(), b.Checkpoint))
		}
	}
}

// plan appends plans, as a session does.
func (f *fakeNode) plan(ctx context.Context, plans []*events.LocalPlan) error {
	b, err := events.JoinPlans(plans)
	if err != nil {
		return err
	}
	digest := checkpoint.Sum(b.Fingerprints).String()
	if digest == f.last {
		b.Fingerprints, b.Digest = nil, digest
	}
	f.last = digest
	return f.append(ctx, b)
}

func (f *fakeNode) scope(actor events.Actor) events.Scope {
	return events.Scope{Run: benchRun, Trial: projections.DefaultTrial, Actor: actor}
}

func (f *fakeNode) append(ctx context.Context, bodies ...events.Body) error {
	var facts []events.Fact
	for _, b := range bodies {
		fact, err := events.NewFact(store.Stamp("bench"), f.scope(f.actor), b)
		if err != nil {
			return err
		}
		facts = append(facts, fact)
	}
	_, err := f.log.Append(ctx, facts...)
	return err
}

func (f *fakeNode) end(ctx context.Context) error {
	if f.log != nil {
		f.log.Close()
	}
	if f.link == nil {
		return nil
	}
	return f.link.Leave(ctx, "done")
}

// heard is what a node has heard of.
type heard struct {
	mu sync.Mutex
	of map[string]chan struct{} // by kind and ID
}

// wait returns a channel that is closed once the node has heard of an event of a checkpoint.
func (h *heard) wait(kind events.Kind, id string) chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	what := string(kind) + " " + id
	if h.of[what] == nil {
		h.of[what] = make(chan struct{})
	}
	return h.of[what]
}
