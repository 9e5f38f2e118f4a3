package launch_test

import (
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/client"
)

// If the data that a rank wants lies as it is in a file of the checkpoint, the
// rank reads it there, and memory is allocated only for the rest. Damage is found
// in place.
func TestFilesAreLent(t *testing.T) {
	t.Parallel()
	newJob(t, 2, savesAndEnds...).must()
	j, ranks := doors(t, 2)
	for _, d := range ranks {
		if status, reply := d.post("hello", `{"protocols":[3]}`); status != 200 {
			t.Fatal(status, reply)
		}
	}
	first, second := state(1, 0, 2), state(1, 1, 2)
	both := itemsOf(first)[0]
	both.Offsets, both.Sizes = []int64{0, 0}, both.Shape
	wants := []client.LoadRequest{{Items: append(itemsOf(first), itemsOf(second)[0], both)}, {Items: itemsOf(second)}}
	replies := loadRaw(t, ranks, wants)
	var got, other client.LoadReply
	if err := json.Unmarshal([]byte(replies[0]), &got); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(replies[1]), &other); err != nil {
		t.Fatal(err)
	}
	want := append(dataOf(first), string(second.Tensors[0].Data), string(first.Tensors[0].Data)+string(second.Tensors[0].Data))
	if read := readLoad(t, got); !slices.Equal(read, want) {
		t.Errorf("rank 0 reads %q, want %q", read, want)
	}
	for item, in := range got.In {
		path := got.Arenas[in].Path
		if lent := strings.HasPrefix(path, home.Data.Dir()); lent == (item == len(got.In)-1) {
			t.Errorf("item %d is in %s", item, path)
		}
	}
	if read := readLoad(t, other); !slices.Equal(read, dataOf(second)) {
		t.Errorf("rank 1 reads %q, want %q", read, dataOf(second))
	}
	if slices.ContainsFunc(other.Arenas, func(a client.LoadArena) bool { return !strings.HasPrefix(a.Path, home.Data.Dir()) }) {
		t.Errorf("rank 1 got %s", replies[1])
	}
	file, err := os.OpenFile(got.Arenas[got.In[0]].Path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := file.WriteAt([]byte{0xEE}, got.Offsets[0]); err != nil {
		t.Fatal(err)
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	damaged := make(chan string, len(ranks))
	for rank, d := range ranks {
		body, err := json.Marshal(client.LoadRequest{Items: wants[rank].Items[:1]})
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			status, reply := d.post("load", string(body))
			damaged <- fmt.Sprint(status, " ", reply)
		}()
	}
	for range ranks {
		if text := <-damaged; strings.HasPrefix(text, "200 ") || !strings.Contains(text, "checksum of the block") {
			t.Errorf("damage is answered by %q", text)
		}
	}
	j.cancel(nil)
	if err := j.wait(); err == nil {
		t.Error("a job that was stopped has ended well")
	}
}
