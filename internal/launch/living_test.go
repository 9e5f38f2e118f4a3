package launch

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"reflect"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/handoff"
	"github.com/ckptstore/ckptstore/internal/session/restore"
	"github.com/ckptstore/ckptstore/projections"
)

// TestInventories combines what the nodes of a living group have. Nodes 1 and 2 have ranks 0 and 1.
func TestInventories(t *testing.T) {
	t.Parallel()
	gathered := client.EncodeParts([][]byte{[]byte("a"), []byte("b")})
	reports := func(of ...int) map[int]handoff.Reported {
		all := map[int]handoff.Reported{}
		for i := 0; i < len(of); i += 2 {
			all[of[i]] = handoff.Reported{Iteration: of[i+1]}
		}
		return all
	}
	has := func(rank, report int, sequence uint64, answer *collectiveAnswer) inventory {
		return inventory{
			Attempt: 3, Hello: true, Heard: 100 + uint64(rank), Reports: reports(rank, report),
			Sequences: map[int]uint64{rank: sequence}, Answer: answer,
		}
	}
	answer := func(sequence uint64, body []byte) *collectiveAnswer {
		return &collectiveAnswer{Sequence: sequence, Root: -1, Body: body}
	}
	with := func(i inventory, change func(*inventory)) inventory { change(&i); return i }
	for name, c := range map[string]struct {
		one, two *inventory // nil: the node has not come
		broken   string     // part of the reason; empty: the group continues
		sequence uint64
	}{
		"equal":                       {ref(has(0, 7, 9, answer(9, gathered))), ref(has(1, 7, 9, answer(9, gathered))), "", 9},
		"nothing was exchanged":       {ref(has(0, 0, 0, nil)), ref(has(1, 0, 0, nil)), "", 0},
		"a rank waits for its answer": {ref(has(0, 7, 9, answer(9, gathered))), ref(has(1, 6, 8, answer(8, gathered))), "", 9},
		"an answer of one node only":  {ref(has(0, 7, 9, answer(9, nil))), ref(has(1, 7, 9, answer(9, gathered))), "", 9},
		"an answer that all have is not needed": {
			ref(has(0, 7, 9, answer(9, nil))), ref(has(1, 7, 9, answer(9, nil))), "", 9,
		},
		"the answer is not kept": {ref(has(0, 7, 9, answer(9, nil))), ref(has(1, 7, 8, answer(8, gathered))), "rank 1 waits for collective 9", 9},
		"two collectives apart":  {ref(has(0, 7, 9, answer(9, gathered))), ref(has(1, 7, 7, answer(7, gathered))), "rank 1 has made 7 collectives", 9},
		"two reports apart":      {ref(has(0, 7, 0, nil)), ref(has(1, 5, 0, nil)), "rank 1 has the answer to report 5", 0},
		"a node is lost":         {ref(has(0, 7, 0, nil)), nil, "node 2 is lost", 0},
		"its part has ended":     {ref(with(has(0, 7, 0, nil), func(i *inventory) { i.Attempt = 0 })), ref(has(1, 7, 0, nil)), "node 1 has no part", 0},
		"it cannot continue":     {ref(with(has(0, 7, 0, nil), func(i *inventory) { i.Broken = "the reason" })), ref(has(1, 7, 0, nil)), "node 1 cannot continue with another: the reason", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := &living{
				attempt: projections.Attempt{Attempt: 3}, indexes: []int{1, 2}, nodes: session.Nodes{{0}, {1}}, present: map[int]bool{}, counted: map[int]uint64{},
				resumed: &session.Resumed{Earlier: handoff.Earlier{Reports: map[int]handoff.Reported{}}},
			}
			found, want := map[int]inventory{}, map[int]bool{}
			for place, i := range []*inventory{c.one, c.two} {
				if i == nil {
					continue
				}
				if found[l.indexes[place]] = *i; i.Attempt == 3 {
					want[place] = true
				}
			}
			l.take(found)
			if !strings.Contains(l.broken, c.broken) || (l.broken == "") != (c.broken == "") {
				t.Errorf("broken: %q, want %q", l.broken, c.broken)
			}
			if !maps.Equal(l.present, want) || l.greeted != len(want) {
				t.Errorf("present %v, greeted %d", l.present, l.greeted)
			}
			if of := l.resumed; of.Sequence != c.sequence || of.Heard != 100 && want[0] {
				t.Errorf("resumed %+v", of)
			}
			if c.broken == "" && len(l.resumed.Reports) != 2 {
				t.Errorf("reports %+v", l.resumed.Reports)
			}
		})
	}
}

// A request to end that the ranks got from the coordinator before is one to this job, whether the log
// has it or not. So the group is asked further, and its good end is no end of the training. Ranks that
// have reported, or have asked, are not sent SIGTERM at once.
func TestRequestOfCoordinatorBefore(t *testing.T) {
	t.Parallel()
	reported := func(stop ...string) inventory {
		i := inventory{Attempt: 3, Reports: map[int]handoff.Reported{}}
		for rank, of := range stop {
			i.Reports[rank] = handoff.Reported{Iteration: 7, Stop: of}
		}
		return i
	}
	for name, c := range map[string]struct {
		has   inventory
		told  string
		polls bool
	}{
		"none of it":               {inventory{Attempt: 3}, "", false},
		"reports only":             {reported("", ""), "", true},
		"a preemption":             {reported("", client.Preempt), client.Preempt, true},
		"a stop":                   {reported(client.Stop, client.Preempt), client.Stop, true},
		"a question":               {inventory{Attempt: 3, Listens: true}, "", true},
		"a question, a stop":       {inventory{Attempt: 3, Listens: true, Told: client.Stop}, client.Stop, true},
		"a question, a save asked": {inventory{Attempt: 3, Listens: true, Told: client.Preempt}, client.Preempt, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := &job{orders: newOrders(), log: slog.New(slog.DiscardHandler)}
			l := &living{
				attempt: projections.Attempt{Attempt: 3}, indexes: []int{1}, nodes: session.Nodes{{0, 1}}, present: map[int]bool{}, counted: map[int]uint64{},
				resumed: &session.Resumed{Earlier: handoff.Earlier{Reports: map[int]handoff.Reported{}}},
			}
			l.take(map[int]inventory{1: c.has})
			j.recall(l)
			h := &stopState{orders: j.orders}
			h.resume(l)
			if h.open.Load() != c.polls || h.told.Load() != (c.told != "") || h.Tell() != c.told {
				t.Errorf("open %v, told %v, the ranks get %q", h.open.Load(), h.told.Load(), h.Tell())
			}
			j.told = c.told != ""
			if stopped := j.groupStopped(t.Context(), 3, nil); (stopped.Failure == string(blame.Preemption)) != (c.told == client.Preempt) {
				t.Errorf("the end of the group: %+v", stopped)
			}
		})
	}
	var none stopState
	none.resume(nil)
	if none.open.Load() || none.told.Load() {
		t.Error("a new group was asked")
	}
}

// A group that the coordinator before had asked to grow grows, unless its ranks continue.
func TestGrowthOfCoordinatorBefore(t *testing.T) {
	t.Parallel()
	h := &stopState{orders: newOrders()}
	h.resume(&living{resumed: &session.Resumed{}, told: client.Preempt, grew: &growth{from: 1, to: 2}})
	if h.grew() == nil || h.told.Load() || h.Tell() != session.Grow {
		t.Errorf("grew %v, told %v", h.grew(), h.told.Load())
	}
	h.takeBack(time.Now().Add(-time.Hour))
	if h.Tell() != "" || h.grew() != nil {
		t.Error("ranks that continue are asked")
	}
}

// The loss of a node whose ranks have ended, by its own word, does not end the group: whether the attempt's loop has
// taken that word or waits for the log makes no difference.
func TestLossAfterTheEnd(t *testing.T) {
	t.Parallel()
	lost := func(obeyed bool) int {
		o := &others{
			stopped: true, in: make(chan nodeEvent, 1), over: make(chan struct{}),
			place: map[int]int{1: 1}, joinings: map[int]uint64{1: 7}, alive: map[int]bool{1: true}, obeyed: map[int]bool{1: obeyed}, lostOnes: map[int]bool{},
		}
		o.mourn(1, 7, errors.New("it has lost its power"), false, "")
		return len(o.in)
	}
	if lost(false) != 1 {
		t.Error("the loss of a node that trains does not end the group")
	}
	if lost(true) != 0 {
		t.Error("the loss of a node that has trained to the end does")
	}
}

// A request to end that the coordinator before had told the ranks is the same request afterwards: a growth
// pauses no trial, also if the new nodes have not joined the next coordinator yet, and a preemption is no
// growth, also if a spare is there.
func TestGrowthToldFromPreemption(t *testing.T) {
	t.Parallel()
	endpoint := func(nodesThere int) *nodes.Endpoint {
		dir := t.TempDir()
		e, err := nodes.Listen(t.Context(), nodes.EndpointConfig{
			Address: "127.0.0.1:0", Dir: dir, Job: "job", Run: "run", Store: "store", Version: "test", Min: 1, Max: 2,
			Self: nodes.Node{Index: 0, Key: "0", Standby: true},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = e.Close() })
		for index := 1; index <= nodesThere; index++ {
			link, err := nodes.Join(t.Context(), nodes.JoinConfig{
				Address: e.Addr().String(), Dir: dir, Wait: 30 * time.Second,
				Self: nodes.Node{Index: index, Key: strconv.Itoa(index), Procs: 1, Version: "test", Store: "store"},
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(link.Close)
		}
		if members, gone := e.Activate(map[int]int{1: 0}); len(members) != 1 || len(gone) > 0 {
			t.Fatalf("members %v, gone %v", members, gone)
		}
		return e
	}
	one, two := endpoint(1), endpoint(2)
	for name, c := range map[string]struct {
		told  []string
		at    *nodes.Endpoint
		grows bool
		asks  string // the job
	}{
		"a growth, no spare yet":   {[]string{session.Grow}, one, true, ""},
		"a growth, a spare":        {[]string{"", session.Grow}, two, true, ""},
		"a preemption, a spare":    {[]string{client.Preempt}, two, false, client.Preempt},
		"a preemption after that":  {[]string{session.Grow, client.Preempt}, two, false, client.Preempt},
		"a preemption before that": {[]string{client.Preempt, session.Grow}, two, false, client.Preempt},
		"a stop":                   {[]string{session.Grow, client.Stop, client.Preempt}, two, false, client.Stop},
		"nothing":                  {[]string{""}, two, false, ""},
	} {
		j := &job{orders: newOrders(), log: slog.New(slog.DiscardHandler)}
		j.cfg.GrowInterval = time.Minute
		j.fleet = &fleet{job: j, endpoint: c.at}
		l := &living{nodes: session.Nodes{{0}}}
		for _, told := range c.told {
			l.heed(told)
		}
		j.recall(l)
		asked := ""
		if o, _ := j.orders.given(); o != nil {
			asked = o.asks()
		}
		if (l.grew != nil) != c.grows || asked != c.asks {
			t.Errorf("%s: grows %v, the job is asked to %q", name, l.grew, asked)
		}
	}
}

// A node whose trainer starts again after it has given its inventory has no part in the living group any more.
func TestNodeJoinsAgainDuringTakeover(t *testing.T) {
	t.Parallel()
	for _, again := range []bool{false, true} {
		dir := t.TempDir()
		e, err := nodes.Listen(t.Context(), nodes.EndpointConfig{
			Address: "127.0.0.1:0", Dir: dir, Job: "job", Run: "run", Store: "store", Version: "test", Min: 1, Max: 1,
			Self: nodes.Node{Index: 0, Key: "0", Standby: true},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = e.Close() })
		join := func() *nodes.Link {
			link, err := nodes.Join(t.Context(), nodes.JoinConfig{
				Address: e.Addr().String(), Dir: dir, Wait: 30 * time.Second,
				Self: nodes.Node{Index: 1, Key: "1", Procs: 1, Version: "test", Store: "store"},
			})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(link.Close)
			return link
		}
		link := join()
		f := &fleet{endpoint: e, inventories: map[int]inventory{}, counted: make(chan struct{})}
		f.count(1, e.Members()[0].Joining, inventory{Attempt: 3})
		if again {
			link.Close()
			join()
		}
		l := &living{
			attempt: projections.Attempt{Attempt: 3}, indexes: []int{1}, nodes: session.Nodes{{0}}, present: map[int]bool{}, counted: map[int]uint64{},
			resumed: &session.Resumed{Earlier: handoff.Earlier{Reports: map[int]handoff.Reported{}}},
		}
		l.take(f.await(t.Context(), l.indexes))
		f.activate(l)
		if l.present[0] == again || strings.Contains(l.broken, "started again") != again || (l.members[0].State == nodes.StateLost) != again {
			t.Errorf("joined again: %v: present %v, broken %q, member %+v", again, l.present, l.broken, l.members[0])
		}
	}
}

// A load that the coordinating process has refused is not under way any more.
func TestFailedLoadIsOver(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	e, err := nodes.Listen(t.Context(), nodes.EndpointConfig{
		Address: "127.0.0.1:0", Dir: dir, Job: "job", Run: "run", Store: "store", Version: "test", Min: 1, Max: 2,
		Self: nodes.Node{Index: 0, Key: "0", Procs: 1},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.Close() })
	e.Handle("POST /v1/attempts/{attempt}/loads/resolve", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if err := httpkit.Reply(w, restore.ResolveReply{Failure: &restore.Failure{Text: "there is no such checkpoint"}}); err != nil {
			t.Error(err)
		}
	}))
	link, err := nodes.Join(t.Context(), nodes.JoinConfig{
		Address: e.Addr().String(), Dir: dir, Wait: 30 * time.Second,
		Self: nodes.Node{Index: 1, Key: "1", Procs: 1, Version: "test", Store: "store"},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(link.Close)
	p := &part{job: &job{link: link}, order: startOrder{Attempt: 1}}
	reply, err := p.Resolve(t.Context(), restore.ResolveRequest{})
	if err != nil || reply.Failure == nil {
		t.Fatalf("%+v, %v", reply, err)
	}
	if why := p.held.move(1, 0).Broken; why != "" {
		t.Error("the group cannot continue: " + why)
	}
}

func ref[T any](of T) *T { return &of }

// asked is a request of a rank.
func asked(op string, header ...string) *http.Request {
	r, err := http.NewRequest(http.MethodPost, "http://endpoint/v1/"+op, nil)
	if err != nil {
		panic(err) // the test's own request
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	return r
}

// replied is the answer to one.
func replied(body []byte, header ...string) *http.Response {
	r := &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: io.NopCloser(bytes.NewReader(body))}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	return r
}

// A node's part notes what its ranks were answered. Answers of a coordinator that another has replaced
// meanwhile do not count.
func TestHoldings(t *testing.T) {
	t.Parallel()
	var h holdings
	take := func(rank int, r *http.Request, a *http.Response) bool { return h.accept(h.begins(r), rank, r, a) }
	report := asked("report")
	take(2, report, replied(nil, session.ReportedHeader, handoff.Reported{Iteration: 6, Step: 60}.String()))
	take(3, report, replied(nil, session.ReportedHeader, handoff.Reported{Iteration: 6, Step: 60}.String()))
	take(3, report, replied(nil, session.ReportedHeader, handoff.Reported{Done: true, Step: 61}.String())) // it has returned
	root := client.EncodeParts([][]byte{[]byte("from 1")})
	a := replied(root)
	take(2, asked("broadcast", client.HeaderSeq, "4", client.HeaderRoot, "1"), a)
	if body, err := io.ReadAll(a.Body); err != nil || !bytes.Equal(body, root) {
		t.Errorf("the rank gets %q, %v", body, err)
	}
	take(3, asked("gather", client.HeaderSeq, "3"), replied(root))
	take(2, asked("should_stop"), replied([]byte(`{"stop":"stop"}`)))
	poll := replied([]byte(`{"stop":"preempt"}`))
	take(2, asked("should_stop"), poll)
	if body, err := io.ReadAll(poll.Body); err != nil || string(body) != `{"stop":"preempt"}` {
		t.Errorf("the rank gets %q, %v", body, err)
	}
	grow := replied([]byte(`{"stop":"preempt"}`), session.RequestHeader, session.Grow)
	var other holdings
	other.accept(0, 2, asked("should_stop"), grow)
	if other.Told != session.Grow {
		t.Errorf("the ranks have the request %q", other.Told)
	}
	h.told(msgHello)
	late := asked("report")
	since := h.begins(late)
	got := h.move(5, 77)
	if h.accept(since, 2, late, replied(nil, session.ReportedHeader, handoff.Reported{Iteration: 7}.String())) {
		t.Error("an answer of the coordinator before counts")
	}
	want := inventory{
		Attempt: 5, Hello: true, Heard: 77, Sequences: map[int]uint64{2: 4, 3: 3}, Answer: &collectiveAnswer{Sequence: 4, Root: 1, Body: root},
		Listens: true, Told: client.Preempt,
		Reports: map[int]handoff.Reported{2: {Iteration: 6, Step: 60}, 3: {Iteration: 6, Step: 61, Done: true}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("inventory %+v, want %+v", got, want)
	}
	parts, err := got.Answer.parts(4)
	if err != nil || len(parts) != 4 || string(parts[1]) != "from 1" || parts[0] != nil {
		t.Errorf("parts %q, %v", parts, err)
	}
	if _, err := got.Answer.parts(1); err == nil {
		t.Error("a broadcast of a rank that the group does not have")
	}

	// Answers that are too large are not kept.
	large := client.EncodeParts([][]byte{make([]byte, mostAnswer)})
	take(2, asked("gather", client.HeaderSeq, "5"), replied(large))
	if kept := h.move(5, 77).Answer; kept.Sequence != 5 || kept.Body != nil {
		t.Errorf("answer %d of %d bytes is kept", kept.Sequence, len(kept.Body))
	}
	var none *holdings
	if !none.accept(none.begins(report), 0, report, replied(nil)) {
		t.Error("an answer without holdings does not count")
	}
}

// A part states why its group cannot continue with another coordinator, the first of several reasons.
func TestHoldingsBreak(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		do   func(h *holdings)
		want string
	}{
		"collectives only":     {func(h *holdings) { h.begins(asked("gather")) }, ""},
		"a message":            {func(h *holdings) { h.begins(asked("send")); h.told(msgExited) }, "exchanged messages"},
		"a key":                {func(h *holdings) { h.begins(asked("set")) }, "exchanged messages"},
		"a rank has ended":     {func(h *holdings) { h.told(msgExited) }, "have ended"},
		"the part has stopped": {func(h *holdings) { h.told(msgStopped) }, "have ended"},
		"a load":               {func(h *holdings) { h.loads(1) }, "were loading"},
		"a load that is over":  {func(h *holdings) { h.loads(1); h.loads(-1) }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var h holdings
			c.do(&h)
			if got := h.move(1, 0).Broken; !strings.Contains(got, c.want) || (got == "") != (c.want == "") {
				t.Errorf("broken: %q, want %q", got, c.want)
			}
		})
	}
}

// A gather has one part of each rank.
func TestGatherOfAnotherWorld(t *testing.T) {
	t.Parallel()
	for world := range 4 {
		parts := make([][]byte, 2)
		a := &collectiveAnswer{Sequence: 1, Root: -1, Body: client.EncodeParts(parts)}
		if got, err := a.parts(world); (err == nil) != (world == 2) {
			t.Error(strconv.Itoa(world)+" ranks:", got, err)
		}
	}
}
