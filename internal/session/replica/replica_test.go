package replica

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/crc32c"
	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/object"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/tensor"
)

const storeID = "01890000-0000-7000-8000-000000000001"

// node is one node's memory.
type node struct {
	t      *testing.T
	arenas *staging.Arenas
	slots  *staging.Slots
	path   string
}

func newNode(t *testing.T, slots int) *node {
	t.Helper()
	dir := t.TempDir()
	arenas, err := staging.Open(dir, storeID, "run", 0, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	n := &node{t: t, arenas: arenas, path: dir, slots: staging.New(arenas, staging.Config{Slots: slots, Ranks: 1, Busy: staging.BusyWait, Memory: memory, Log: slog.New(slog.DiscardHandler)})}
	t.Cleanup(func() {
		n.slots.Close()
		if err := arenas.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

var (
	memory = staging.Memory{Bytes: 1 << 30}
	item   = checkpoint.Item{Value: true, Bytes: 2*staging.ReplicaBlock + 12345, Shard: tensor.Shard{FQN: "value"}}
)

// content returns the bytes of a save.
func content(seed uint64) []byte {
	r := rand.New(rand.NewPCG(seed, 1))
	out := make([]byte, item.Bytes)
	for i := 0; i+8 <= len(out); i += 8 {
		binary.LittleEndian.PutUint64(out[i:], r.Uint64())
	}
	return out
}

// take begins a save of rank 0, as its worker does.
func (n *node) take(id string, data []byte) (seal func() *staging.Reader) {
	n.t.Helper()
	encoded := checkpoint.EncodeLocal(checkpoint.Local{Items: []checkpoint.Item{item}})
	layout := staging.LayOut([]checkpoint.Item{item}, encoded)
	grant, err := n.slots.Take(n.t.Context(), staging.Part{Attempt: 1, Fingerprint: checkpoint.Sum(encoded), Checkpoint: id}, []int{0}, layout)
	if err != nil {
		n.t.Fatal(err)
	}
	f, err := os.OpenFile(grant.Path, os.O_RDWR, 0)
	if err != nil {
		n.t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if _, err := f.WriteAt(data, layout.Offsets()[0]); err != nil {
		n.t.Fatal(err)
	}
	if _, err := f.WriteAt(binary.LittleEndian.AppendUint64(nil, grant.Generation), 8); err != nil {
		n.t.Fatal(err)
	}
	return func() *staging.Reader {
		n.t.Helper()
		if _, ok, err := n.slots.Seal(0, id); !ok || err != nil {
			n.t.Fatal(ok, err)
		}
		r := n.slots.Reader(id, 0)
		if r == nil {
			n.t.Fatalf("no sealed slot for %s", id)
		}
		return r
	}
}

// written frees the slot of a save, which keeps its content.
func (n *node) written(id string) {
	n.t.Helper()
	_, release, err := n.slots.Open(id, 0, []checkpoint.Item{item})
	if err != nil {
		n.t.Fatal(err)
	}
	release(nil)
}

// pair is a sender's node, and a keeper behind a server.
type pair struct {
	*node
	to     *node
	keeper *Keeper
	server *httptest.Server
	way    *way
}

// way changes requests on their way to the keeper.
type way struct {
	mu     sync.Mutex
	change func(r *http.Request, body []byte) ([]byte, error)
	answer func(r *http.Request) error // of an answer that is lost
	blocks int
}

// RoundTrip implements [http.RoundTripper].
func (w *way) RoundTrip(r *http.Request) (*http.Response, error) {
	var body []byte
	if r.Body != nil {
		var err error
		body, err = io.ReadAll(r.Body)
		if err = errors.Join(err, r.Body.Close()); err != nil {
			return nil, err
		}
	}
	var err error
	w.mu.Lock()
	change := w.change
	if strings.Contains(r.URL.Path, "/blocks/") {
		w.blocks++
	}
	w.mu.Unlock()
	if change != nil {
		if body, err = change(r, body); err != nil {
			return nil, err
		}
	}
	again := r.Clone(r.Context())
	again.Body, again.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	reply, err := http.DefaultTransport.RoundTrip(again)
	if err == nil && w.answer != nil {
		if err = w.answer(r); err != nil {
			_ = reply.Body.Close()
			return nil, err
		}
	}
	return reply, err
}

func newPair(t *testing.T) *pair {
	t.Helper()
	to := newNode(t, 1)
	p := &pair{node: newNode(t, 2), to: to, keeper: NewKeeper(to.arenas, memory, slog.New(slog.DiscardHandler)), way: &way{}}
	p.keeper.Keep(1, []int{0})
	p.server = httptest.NewServer(p.keeper)
	t.Cleanup(p.keeper.Close)
	t.Cleanup(p.server.Close)
	return p
}

// sender returns a sender whose goroutine the test is.
func (p *pair) sender() *Sender {
	return &Sender{to: Partner{Node: "node 1", URL: p.server.URL, Client: &http.Client{Transport: p.way}}, attempt: 1, log: slog.New(slog.DiscardHandler), saves: map[string]*sentSave{}, came: make(chan struct{}, 1)}
}

// sends sends one slot.
func (p *pair) sends(s *Sender, id string, slot Slot) error {
	s.Send(id, 0, 1, slot)
	of, _ := s.next()
	return s.send(p.t.Context(), of)
}

// wants compares the whole replica with the bytes of a save.
func (p *pair) wants(id string, data []byte) {
	p.t.Helper()
	r, release, err := p.keeper.Hold(id, 0)
	if err != nil {
		p.t.Fatal(err)
	}
	defer release()
	src, err := r.Source([]checkpoint.Item{item})
	if err != nil {
		p.t.Fatal(err)
	}
	got, err := src.Item(0)
	if err != nil || !bytes.Equal(got, data) {
		p.t.Errorf("%s: %d bytes of the replica differ: %v", id, len(got), err)
	}
}

// A slot arrives byte for byte. The old replica stays until the memory is needed for the one
// after the next, and an older slot does not replace a newer one.
func TestNewestWholeWins(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	s := p.sender()
	one, two := content(1), content(2)
	first := p.take("step-1.a1", one)()
	if err := p.sends(s, "step-1.a1", first); err != nil {
		t.Fatal(err)
	}
	p.wants("step-1.a1", one)
	second := p.take("step-2.a1", two)()
	cut := errors.New("cut")
	p.way.change = func(r *http.Request, body []byte) ([]byte, error) {
		if strings.HasSuffix(r.URL.Path, "/blocks/2") {
			return nil, cut
		}
		return body, nil
	}
	if err := p.sends(s, "step-2.a1", second); !errors.Is(err, cut) {
		t.Fatalf("a transfer that is cut: %v", err)
	}
	p.wants("step-1.a1", one)
	p.way.change = nil
	if err := p.sends(s, "step-2.a1", second); err != nil { // after the cut, the same save again
		t.Fatal(err)
	}
	p.wants("step-2.a1", two)
	p.wants("step-1.a1", one) // its save may be open
	if err := p.sends(s, "step-1.a1", first); problem.Kinds(err) == nil || problem.Kinds(err)[0] != problem.Conflict {
		t.Errorf("an older slot: %v", err)
	}
	p.wants("step-2.a1", two)
	held, release, err := p.keeper.Hold("step-1.a1", 0) // it is being written
	if err != nil {
		t.Fatal(err)
	}
	p.written("step-1.a1")
	three := content(3)
	if err := p.sends(s, "step-3.a1", p.take("step-3.a1", three)()); err != nil {
		t.Fatal(err)
	}
	if err := held.Verify(); err != nil || held.Checkpoint != "step-1.a1" {
		t.Errorf("a replica that is held, of %s: %v", held.Checkpoint, err)
	}
	release()
	p.wants("step-2.a1", two)
	p.wants("step-3.a1", three)
	if _, ok := p.keeper.Has("step-1.a1", 0); ok {
		t.Error("the oldest replica is still there")
	}
}

// The answer to the last request of a slot is lost. The sender repeats the request, and the slot
// counts as sent.
func TestAnswerIsLost(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	lost := 0
	p.way.answer = func(r *http.Request) error {
		if strings.HasSuffix(r.URL.Path, "/whole") && lost == 0 {
			lost++
			return errors.New("the connection is cut")
		}
		return nil
	}
	one := content(1)
	if err := p.sends(p.sender(), "step-1.a1", p.take("step-1.a1", one)()); err != nil || lost != 1 {
		t.Fatalf("%d answers are lost: %v", lost, err)
	}
	p.wants("step-1.a1", one)
}

// readLimit has the read deadline of a connection.
type readLimit struct {
	*httptest.ResponseRecorder
	at time.Time
}

func (r *readLimit) SetReadDeadline(at time.Time) error {
	r.at = at
	return nil
}

// Memory may be allocated for longer than a request may take to arrive.
func TestAllocationHasNoReadDeadline(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	w := &readLimit{ResponseRecorder: httptest.NewRecorder()}
	body := `{"attempt":1,"rank":0,"checkpoint":"step-1.a1","order":1,"size":8192}`
	p.keeper.ServeHTTP(w, httptest.NewRequest(http.MethodPost, "/v1/replicas/begin", strings.NewReader(body)))
	if w.Code != http.StatusOK || !w.at.IsZero() {
		t.Errorf("status %d, a read deadline at %v", w.Code, w.at)
	}
}

// slowPartner answers each block after a while that one request may take.
type slowPartner struct {
	slot   []byte
	blocks atomic.Int64
}

// RoundTrip implements [http.RoundTripper].
func (s *slowPartner) RoundTrip(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	if strings.HasSuffix(r.URL.Path, "/find") {
		err := httpkit.Reply(w, findAnswer{Attempt: 1, Size: int64(len(s.slot))})
		return w.Result(), err
	}
	var of findRequest
	if err := json.NewDecoder(r.Body).Decode(&of); err != nil {
		return nil, err
	}
	select {
	case <-time.After(blockTimeout * 9 / 10):
	case <-r.Context().Done():
		return nil, r.Context().Err()
	}
	s.blocks.Add(1)
	block := s.slot[of.Block*staging.ReplicaBlock:]
	block = block[:min(len(block), staging.ReplicaBlock)]
	w.Header().Set(sumHeader, fmt.Sprintf("%08x", crc32c.Checksum(block)))
	_, err := w.Write(block)
	return w.Result(), err
}

// A fetch ends if its blocks come too slowly, although each of them comes in time. The time before a rank
// waits for them does not count.
func TestSlowFetch(t *testing.T) {
	n := newNode(t, 1)
	reader := n.take("step-1.a1", content(1))()
	slot := make([]byte, 10*staging.ReplicaBlock) // longer than its data: that is allowed
	if _, err := reader.ReadAt(slot[:reader.Size()], 0); err != nil {
		t.Fatal(err)
	}
	for name, of := range map[string]struct {
		unhurried time.Duration
		blocks    int64
	}{
		"at once": {0, requests},
		"ahead":   {fetchGrace * 3 / 2, 2 * requests},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				k := NewKeeper(newNode(t, 1).arenas, memory, slog.New(slog.DiscardHandler))
				slow := &slowPartner{slot: slot}
				began := time.Now()
				var hurry chan struct{}
				if of.unhurried > 0 {
					hurry = make(chan struct{})
					time.AfterFunc(of.unhurried, func() { close(hurry) })
				}
				slots, _ := k.Fetch(t.Context(), Partner{Node: "node 1", URL: "http://replica", Client: &http.Client{Transport: slow}}, "step-1.a1", []int{0, 1}, hurry)
				late := time.Since(began) - of.unhurried - fetchGrace
				if slots != 0 || late < 0 || late > time.Second || slow.blocks.Load() != of.blocks {
					t.Errorf("%d slots and %d blocks, %v after the bound", slots, slow.blocks.Load(), late)
				}
			})
		})
	}
}

// A block that was changed or cut on its way is sent again; none of its bytes become part of a
// replica.
func TestDamagedBlocks(t *testing.T) {
	t.Parallel()
	for name, damage := range map[string]func(body []byte) []byte{
		"a flipped bit": func(body []byte) []byte { body[len(body)/2] ^= 4; return body },
		"torn":          func(body []byte) []byte { clear(body[len(body)/2:]); return body },
		"cut":           func(body []byte) []byte { return body[:len(body)-1] },
		"too long":      func(body []byte) []byte { return append(body, 1) },
		"empty":         func([]byte) []byte { return nil },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPair(t)
			damaged := map[string]bool{}
			p.way.change = func(r *http.Request, body []byte) ([]byte, error) {
				if strings.Contains(r.URL.Path, "/blocks/") && !damaged[r.URL.Path] {
					damaged[r.URL.Path] = true
					return damage(bytes.Clone(body)), nil
				}
				return body, nil
			}
			data := content(3)
			err := p.sends(p.sender(), "step-1.a1", p.take("step-1.a1", data)())
			if err != nil {
				t.Fatal(err)
			}
			if len(damaged) != 3 || p.way.blocks < 6 {
				t.Errorf("%d blocks were damaged, and %d sent", len(damaged), p.way.blocks)
			}
			p.wants("step-1.a1", data)
		})
	}
}

// A block whose receipt was begun again takes nothing from the earlier one, and is missing until the later
// one has all its bytes. A block that has arrived is not received again.
func TestBlockIsReceivedAgain(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	r, err := p.to.arenas.NewReplica(t.Context(), 0, 2*staging.ReplicaBlock)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Drop() }()
	block := make([]byte, staging.ReplicaBlock)
	block[0] = 1
	early, err := r.Block(1)
	if err != nil {
		t.Fatal(err)
	}
	late, err := r.Block(1)
	if err != nil {
		t.Fatal(err)
	}
	if early.Store(block) == nil || early.End(0) == nil {
		t.Error("an earlier receipt stores bytes")
	}
	if err := late.Store(block[:10]); err != nil {
		t.Fatal(err)
	}
	if late.End(crc32c.Checksum(block[:10])) == nil || r.Has(1) {
		t.Error("a part of a block counts as all of it")
	}
	if err := late.Store(block[10:]); err != nil || late.End(1) == nil || r.Has(1) {
		t.Error("a block with another checksum counts as arrived", err)
	}
	if err := late.End(crc32c.Checksum(block)); err != nil || !r.Has(1) || r.Has(0) {
		t.Error("the block has not arrived", err)
	}
	a := &arrival{replica: r}
	if b, err := a.begin(1, 0); b != nil || err != nil {
		t.Errorf("a block that has arrived is received again: %v", err)
	}
	if _, err := a.begin(0, staging.ReplicaBlock); err == nil {
		t.Error("a body without a checksum is received")
	}
	a.over = true
	if _, err := a.begin(0, staging.ReplicaBlock+sumSize); problem.Kinds(err) == nil || problem.Kinds(err)[0] != problem.Gone {
		t.Errorf("a block of an arrival that is over: %v", err)
	}
}

// A slot that takes another save while it is sent ends its transfer, and no save waits for it.
func TestSlotIsReusedWhileSent(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	s := p.sender()
	slot := p.take("step-1.a1", content(1))()
	p.way.change = func(r *http.Request, body []byte) ([]byte, error) {
		if strings.HasSuffix(r.URL.Path, "/blocks/1") { // the first save is written; two more take both slots
			p.written("step-1.a1")
			p.take("step-2.a1", content(2))()
			p.take("step-3.a1", content(3))()
		}
		return body, nil
	}
	if err := p.sends(s, "step-1.a1", slot); !errors.Is(err, staging.ErrReused) {
		t.Errorf("error %v, want that the slot was reused", err)
	}
	if _, ok := p.keeper.Has("step-1.a1", 0); ok {
		t.Error("a replica of two saves counts as whole")
	}
}

// A worker cuts the file of its slot off. Its transfer fails, and the process lives.
func TestSlotIsTruncated(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	slot := p.take("step-1.a1", content(1))()
	files, err := filepath.Glob(filepath.Join(p.path, "*", "*", "r00000.save.*"))
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		err = errors.Join(err, os.Truncate(file, staging.ReplicaBlock))
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := p.sends(p.sender(), "step-1.a1", slot); !errors.Is(err, object.ErrUnreadable) {
		t.Errorf("error %v, want that the file cannot be read", err)
	}
	if _, ok := p.keeper.Has("step-1.a1", 0); ok {
		t.Error("it is a replica")
	}
}

// A block of a replica that cannot be read is refused, and nothing is stored in such memory.
func TestReplicaIsTruncated(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	if err := p.sends(p.sender(), "step-1.a1", p.take("step-1.a1", content(1))()); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(p.to.path, "*", "*", "r00000.peer.*"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	if err := os.Truncate(files[0], 0); err != nil {
		t.Fatal(err)
	}
	r, release, err := p.keeper.Hold("step-1.a1", 0)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	buf := make([]byte, piece)
	arrived := func(context.Context, int64) error { return nil }
	_, digests := r.Digests(t.Context(), arrived, nil)
	for of, err := range map[string]error{
		"read": r.Send(0, io.Discard, buf), "verify": r.Verify(), "digests": digests, "whole": r.Whole(r.Part),
	} {
		if !errors.Is(err, object.ErrUnreadable) {
			t.Errorf("%s: error %v, want that the file cannot be read", of, err)
		}
	}
	partner := Partner{Node: "node 1", URL: p.server.URL, Client: p.server.Client()}
	if slots, _ := p.keeper.Fetch(t.Context(), partner, "step-1.a1", []int{0}, nil); slots != 0 {
		t.Error("it was fetched")
	}
}

// What is not a complete slot of the announced part is refused as a whole.
func TestForgedSlots(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	data := content(1)
	slot := p.take("step-1.a1", data)()
	whole := make([]byte, slot.Size())
	if _, err := slot.ReadAt(whole, 0); err != nil {
		t.Fatal(err)
	}
	unsealed := bytes.Clone(whole)
	clear(unsealed[8:16])
	flipped := bytes.Clone(whole)
	flipped[100] ^= 1
	for name, c := range map[string]struct {
		id   string
		rank int
		data []byte
		want problem.Kind
	}{
		"of another save":     {"step-2.a1", 0, whole, problem.Damage},
		"unsealed":            {"step-1.a1", 0, unsealed, problem.Damage},
		"another description": {"step-1.a1", 0, flipped, problem.Damage},
		"cut off":             {"step-1.a1", 0, whole[:staging.ReplicaBlock], problem.Damage},
		"of another rank":     {"step-1.a1", 7, whole, problem.Denied},
	} {
		s := p.sender()
		s.last = 1000
		s.Send(c.id, c.rank, 1, memorySlot{bytes.NewReader(c.data)})
		of, _ := s.next()
		err := s.send(t.Context(), of)
		if kinds := problem.Kinds(err); len(kinds) == 0 || kinds[0] != c.want {
			t.Errorf("%s: error %v, want %s", name, err, c.want)
		}
		if _, ok := p.keeper.Has(c.id, c.rank); ok {
			t.Errorf("%s: it is a replica", name)
		}
		p.keeper.Keep(2, nil)
		p.keeper.Keep(1, []int{0})
	}
}

// memorySlot is a slot that the test has made.
type memorySlot struct{ *bytes.Reader }

func (m memorySlot) Size() int64 { return m.Reader.Size() }

// A replica that has changed in memory since its arrival is not used.
func TestReplicaChangesInMemory(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	if err := p.sends(p.sender(), "step-1.a1", p.take("step-1.a1", content(1))()); err != nil {
		t.Fatal(err)
	}
	r, release, err := p.keeper.Hold("step-1.a1", 0)
	if err != nil {
		t.Fatal(err)
	}
	src, err := r.Source([]checkpoint.Item{item})
	if err != nil {
		t.Fatal(err)
	}
	bytesOf, err := src.Item(0)
	if err != nil {
		t.Fatal(err)
	}
	bytesOf[77] ^= 1
	defer release()
	if err := r.Verify(); err == nil || !strings.Contains(err.Error(), "it arrived with") {
		t.Errorf("error %v, want that it has changed", err)
	}
}

// Memory beyond the bound is refused, and the replica that is there stays.
func TestMemoryOfReplicasIsBounded(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	p.keeper.memory = staging.Memory{Bytes: item.Bytes + item.Bytes/2}
	s, one := p.sender(), content(1)
	if err := p.sends(s, "step-1.a1", p.take("step-1.a1", one)()); err != nil {
		t.Fatal(err)
	}
	err := p.sends(s, "step-2.a1", p.take("step-2.a1", content(2))())
	if kinds := problem.Kinds(err); len(kinds) == 0 || kinds[0] != problem.NoSpace {
		t.Errorf("error %v, want that there is no space", err)
	}
	p.wants("step-1.a1", one)
}

// A node of three ranks seals saves faster than its partner takes them. If a slot of a
// checkpoint was sent, all are, before the newest later checkpoint; those in between are not.
func TestWholeCheckpointsAreSent(t *testing.T) {
	t.Parallel()
	s := newPair(t).sender()
	send := func(id string, ranks ...int) {
		for _, rank := range ranks {
			s.Send(id, rank, 3, memorySlot{bytes.NewReader(nil)})
		}
	}
	var sent []string
	next := func(slots int) {
		for range slots {
			of, ok := s.next()
			if !ok {
				t.Fatalf("nothing waits after %q", sent)
			}
			sent = append(sent, fmt.Sprint(of.checkpoint, of.rank))
		}
	}
	send("a", 0, 1)
	next(1) // while this slot is sent
	send("b", 0, 1)
	send("a", 2)
	send("c", 1, 0)
	send("b", 2) // too late
	next(3)
	send("d", 0)
	send("c", 2)
	next(3)
	send("d", 2, 1)
	next(2)
	if want := []string{"a0", "a1", "a2", "c1", "c0", "c2", "d0", "d2", "d1"}; !slices.Equal(sent, want) {
		t.Errorf("sent %q, want %q", sent, want)
	}
	if s.skipped != 3 || len(s.waiting) > 0 {
		t.Errorf("%d slots are skipped, and %d wait", s.skipped, len(s.waiting))
	}
}

// A partner that does not answer costs its own replica: sending does not block, and only the
// newest slot waits.
func TestSilentPartner(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	asked, silent := make(chan struct{}, 1), make(chan struct{})
	p.way.change = func(r *http.Request, _ []byte) ([]byte, error) {
		select {
		case asked <- struct{}{}:
		default:
		}
		select {
		case <-silent:
		case <-r.Context().Done():
		}
		return nil, errors.New("no answer")
	}
	s := NewSender(t.Context(), 1, Partner{Node: "node 1", URL: p.server.URL, Client: &http.Client{Transport: p.way}}, 0, func(context.Context, Whole) {}, slog.New(slog.DiscardHandler))
	s.Send("step-0.a1", 0, 1, memorySlot{bytes.NewReader(nil)})
	<-asked
	for range 100 {
		s.Send("step-1.a1", 0, 1, memorySlot{bytes.NewReader(nil)})
		s.Send("step-2.a1", 0, 1, memorySlot{bytes.NewReader(nil)})
	}
	s.mu.Lock()
	waiting := len(s.waiting)
	newest := s.waiting[0].checkpoint
	s.mu.Unlock()
	if waiting != 1 || newest != "step-2.a1" {
		t.Errorf("%d slots wait, the first for %s", waiting, newest)
	}
	s.Stop() // does not wait for the partner
	close(silent)
}

// A job that is over, or another attempt, is refused.
func TestKeeperOfAnotherAttempt(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	slot := p.take("step-1.a1", content(1))()
	p.keeper.Keep(2, []int{0})
	if err := p.sends(p.sender(), "step-1.a1", slot); len(problem.Kinds(err)) == 0 || problem.Kinds(err)[0] != problem.Gone {
		t.Errorf("another attempt: %v", err)
	}
	p.keeper.Close()
	if _, err := p.keeper.begin(context.Background(), beginRequest{Attempt: 2, Checkpoint: "x", Size: 4096}); len(problem.Kinds(err)) == 0 || problem.Kinds(err)[0] != problem.Gone {
		t.Errorf("after the end: %v", err)
	}
}

// fetches fetches the replica of a save into another node's memory, and returns that.
func (p *pair) fetches(id string, client *http.Client, hurry <-chan struct{}) (at *node, slots int) {
	p.t.Helper()
	at = newNode(p.t, 1)
	k := NewKeeper(at.arenas, memory, slog.New(slog.DiscardHandler))
	p.t.Cleanup(k.Close)
	slots, _ = k.Fetch(p.t.Context(), Partner{Node: "node 1", URL: p.server.URL, Client: client}, id, []int{0}, hurry)
	return at, slots
}

// A fetched slot has the bytes of the save, and digests that were computed from these bytes while they
// came, so that a restore need not compute them: also if a rank begins to wait for it in the middle.
func TestFetchedWithDigests(t *testing.T) {
	t.Parallel()
	p := newPair(t)
	data := content(1)
	if err := p.sends(p.sender(), "step-1.a1", p.take("step-1.a1", data)()); err != nil {
		t.Fatal(err)
	}
	never, before, middle := make(chan struct{}), make(chan struct{}), make(chan struct{})
	close(before)
	hurries := &http.Client{Transport: changed{func(block []byte) []byte {
		close(middle)
		return block
	}}}
	for name, of := range map[string]struct {
		hurry  chan struct{}
		client *http.Client
	}{
		"at once": {nil, p.server.Client()}, "ahead": {never, p.server.Client()}, "asked for": {before, p.server.Client()}, "asked for in the middle": {middle, hurries},
	} {
		at, slots := p.fetches("step-1.a1", of.client, of.hurry)
		held, release := at.arenas.Hold("step-1.a1")
		defer release()
		got, digest := held.Chunk(0, item)
		if slots != 1 || !bytes.Equal(got, data) || digest != checkpoint.Sum(data) {
			t.Errorf("%s: %d slots, %d bytes with the digest %s, want %s", name, slots, len(got), digest, checkpoint.Sum(data))
		}
	}
}

// A block that is changed on its way, or is cut, makes the whole slot useless: nothing of it is offered.
func TestFetchOfChangedBlock(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(block []byte) []byte{
		"flipped": func(block []byte) []byte { block[len(block)-1] ^= 1; return block },
		"cut":     func(block []byte) []byte { return block[:len(block)-1] },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPair(t)
			if err := p.sends(p.sender(), "step-1.a1", p.take("step-1.a1", content(1))()); err != nil {
				t.Fatal(err)
			}
			at, slots := p.fetches("step-1.a1", &http.Client{Transport: changed{change}}, nil)
			held, release := at.arenas.Hold("step-1.a1")
			defer release()
			if slots != 0 || len(held) != 0 {
				t.Errorf("%d slots are fetched, and %d offered", slots, len(held))
			}
		})
	}
}

// changed changes one block of a replica on its way.
type changed struct{ change func([]byte) []byte }

// RoundTrip implements [http.RoundTripper].
func (c changed) RoundTrip(r *http.Request) (*http.Response, error) {
	asked, err := io.ReadAll(r.Body)
	if err != nil {
		return nil, err
	}
	again := r.Clone(r.Context())
	again.Body, again.ContentLength = io.NopCloser(bytes.NewReader(asked)), int64(len(asked))
	reply, err := http.DefaultTransport.RoundTrip(again)
	if err != nil || !strings.HasSuffix(r.URL.Path, "/read") || !bytes.Contains(asked, []byte(`"block":1`)) {
		return reply, err
	}
	body, err := io.ReadAll(reply.Body)
	if err := errors.Join(err, reply.Body.Close()); err != nil {
		return nil, err
	}
	reply.Body = io.NopCloser(bytes.NewReader(c.change(body)))
	return reply, nil
}
