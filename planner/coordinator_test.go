package planner_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/tensor"
	"github.com/cockroachdb/datadriven"
)

// The scripts in testdata/coordinator are read like this. Facts and decisions
// are appended to the log and applied:
//
//	new world=N             a coordinator of attempt 2 with an empty log
//	takeover [upto=N]       another coordinator that applies the log, or its beginning
//	plan r=R [step=N] [ranks=(R,…)] [id=ID]
//	FQN SHAPE OFFSETS SIZES | FQN value BYTES [each]
//	                        what rank R saves; an item a line
//	seal r=R, written r=R, failed r=R error=…, exit r=R [code=N] [signal=S]
//	group attempt=N, begun, staged, committed, aborted
//
// all of the checkpoint step-5.a2 unless id= is given, of attempt 2 and
// trial t0 unless attempt= and trial= are. Then:
//
//	drain, abandon          [Coordinator.Drain], [Coordinator.Abandon]
//	tick at=D [execute]     the commands that are due D after the start; execute
//	                        appends and applies their events, and ticks again
type script struct {
	cluster
	coord *planner.Coordinator
}

func TestCoordinator(t *testing.T) {
	datadriven.Walk(t, "testdata/coordinator", func(t *testing.T, path string) {
		s := &script{cluster: cluster{t: t, world: 2}}
		datadriven.RunTest(t, path, func(t *testing.T, d *datadriven.TestData) string {
			s.t = t
			return s.run(t, d)
		})
	})
}

func (s *script) run(t *testing.T, d *datadriven.TestData) string {
	arg := func(key, otherwise string) string {
		d.MaybeScanArgs(t, key, &otherwise)
		return otherwise
	}
	number := func(key string, otherwise int) int {
		d.MaybeScanArgs(t, key, &otherwise)
		return otherwise
	}
	id, attempt, rank := arg("id", "step-5.a2"), number("attempt", 2), number("r", 0)
	var body events.Body
	switch d.Cmd {
	case "new":
		s.world, s.log = number("world", 2), nil
		s.coord = planner.NewCoordinator(config(s.world))
		return ""
	case "takeover":
		s.coord = planner.NewCoordinator(config(s.world))
		s.log = slices.Clip(s.log)[:number("upto", len(s.log))]
		var kinds []string
		for _, r := range s.log {
			if err := s.coord.Apply(r); err != nil {
				return "error: " + err.Error()
			}
			kinds = append(kinds, string(r.Kind))
		}
		return strings.Join(kinds, " ")
	case "drain":
		s.coord.Drain("the group restarts")
		return ""
	case "abandon":
		s.coord.Abandon("the trainer died")
		return ""
	case "tick":
		after, err := time.ParseDuration(arg("at", "0s"))
		if err != nil {
			t.Fatal(err)
		}
		return s.tick(start.Add(after), d.HasArg("execute"))
	case "plan":
		local := checkpoint.Local{Rank: rank}
		for _, line := range strings.Split(d.Input, "\n") {
			local.Items = append(local.Items, parseItem(t, strings.Fields(line))...)
		}
		p := &events.LocalPlan{
			Attempt: attempt, Checkpoint: id, Name: "step-5", Step: int64(number("step", 5)), Rank: rank, Plan: events.InlineBlob(checkpoint.EncodeLocal(local)),
		}
		if d.HasArg("bytes") {
			p.Plan = events.InlineBlob([]byte(arg("bytes", "")))
		}
		if ranks, ok := d.Arg("ranks"); ok {
			for _, v := range ranks.Vals {
				p.Participants = append(p.Participants, parse(t, v))
			}
		} else {
			for r := range s.world {
				p.Participants = append(p.Participants, r)
			}
		}
		body = p
	case "seal":
		body = &events.WriteSealed{Attempt: attempt, Checkpoint: id, Rank: rank}
	case "written":
		body = &events.WriteCompleted{Attempt: attempt, Checkpoint: id, Rank: rank, IndexDigest: arg("index", checkpoint.Sum(fmt.Append(nil, id, rank)).String())}
	case "failed":
		body = &events.WriteFailed{Attempt: attempt, Checkpoint: id, Rank: rank, Error: arg("error", "disk full")}
	case "exit":
		body = &events.WorkerExited{Attempt: attempt, Rank: rank, Code: number("code", 0), Signal: arg("signal", "")}
	case "group":
		body = &events.GroupStarted{Attempt: attempt, WorldSize: s.world}
	case "begun":
		b := &events.CheckpointBegun{Attempt: attempt, Checkpoint: id, Name: "step-5", Step: 5, WorldSize: s.world}
		for r := range s.world {
			b.Participants = append(b.Participants, r)
		}
		body = b
	case "staged":
		body = &events.CheckpointStaged{Attempt: attempt, Checkpoint: id}
	case "committed":
		body = &events.CheckpointCommitted{Attempt: attempt, Checkpoint: id}
	case "aborted":
		body = &events.CheckpointAborted{Attempt: attempt, Checkpoint: id, Reason: "by a successor"}
	default:
		t.Fatalf("%s: unknown command %q", d.Pos, d.Cmd)
	}
	r, err := recorded(body, uint64(len(s.log)+1), events.Scope{Run: arg("run", "run"), Trial: arg("trial", "t0")})
	if err != nil {
		t.Fatal(err)
	}
	s.log = append(s.log, r)
	if err := s.coord.Apply(r); err != nil {
		return "error: " + err.Error()
	}
	return ""
}

func parse(t *testing.T, s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// parseItem reads one line of a plan: numbers of a list are joined by "x".
func parseItem(t *testing.T, words []string) []checkpoint.Item {
	if len(words) == 0 {
		return nil
	}
	if words[1] == "value" {
		return []checkpoint.Item{value(words[0], int64(parse(t, words[2])), len(words) == 4)}
	}
	list := func(s string) (ns []int64) {
		for n := range strings.SplitSeq(s, "x") {
			ns = append(ns, int64(parse(t, n)))
		}
		return ns
	}
	s := shard(words[0], list(words[1]), box(list(words[2]), list(words[3])))
	if len(words) == 5 {
		var err error
		if s.DType, err = tensor.ParseDType(words[4]); err != nil {
			t.Fatal(err)
		}
	}
	return []checkpoint.Item{item(s)}
}

// tick shows what is due, the deadline after it and what is open.
func (s *script) tick(now time.Time, execute bool) string {
	var out strings.Builder
	for range 1000 {
		due, next := s.coord.Tick(now)
		for _, command := range due {
			body := s.show(&out, command)
			if body == nil || !execute {
				continue
			}
			if err := s.coord.Apply(s.append(body)); err != nil {
				return out.String() + "error: " + err.Error()
			}
		}
		if execute && len(due) > 0 {
			continue
		}
		if !next.IsZero() {
			fmt.Fprintf(&out, "next: %v\n", next.Sub(start))
		}
		if n := s.coord.Fenced(); n > 0 {
			fmt.Fprintf(&out, "fenced by attempt %d\n", n)
		}
		fmt.Fprintf(&out, "open: %v\n", s.coord.Open())
		return out.String()
	}
	s.t.Fatal("the coordinator is never content")
	return ""
}

// show writes one command and returns what executing it appends.
func (s *script) show(out *strings.Builder, command planner.Command) events.Body {
	switch c := command.(type) {
	case planner.Decide:
		text, err := json.Marshal(c.Body)
		if err != nil {
			s.t.Fatal(err)
		}
		fmt.Fprintf(out, "decide %s %s\n", c.Body.Kind(), text)
		return c.Body
	case planner.Publish:
		g, ok := c.Body.(*events.GlobalPlan)
		if !ok {
			s.t.Fatal(fmt.Sprintf("publish %+v", c.Body))
		}
		layout, err := checkpoint.DecodeLayout(g.Layout.Inline)
		if err != nil {
			s.t.Fatal(err)
		}
		fmt.Fprintf(out, "publish plan.global of %s, attempt %d\n  %s\n", g.Checkpoint, g.Attempt, strings.ReplaceAll(show(layout), "\n", "\n  "))
		return c.Body
	case planner.Write:
		fmt.Fprintf(out, "write %s r%d, %d items\n", c.Checkpoint, c.Rank, len(c.Items))
		return nil
	case planner.Commit:
		m := c.Manifest
		var ranks []int
		for _, r := range m.Ranks {
			ranks = append(ranks, r.Rank)
		}
		fmt.Fprintf(out, "commit %s of %s %s/%s, name %s, step %d, attempt %d, world %d, ranks %v, %d bytes, manifest %.12s\n",
			m.Checkpoint, m.Store, m.Run, m.Trial, m.Name, m.Step, m.Attempt, m.WorldSize, ranks, c.Bytes, checkpoint.Sum(checkpoint.EncodeManifest(m)))
		return committed(c)
	}
	s.t.Fatal(fmt.Sprintf("unknown command %T", command))
	return nil
}
