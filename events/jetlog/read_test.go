package jetlog

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

func TestReadBounds(t *testing.T) {
	l, _ := newLog(t)
	if _, err := l.Append(t.Context(), factsOf(t, 9)...); err != nil {
		t.Fatal(err)
	}
	l.stall = 30 * time.Millisecond
	for _, tc := range []struct {
		from, until uint64
		n           int
		err         error
	}{
		{1, 10, 10, nil},
		{4, 4, 1, nil},
		{10, 10, 1, nil},
		{7, 3, 0, nil},
		{1, 12, 10, ErrEnd},
		{11, 11, 0, ErrEnd},
		{12, 12, 0, ErrGap},
		{12, 0, 0, ErrGap},
	} {
		if n, err := readError(t, l, tc.from, tc.until); n != tc.n || !errors.Is(err, tc.err) {
			t.Errorf("from %d until %d: %d events, %v; want %d, %v", tc.from, tc.until, n, err, tc.n, tc.err)
		}
	}
	if _, err := readError(t, l, 0, 1); err == nil {
		t.Error("reading from 0 was allowed")
	}
	for e, err := range l.Read(t.Context(), 1, 0) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Sequence == 5 {
			break // and no goroutine is left running
		}
	}
}

func TestReadFollows(t *testing.T) {
	l, s := newLog(t)
	reader := reopen(t, s)
	reader.stall = 5 * time.Millisecond // idle again and again
	ctx, cancel := context.WithCancel(t.Context())
	got := make(chan events.Recorded)
	ended := make(chan error, 1)
	go func() {
		for e, err := range reader.Read(ctx, 1, 0) {
			if err != nil {
				ended <- err
				return
			}
			got <- e
		}
	}()
	<-got
	for i := range 50 {
		seqs, err := l.Append(t.Context(), fact(t, i))
		if err != nil {
			t.Fatal(err)
		}
		select {
		case e := <-got:
			if e.Sequence != seqs[0] {
				t.Fatalf("got event %d, want %d", e.Sequence, seqs[0])
			}
		case err := <-ended:
			t.Fatal(err)
		}
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Fatalf("ended with %v", err)
	}
}

// damage creates a log of ten events, stops its server, flips a bit in the body of
// event seq, and starts another server on it.
func damage(t *testing.T, seq int, dropIndex bool) *Log {
	t.Helper()
	dir := t.TempDir()
	s := startServer(t, dir)
	l := connectTo(t, Options{Dial: dial(s)})
	if err := l.Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatal(err)
	}
	facts := factsOf(t, 9)
	for _, f := range facts {
		if _, err := l.Append(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	l.Close()
	s.Shutdown()

	blocks, err := filepath.Glob(filepath.Join(dir, "jetstream", "*", "streams", Stream, "msgs", "*.blk"))
	if err != nil || len(blocks) != 1 {
		t.Fatalf("blocks %q, %v", blocks, err)
	}
	data, err := os.ReadFile(blocks[0])
	if err != nil {
		t.Fatal(err)
	}
	at := bytes.Index(data, facts[seq-2].Data)
	if at < 0 {
		t.Fatal("the event is not in the block")
	}
	data[at+10] ^= 1
	if err := os.WriteFile(blocks[0], data, 0o600); err != nil {
		t.Fatal(err)
	}
	if dropIndex {
		if err := os.Remove(filepath.Join(filepath.Dir(blocks[0]), "index.db")); err != nil {
			t.Fatal(err)
		}
	}
	damaged := connectTo(t, Options{Dial: dial(startServer(t, dir))})
	damaged.stall = 50 * time.Millisecond
	return damaged
}

// The server skips a damaged event and calls itself healthy.
func TestReadGap(t *testing.T) {
	for name, tc := range map[string]struct {
		seq       int
		dropIndex bool
		yielded   int
	}{
		"in the middle":      {seq: 6, yielded: 5},
		"at the end":         {seq: 10, yielded: 9},
		"without its index":  {seq: 6, dropIndex: true},
		"rolled back by one": {seq: 10, dropIndex: true},
	} {
		t.Run(name, func(t *testing.T) {
			l := damage(t, tc.seq, tc.dropIndex)
			from, untils := uint64(1), []uint64{10, 0}
			if tc.dropIndex {
				from, untils = 11, []uint64{11, 0} // a reader that had seen all
			}
			for _, until := range untils {
				if n, err := readError(t, l, from, until); n != tc.yielded || !errors.Is(err, ErrGap) {
					t.Errorf("until %d: %d events, %v; want %d and a gap", until, n, err, tc.yielded)
				}
			}
		})
	}
}

// Every acknowledged event survives kill -9 of the server, at its sequence, and a
// concurrent reader sees each event once.
func TestKillServer(t *testing.T) {
	t.Parallel()
	p := startProcess(t)
	l := connectTo(t, Options{URL: p.url})
	if err := l.Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatal(err)
	}
	reader := connectTo(t, Options{URL: p.url})
	if _, _, err := reader.Open(t.Context()); err != nil {
		t.Fatal(err)
	}

	const writers, each = 4, 40
	var mu sync.Mutex
	acked := map[uint64]string{}
	note := func(id string, seq uint64) {
		mu.Lock()
		defer mu.Unlock()
		if old, ok := acked[seq]; ok && old != id {
			t.Errorf("sequence %d was acknowledged for %s and for %s", seq, old, id)
		}
		acked[seq] = id
	}
	acks := make(chan struct{}, 3*writers*each)
	var wg sync.WaitGroup
	for range writers {
		facts := factsOf(t, each*2)
		wg.Go(func() {
			for i := 0; i < len(facts); i += 2 {
				seqs, err := l.Append(t.Context(), facts[i], facts[i+1])
				if err != nil {
					t.Error(err)
					return
				}
				note(facts[i].ID, seqs[0])
				note(facts[i+1].ID, seqs[1])
				acks <- struct{}{}
			}
		})
	}
	decisions := make([]events.Decision, each)
	for i := range decisions {
		decisions[i] = begun(t, "step")
	}
	wg.Go(func() {
		end := uint64(0)
		for _, d := range decisions {
			seq, err := l.Decide(t.Context(), d, end)
			if err != nil {
				t.Error(err)
				return
			}
			end = seq
			note(d.ID, seq)
			acks <- struct{}{}
		}
	})
	total := uint64(1 + writers*each*2 + each)
	read := make(chan []events.Recorded, 1)
	go func() {
		var all []events.Recorded
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		for e, err := range reader.Read(ctx, 1, 0) {
			if err != nil {
				t.Error(err)
				break
			}
			if all = append(all, e); e.Sequence == total {
				break
			}
		}
		read <- all
	}()
	for range 10 {
		for range 12 { // amid the appends
			select {
			case <-acks:
			case <-time.After(30 * time.Second):
				t.Fatal("nothing is acknowledged any more")
			}
		}
		p.kill()
		mu.Lock()
		promised := maps.Clone(acked)
		mu.Unlock()
		p.start()
		again := connectTo(t, Options{URL: p.url})
		if _, _, err := again.Open(t.Context()); err != nil {
			t.Fatal(err)
		}
		last, err := again.Last(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range readAll(t, again, 1, last) {
			if id, ok := promised[e.Sequence]; ok && id != e.ID {
				t.Errorf("event %d has ID %s, acknowledged was %s", e.Sequence, e.ID, id)
			}
			delete(promised, e.Sequence)
		}
		if len(promised) > 0 {
			t.Errorf("%d acknowledged events are lost, the log ends at %d", len(promised), last)
		}
		again.Close()
	}
	wg.Wait()
	all := <-read
	if uint64(len(all)) != total || t.Failed() {
		t.Fatalf("read %d events, want %d", len(all), total)
	}
	if len(acked) != int(total)-1 {
		t.Errorf("%d events were acknowledged, want %d", len(acked), total-1)
	}
	for i, e := range all {
		if e.Sequence != uint64(i)+1 || i > 0 && acked[e.Sequence] != e.ID {
			t.Fatalf("event %d at %d has ID %s, acknowledged was %q", i+1, e.Sequence, e.ID, acked[e.Sequence])
		}
	}
}

func TestConnectNobody(t *testing.T) {
	begin := time.Now()
	_, err := Connect(t.Context(), Options{URL: "nats://user:secret@127.0.0.1:1"})
	if err == nil || !strings.Contains(err.Error(), "127.0.0.1:1") || !strings.Contains(err.Error(), "nats-server -js") {
		t.Errorf("error %v lacks where and what next", err)
	}
	if strings.Contains(err.Error(), "secret") {
		t.Errorf("error %v holds the password", err)
	}
	if took := time.Since(begin); took > 3*time.Second {
		t.Errorf("it took %s", took)
	}
	if _, err := Connect(t.Context(), Options{}); err == nil {
		t.Error("connected to nowhere")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Connect(ctx, Options{URL: "nats://127.0.0.1:1"}); err == nil {
		t.Error("connected without a server")
	}
}
