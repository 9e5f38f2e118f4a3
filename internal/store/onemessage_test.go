package store

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/front"
)

// TestOneMessage: a client with the token sends one hard message at a time. Each is refused, or all
// readers get past it: other runs continue, the log has no damage, and the store opens again.
func TestOneMessage(t *testing.T) {
	t.Parallel()
	agg := events.Aggregate{Run: "run", Trial: trialName}
	rank := events.Scope{Run: "run", Trial: trialName, Actor: events.Rank(0)}
	event := func(s events.Scope, k events.Kind, data string) events.Event {
		return events.Event{ID: NewID(), Kind: k, Version: 1, Source: "intruder", Time: time.Now(), Scope: s, Data: []byte(data)}
	}
	entry := func(bucket, key, data string, with ...string) *nats.Msg {
		m := &nats.Msg{Subject: "$KV." + bucket + "." + key, Data: []byte(data), Header: nats.Header{}}
		for i := 0; i < len(with); i += 2 {
			m.Header[with[i]] = []string{with[i+1]}
		}
		return m
	}
	pin := func(end string) *nats.Msg {
		e := event(events.Scope{Run: "run", Trial: trialName, Actor: events.Server}, "checkpoint.pinned", `{"checkpoint":"step-1.a1"}`)
		return forged(t, e, expectStream, "CKPT", expectLast, end, expectLane, agg.Lane())
	}
	deep := func(n int) string {
		return `{"metrics":{"x":` + strings.Repeat("[", n) + strings.Repeat("]", n) + `}}`
	}
	timed := func(k events.Kind, at string) *nats.Msg {
		m := forged(t, event(rank, k, "{}"))
		m.Header[events.HeaderTime] = []string{at}
		return m
	}
	for name, tc := range map[string]struct {
		says func(end string) []*nats.Msg
		want int // the code of the last answer; 0: taken
	}{
		"a time before year 1":    {func(string) []*nats.Msg { return []*nats.Msg{timed("job.started", "0000-01-01T00:00:00Z")} }, front.CodeEvent},
		"a time after year 9999":  {func(string) []*nats.Msg { return []*nats.Msg{timed("job.started", "9999-12-31T23:59:59-23:59")} }, front.CodeEvent},
		"metrics after year 9999": {func(string) []*nats.Msg { return []*nats.Msg{timed("report.metrics", "9999-12-31T23:59:59-23:59")} }, front.CodeEvent},
		"a body of 9,998 lists":   {func(string) []*nats.Msg { return []*nats.Msg{forged(t, event(rank, "report.metrics", deep(9998)))} }, front.CodeEvent},
		"a body of 90 lists":      {func(string) []*nats.Msg { return []*nats.Msg{forged(t, event(rank, "report.metrics", deep(90)))} }, 0},
		"a witness without a cursor": {func(string) []*nats.Msg {
			return []*nats.Msg{entry(jetlog.Witnesses, "ghost", `{"name":"ghost"}`, expectLast, "0")}
		}, front.CodeEntry},
		"a cursor before its witness": {func(string) []*nats.Msg {
			return []*nats.Msg{
				entry(jetlog.Cursors, "cc", `{"name":"cc","sequence":1,"token":"x"}`, expectLast, "0"),
				entry(jetlog.Witnesses, "cc", `{"name":"cc"}`, expectLast, "0"),
				entry(jetlog.Cursors, "cc", "", expectLast, "1", "KV-Operation", "DEL"),
			}
		}, front.CodeEntry},
		"a blob that never was": {func(string) []*nats.Msg {
			return []*nats.Msg{forged(t, event(rank, "plan.local", `{"attempt":1,"checkpoint":"step-1.a1","plan":{"digest":"`+strings.Repeat("ab", 32)+`","size":300000}}`))}
		}, 0},
		"a digest that is none": {func(string) []*nats.Msg {
			return []*nats.Msg{forged(t, event(rank, "plan.local", `{"attempt":1,"checkpoint":"step-1.a1","plan":{"digest":"blake3:x","size":5}}`))}
		}, 0},
		"a condition in another spelling": {func(end string) []*nats.Msg { return []*nats.Msg{pin("0" + end)} }, front.CodeLane},
		"the subject of a lane":           {func(string) []*nats.Msg { return []*nats.Msg{{Subject: "ckpt.run." + trialName + ".s"}} }, front.CodeEvent},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := made(t)
			owner, addr := listening(t, dir, &jetlog.Listen{Address: "127.0.0.1:0", Token: secretToken})
			must(t, owner, "run", begun("step-1"))
			end, err := owner.Log.LaneEnd(t.Context(), agg)
			if err != nil {
				t.Fatal(err)
			}
			i := intrude(t, "nats://"+addr)
			code, text := 0, ""
			for _, m := range tc.says(strconv.FormatUint(end, 10)) {
				code, text = i.asks(m)
			}
			if code != tc.want {
				t.Errorf("it is answered %q", text)
			}
			must(t, owner, "run", events.CheckpointAborted{Attempt: 1, Checkpoint: "step-1.a1", Reason: "the end"})
			committed(t, owner, "other", 1)
			if _, err := owner.Pin(t.Context(), "other@step-1", ""); err != nil {
				t.Errorf("a decision about another run: %v", err)
			}
			out, err := owner.VerifyLog(t.Context(), nil)
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range out.Findings {
				if !f.Aside {
					t.Errorf("found %s", f)
				}
			}
			shut(t, owner)
			shut(t, open(t, dir))
		})
	}
}
