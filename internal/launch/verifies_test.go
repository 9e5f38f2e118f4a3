package launch_test

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
)

// checked compares the checksums of a reply's blocks with the bytes in place.
func checked(r client.LoadReply) error {
	sums := r.Checks.CRC32C
	for n, item := range r.Checks.Items {
		data, err := os.ReadFile(r.Arenas[r.In[item]].Path)
		if err != nil {
			return err
		}
		data = data[r.Offsets[item]-r.Checks.Before[n] : r.Offsets[item]+r.Sizes[item]+r.Checks.After[n]]
		for block := range slices.Chunk(data, 64<<10) {
			want := binary.LittleEndian.Uint32(sums)
			sums = sums[4:]
			if got := crc32.Checksum(block, crc32.MakeTable(crc32.Castagnoli)); got != want {
				return fmt.Errorf("item %d has a block of %08x, and the reply has %08x", item, got, want)
			}
		}
	}
	if len(sums) > 0 {
		return fmt.Errorf("%d bytes of checksums are left", len(sums))
	}
	return nil
}

// Ranks that verify what they copy get the checksums, and nothing is read for
// them. The load is complete when all have verified. It fails for all when a rank
// has found damage, reports damage in intact data, or has gone.
func TestRanksVerify(t *testing.T) {
	t.Parallel()
	newJob(t, 2, append(slices.Clone(savesWide), "false")...).must()
	j, ranks := doorsOf(t, 2, func(j *job) { j.cfg.Command = sitsOn })
	var wants []client.LoadRequest
	for rank, d := range ranks {
		if status, reply := d.post("hello", `{"protocols":[3]}`); status != 200 {
			t.Fatal(status, reply)
		}
		wants = append(wants, client.LoadRequest{Ref: "step-1", Verifies: true, Items: itemsOf(wide(1, rank, 2, false))})
	}
	load := func() (replies []client.LoadReply) {
		for _, text := range loadRaw(t, ranks, wants) {
			var r client.LoadReply
			if err := json.Unmarshal([]byte(text), &r); err != nil {
				t.Fatal(err)
			}
			if r.Checks == nil || !slices.Equal(r.Checks.Items, []int{0, 1}) {
				t.Fatalf("the rank must verify its large tensors: %s", text)
			}
			replies = append(replies, r)
		}
		return replies
	}
	confirming := func(rank int, r client.LoadReply, said client.LoadedRequest) <-chan string {
		said.Load = r.Load
		body, err := json.Marshal(said)
		if err != nil {
			t.Error(err)
		}
		return ranks[rank].begin("loaded", string(body))
	}
	var fine client.LoadedRequest

	r := load()
	for rank := range r {
		if err := checked(r[rank]); err != nil {
			t.Errorf("rank %d: %v", rank, err)
		}
	}
	said1 := confirming(1, r[1], fine)
	if done := bodiesOf[events.RestoreCompleted](t, runOf(t)); len(done) > 0 || len(said1) > 0 {
		t.Error("a load is complete before all ranks have verified it")
	}
	for _, got := range []string{<-confirming(0, r[0], fine), <-said1} {
		if !strings.HasPrefix(got, "200 ") {
			t.Errorf("what was verified is answered by %q", got)
		}
	}
	if done := one[events.RestoreCompleted](t, runOf(t)); done.Tier != "files" || done.Bytes < wideBytes {
		t.Errorf("complete: %+v", done)
	}

	fails := func(r []client.LoadReply, of1 client.LoadedRequest, status, says string) {
		t.Helper()
		before := len(bodiesOf[events.RestoreFailed](t, runOf(t)))
		said1 := confirming(1, r[1], of1)
		for _, got := range []string{<-confirming(0, r[0], fine), <-said1} {
			if !strings.HasPrefix(got, status) || !strings.Contains(got, says) {
				t.Errorf("damage is answered by %q, want %s with %q", got, status, says)
			}
		}
		if failed := bodiesOf[events.RestoreFailed](t, runOf(t)); len(failed) != before+1 || !strings.Contains(failed[before].Error, says) {
			t.Errorf("the log has %v", failed)
		}
	}
	fails(load(), client.LoadedRequest{Damaged: "my memory is bad"}, "409 ", "my memory is bad), the checkpoint is not: load it again")
	fails(load(), client.LoadedRequest{Failed: "the disk is gone"}, "409 ", "rank 1 has not loaded its part: the disk is gone")

	r = load()
	file, err := os.OpenFile(r[1].Arenas[r[1].In[0]].Path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := file.WriteAt([]byte{0xEE}, r[1].Offsets[0]+100_000); err != nil {
		t.Fatal(err)
	}
	if err := file.Close(); err != nil {
		t.Fatal(err)
	}
	if err := checked(r[1]); err == nil {
		t.Error("a byte that was changed is not seen")
	}
	fails(r, client.LoadedRequest{Damaged: "a block is another"}, "500 ", "checksum of the block")
	// A rank with nothing to verify waits too, and learns the result.
	small := wants[0].Items
	wants[0].Items = small[2:3]
	texts := loadRaw(t, ranks, wants)
	for rank := range r {
		r[rank] = client.LoadReply{}
		if err := json.Unmarshal([]byte(texts[rank]), &r[rank]); err != nil {
			t.Fatal(err)
		}
	}
	if r[0].Checks != nil || r[1].Checks == nil {
		t.Errorf("who verifies: %q", texts)
	}
	fails(r, client.LoadedRequest{Damaged: "a block is another"}, "500 ", "checksum of the block")
	// A rank that cannot verify has all read for all.
	wants[0].Verifies = false
	bodies := make([][]byte, len(ranks))
	for rank := range ranks {
		if bodies[rank], err = json.Marshal(wants[rank]); err != nil {
			t.Fatal(err)
		}
	}
	other := make(chan int, 1)
	go func() { status, _ := ranks[0].post("load", string(bodies[0])); other <- status }()
	status, reply := ranks[1].post("load", string(bodies[1]))
	<-other
	if status != 500 || !strings.Contains(reply, "checksum of the block") {
		t.Errorf("a load that one cannot verify: %d %s", status, reply)
	}
	wants[0] = client.LoadRequest{Ref: "step-1", Verifies: true, Items: small}

	r = load()
	before := bodiesOf[events.RestoreFailed](t, runOf(t))
	said0 := confirming(0, r[0], fine)
	if err := syscall.Kill(ranks[1].pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if got := <-said0; !strings.HasPrefix(got, "409 ") || !strings.Contains(got, "cannot meet any more") {
		t.Errorf("the end of a rank that verifies is answered by %q", got)
	}
	if err := syscall.Kill(ranks[0].pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := j.wait(); err == nil {
		t.Error("a job whose rank was killed has ended well")
	}
	if done := bodiesOf[events.RestoreCompleted](t, runOf(t)); len(done) != 1 {
		t.Errorf("%d loads are complete, want 1", len(done))
	}
	if failed := bodiesOf[events.RestoreFailed](t, runOf(t)); len(failed) != len(before)+1 {
		t.Errorf("the log has %d failed loads, want %d", len(failed), len(before)+1)
	}
}

// A rank that verifies and reports nothing fails the load for all after the
// limit, also for itself when it reports later.
func TestRankVerifiesTooLate(t *testing.T) {
	t.Parallel()
	newJob(t, 2, append(slices.Clone(savesWide), "false")...).must()
	j, ranks := doorsOf(t, 2, func(j *job) { j.cfg.Collective = 5 * time.Second })
	var wants []client.LoadRequest
	for rank, d := range ranks {
		if status, reply := d.post("hello", `{"protocols":[3]}`); status != 200 {
			t.Fatal(status, reply)
		}
		wants = append(wants, client.LoadRequest{Ref: "step-1", Verifies: true, Items: itemsOf(wide(1, rank, 2, false))})
	}
	loadRaw(t, ranks, wants)
	for rank, d := range ranks { // one after the other
		if status, reply := d.post("loaded", `{"load":1}`); status != 504 || !strings.Contains(reply, "ranks [1] have not confirmed their part") {
			t.Errorf("rank %d is answered by %d %s", rank, status, reply)
		}
	}
	if failed := one[events.RestoreFailed](t, runOf(t)); failed.Load != 1 || len(bodiesOf[events.RestoreCompleted](t, runOf(t))) > 0 {
		t.Errorf("the log has %+v", failed)
	}
	j.cancel(nil)
	if err := j.wait(); err == nil {
		t.Error("a job that was stopped has ended well")
	}
}
