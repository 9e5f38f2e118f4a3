package launch

import (
	"bytes"
	"io"
	"maps"
	"net/http"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/projections"
)

// TestInventories combines what the nodes of a living group have. Nodes 1 and 2 have ranks 0 and 1.
func TestInventories(t *testing.T) {
	t.Parallel()
	gathered := client.EncodeParts([][]byte{[]byte("a"), []byte("b")})
	reports := func(of ...int) map[int]session.Reported {
		all := map[int]session.Reported{}
		for i := 0; i < len(of); i += 2 {
			all[of[i]] = session.Reported{Iteration: of[i+1]}
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
				attempt: projections.Attempt{Attempt: 3}, indexes: []int{1, 2}, nodes: session.Nodes{{0}, {1}}, present: map[int]bool{},
				resumed: &session.Resumed{Reports: map[int]session.Reported{}},
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
	take(2, report, replied(nil, session.ReportedHeader, session.Reported{Iteration: 6, Step: 60}.String()))
	take(3, report, replied(nil, session.ReportedHeader, session.Reported{Iteration: 6, Step: 60}.String()))
	take(3, report, replied(nil, session.ReportedHeader, session.Reported{Done: true, Step: 61}.String())) // it has returned
	root := client.EncodeParts([][]byte{[]byte("from 1")})
	a := replied(root)
	take(2, asked("broadcast", client.HeaderSeq, "4", client.HeaderRoot, "1"), a)
	if body, err := io.ReadAll(a.Body); err != nil || !bytes.Equal(body, root) {
		t.Errorf("the rank gets %q, %v", body, err)
	}
	take(3, asked("gather", client.HeaderSeq, "3"), replied(root))
	h.told(msgHello)
	late := asked("report")
	since := h.begins(late)
	got := h.move(5, 77)
	if h.accept(since, 2, late, replied(nil, session.ReportedHeader, session.Reported{Iteration: 7}.String())) {
		t.Error("an answer of the coordinator before counts")
	}
	want := inventory{
		Attempt: 5, Hello: true, Heard: 77, Sequences: map[int]uint64{2: 4, 3: 3}, Answer: &collectiveAnswer{Sequence: 4, Root: 1, Body: root},
		Reports: map[int]session.Reported{2: {Iteration: 6, Step: 60}, 3: {Iteration: 6, Step: 61, Done: true}},
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
