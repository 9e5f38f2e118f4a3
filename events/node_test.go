package events

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// Joined events stand for the events that were joined.
func TestJoin(t *testing.T) {
	var plans []*LocalPlan
	var seals []*WriteSealed
	var writes []*WriteCompleted
	for i, rank := range []int{3, 4, 5, 9} {
		plans = append(plans, &LocalPlan{Attempt: 2, Checkpoint: "x.a2", Name: "x", Step: 7, Rank: rank, Fingerprint: strings.Repeat(fmt.Sprintf("%02x", rank), 32)})
		seals = append(seals, &WriteSealed{Attempt: 2, Checkpoint: "x.a2", Rank: rank, Bytes: int64(i / 3), Waited: Seconds(0)})
		if i > 0 { // the first rank's copy was not measured
			seals[i].Copied = Seconds(time.Duration(i) * time.Second)
		}
		w := &WriteCompleted{Attempt: 2, Checkpoint: "x.a2", Rank: rank, IndexDigest: plans[i].Fingerprint, BytesWritten: 10, BytesReused: int64(i), Write: Seconds(time.Second)}
		if i%2 == 0 {
			w.Queued, w.Sync = Seconds(time.Millisecond), Seconds(time.Duration(i)*time.Hour)
		}
		if i != 1 {
			w.Files = append(w.Files, File{Name: fmt.Sprintf("r%05d.safetensors", rank), Size: 100})
		}
		if i == 2 {
			w.Files = append(w.Files, File{Name: "extra", Size: 0})
		}
		w.Files = append(w.Files, File{Name: fmt.Sprintf("r%05d.idx", rank), Size: int64(rank)})
		writes = append(writes, w)
	}
	writes[3].Files = []File{writes[3].Files[0], writes[3].Files[1]}
	plan, err := JoinPlans(plans)
	if err != nil {
		t.Fatal(err)
	}
	if got := slices.Collect(plan.Each(plan.Fingerprints)); !reflect.DeepEqual(got, plans) {
		t.Errorf("plans %+v, want %+v", got, plans)
	}
	if got := slices.Collect(JoinSeals(seals).Each()); !reflect.DeepEqual(got, seals) {
		t.Errorf("seals %+v, want %+v", got, seals)
	}
	joined := JoinWrites(writes)
	if len(joined) != 1 {
		t.Fatalf("%d events", len(joined))
	}
	got := slices.Collect(joined[0].(*NodeWrite).Each())
	for _, w := range got { // the order of names within a rank is that of the first rank that has them
		slices.SortFunc(w.Files, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	}
	for _, w := range writes {
		slices.SortFunc(w.Files, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	}
	if !reflect.DeepEqual(got, writes) {
		t.Errorf("writes %+v, want %+v", got, writes)
	}
}

// What an event of a node cannot hold stays an event of its rank.
func TestJoinKeepsOddWrites(t *testing.T) {
	odd := &WriteCompleted{Checkpoint: "x.a2", Rank: 1, IndexDigest: "?"}
	star := &WriteCompleted{Checkpoint: "x.a2", Rank: 2, IndexDigest: strings.Repeat("ab", 32), Files: []File{{Name: "a*", Size: 1}}}
	out := JoinWrites([]*WriteCompleted{odd, star})
	if len(out) != 2 || out[0] != odd || out[1] != star {
		t.Errorf("joined as %+v", out)
	}
}

// Members that do not fit each other make a void.
func TestNodeBodiesAreChecked(t *testing.T) {
	sum := `"` + strings.Repeat("CgoK", 10) + `Cgo="` // 32 bytes
	for kind, texts := range map[Kind][]string{
		"plan.node": {
			`{"ranks":[{"first":0,"count":2}],"fingerprints":` + sum + `}`,
			`{"ranks":[{"first":0,"count":1}]}`,
			`{"ranks":[{"first":0,"count":1}],"fingerprints":` + sum + `,"digest":"ab"}`,
			`{"ranks":[],"digest":"ab"}`,
			`{"ranks":[{"first":0,"count":2},{"first":1,"count":1}],"digest":"ab"}`,
			`{"ranks":[{"first":-1,"count":2}],"digest":"ab"}`,
			`{"ranks":[{"first":0,"count":100000000000}],"digest":"ab"}`,
		},
		"seal.node": {`{"ranks":[{"first":0,"count":3}],"bytes":[1,2]}`, `{"ranks":[{"first":0,"count":3}]}`, `{"ranks":[{"first":0,"count":3}],"bytes":[1],"copied_s":[1,2]}`},
		"write.node": {
			`{"ranks":[{"first":0,"count":1}],"indexes":"","bytes_written":[1],"bytes_reused":[1]}`,
			`{"ranks":[{"first":0,"count":1}],"indexes":` + sum + `,"bytes_written":[1],"bytes_reused":[]}`,
			`{"ranks":[{"first":0,"count":1}],"indexes":` + sum + `,"bytes_written":[1],"bytes_reused":[1],"files":[{"name":"r*","sizes":[]}]}`,
		},
		"group.started": {
			`{"world_size":4,"nodes":[{"node":0,"nodes":1,"first":0,"count":2}]}`,
			`{"world_size":4,"nodes":[{"node":0,"nodes":2,"first":0,"count":2}],"ranks":[{"rank":0}]}`,
			`{"world_size":4,"nodes":[{"node":0,"nodes":1,"first":0,"count":2},{"node":-1,"nodes":1,"first":2,"count":2}]}`,
			`{"world_size":9000000000,"nodes":[{"node":0,"nodes":9000000000,"first":0,"count":1}]}`,
		},
	} {
		for _, text := range texts {
			e := Event{ID: "a", Kind: kind, Version: 1, Scope: scopeOf(kind), Data: json.RawMessage(text)}
			body, err := e.Body()
			if err != nil {
				t.Fatal(err)
			}
			if _, void := body.(*Void); !void || e.CheckBody() == nil {
				t.Errorf("%s %s is read as %+v", kind, text, body)
			}
		}
	}
}

// The placement of a group by node equals that by rank, and its size does not depend on the
// number of ranks.
func TestNodeRuns(t *testing.T) {
	counts := slices.Repeat([]int{8}, 2048)
	counts = append(counts, 0, 4)
	nodes := make([]int, len(counts))
	for i := range nodes {
		nodes[i] = i
	}
	nodes[7] = 3000 // in place of node 7
	b := GroupStarted{WorldSize: 16388, Nodes: NodeRuns(nodes, counts)}
	if err := b.check(); err != nil {
		t.Fatal(err)
	}
	if len(b.Nodes) != 4 || b.schemaVersion() != 2 {
		t.Errorf("runs %+v, version %d", b.Nodes, b.schemaVersion())
	}
	rank := 0
	placed := slices.Collect(b.Placed())
	for node, count := range counts {
		for local := range count {
			if p := placed[rank]; p.Rank != rank || p.Node != nodes[node] || p.LocalRank != local {
				t.Fatalf("rank %d is placed %+v", rank, p)
			}
			rank++
		}
	}
	if text, err := json.Marshal(b); err != nil || len(text) > 400 {
		t.Errorf("%d bytes, %v", len(text), err)
	}
}
