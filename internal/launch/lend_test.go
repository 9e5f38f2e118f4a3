package launch_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
)

// itemsOf requests all of a state.
func itemsOf(s client.State) (items []client.Item) {
	for _, t := range s.Tensors {
		items = append(items, client.Item{FQN: t.FQN, DType: t.DType, Shape: t.Global, Offsets: t.Box.Offsets, Sizes: t.Box.Sizes})
	}
	for _, v := range s.Values {
		items = append(items, client.Item{FQN: v.FQN, Value: true, PerRank: v.PerRank})
	}
	return items
}

// loadRaw loads on all ranks at once, and returns each reply.
func loadRaw(t *testing.T, ranks []*door, requests []client.LoadRequest) []string {
	t.Helper()
	replies := make([]chan string, len(ranks))
	for rank, d := range ranks {
		body, err := json.Marshal(requests[rank])
		if err != nil {
			t.Fatal(err)
		}
		replies[rank] = make(chan string, 1)
		go func() {
			status, reply := d.post("load", string(body))
			replies[rank] <- fmt.Sprint(status, " ", reply)
		}()
	}
	var out []string
	for rank, c := range replies {
		reply, ok := strings.CutPrefix(<-c, "200 ")
		if !ok {
			t.Fatalf("rank %d: %s", rank, reply)
		}
		out = append(out, reply)
	}
	return out
}

// readLoad reads the bytes at the place given in a reply.
func readLoad(t *testing.T, r client.LoadReply) (out []string) {
	t.Helper()
	for i, size := range r.Sizes {
		data, err := os.ReadFile(r.Arenas[r.In[i]].Path)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, string(data[r.Offsets[i]:][:size]))
	}
	return out
}

// dataOf is all bytes of a state.
func dataOf(s client.State) (out []string) {
	for _, t := range s.Tensors {
		out = append(out, string(t.Data))
	}
	for _, v := range s.Values {
		out = append(out, string(v.Data))
	}
	return out
}

// If the data that a rank wants lies as it is in a remaining slot, its own or
// another's, the rank reads it there, and no memory is allocated. The slot stays
// until every rank has released it. Data of several slots gets a file of its own.
func TestSlotsAreLent(t *testing.T) {
	t.Parallel()
	killTrainer(t, checkpoint.ReceiptFile)
	j, ranks := doors(t, 2)
	for _, d := range ranks {
		if status, reply := d.post("hello", `{"protocols":[3]}`); status != 200 {
			t.Fatal(status, reply)
		}
	}
	// Rank 0 wants the shard of rank 1 too, in two parts: a part that is
	// contiguous in a slot, and a part from both ranks. Rank 1 wrote the replica.
	full, own := state(2, 0, 2), state(2, 1, 2)
	items := itemsOf(full)
	part := itemsOf(own)[0]
	part.Offsets, part.Sizes = slices.Clone(part.Offsets), slices.Clone(part.Sizes)
	part.Offsets[0]++
	part.Sizes[0]--
	both := items[0]
	both.Offsets, both.Sizes = []int64{0, 0}, both.Shape
	wants := []client.LoadRequest{{Items: append(items, part, both)}, {Items: itemsOf(own)}}
	replies := loadRaw(t, ranks, wants)
	var got, other client.LoadReply
	if err := json.Unmarshal([]byte(replies[0]), &got); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(replies[1]), &other); err != nil {
		t.Fatal(err)
	}
	row := len(own.Tensors[0].Data) / int(own.Tensors[0].Box.Sizes[0])
	want := append(dataOf(full), string(own.Tensors[0].Data[row:]), string(full.Tensors[0].Data)+string(own.Tensors[0].Data))
	if read := readLoad(t, got); !slices.Equal(read, want) {
		t.Errorf("rank 0 reads %q, want %q", read, want)
	}
	var uses []string
	for _, in := range got.In {
		uses = append(uses, strings.Join(strings.Split(filepath.Base(got.Arenas[in].Path), ".")[:2], "."))
	}
	if want := []string{"r00000.save", "r00001.save", "r00000.save", "r00000.save", "r00001.save", "r00000.load"}; !slices.Equal(uses, want) {
		t.Errorf("its items are in %q, want %q", uses, want)
	}
	if read := readLoad(t, other); !slices.Equal(read, dataOf(own)) {
		t.Errorf("rank 1 reads %q, want %q", read, dataOf(own))
	}
	if strings.Contains(replies[1], ".load.") {
		t.Errorf("rank 1 got %s", replies[1])
	}

	// A save of rank 0 takes other memory as long as rank 0 reads.
	save := func(step int) client.SaveReply {
		var s client.SaveReply
		status, reply := ranks[0].post("save", fmt.Sprintf(`{"step":%d,"participants":[0],"items":[%s]}`, step, goodItem))
		if err := json.Unmarshal([]byte(reply), &s); status != 200 || err != nil {
			t.Fatal(status, reply, err)
		}
		return s
	}
	if s := save(7); slices.ContainsFunc(got.Arenas, func(a client.LoadArena) bool { return a.Path == s.Arena }) {
		t.Errorf("a save takes %s, which is read", s.Arena)
	}
	if read := readLoad(t, got); !slices.Equal(read, want) {
		t.Errorf("during a save, rank 0 reads %q, want %q", read, want)
	}
	if status, reply := ranks[1].post("loaded", `{"load":2}`); status != 400 || !strings.Contains(reply, "rank 1 has no load 2") {
		t.Errorf("what was not lent is taken back: %d %s", status, reply)
	}
	for rank, d := range ranks {
		if status, reply := d.post("loaded", `{"load":1}`); status != 200 {
			t.Errorf("rank %d: %d %s", rank, status, reply)
		}
		if status, _ := d.post("loaded", `{"load":1}`); status != 400 {
			t.Errorf("rank %d gives back twice: %d", rank, status)
		}
	}
	j.cancel(nil)
	if err := j.wait(); err == nil {
		t.Error("a job that was stopped has ended well")
	}
	if _, err := os.Stat(arenasOf(j)); !os.IsNotExist(err) {
		t.Errorf("memory is not freed: %v", err)
	}
}
