package ledger

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
)

// bookLog is a log in memory.
type bookLog struct {
	mu       sync.Mutex
	messages []events.Message
	more     chan struct{} // closed by the next append
	walks    int           // with an end
	read     int           // messages that they yielded
}

var _ Log = (*bookLog)(nil)

func newBookLog() *bookLog { return &bookLog{more: make(chan struct{})} }

func (l *bookLog) add(m events.Message) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.messages = append(l.messages, m)
	close(l.more)
	l.more = make(chan struct{})
	return uint64(len(l.messages))
}

// iterations appends facts of a run.
func (l *bookLog) iterations(run string, n int) {
	for range n {
		l.mu.Lock()
		id := fmt.Sprint("id-", len(l.messages)+1)
		l.mu.Unlock()
		l.add(events.Message{Subject: "ckpt." + run + ".main.r0.report.metrics", Header: map[string][]string{events.HeaderID: {id}}, Data: []byte(`{"loss":1}`)})
	}
}

func (l *bookLog) Walk(ctx context.Context, from, until uint64, each func(m events.Message, sequence uint64, stored time.Time) error) error {
	if until > 0 {
		l.mu.Lock()
		l.walks++
		l.mu.Unlock()
	}
	for at := from; until == 0 || at <= until; at++ {
		l.mu.Lock()
		more, have := l.more, uint64(len(l.messages)) >= at
		var m events.Message
		if have {
			m = l.messages[at-1]
		}
		if until > 0 {
			l.read++
		}
		l.mu.Unlock()
		switch {
		case have:
			if err := each(m, at, time.Unix(1700000000, int64(at))); err != nil {
				return err
			}
		case until > 0:
			return fmt.Errorf("the log has no event %d", at)
		default:
			at--
			select {
			case <-more:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
	return nil
}

func (l *bookLog) Last(context.Context) (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return uint64(len(l.messages)), nil
}

func (l *bookLog) LaneEnd(context.Context, events.Aggregate) (uint64, error) { return 0, nil }

func (l *bookLog) Decide(_ context.Context, d events.Decision, _ uint64) (uint64, error) {
	return l.add(events.Message{Subject: events.Subject(d.Event.Scope, d.Event.Kind), Header: map[string][]string{events.HeaderID: {d.Event.ID}}, Data: d.Event.Data}), nil
}

// bookStore is a store with evidence.
type bookStore struct {
	dir    string
	log    *bookLog
	config Config
}

// newBookStore returns a store whose log has some events, and a head with an audit.sealed of them.
func newBookStore(t *testing.T, add func(l *bookLog)) *bookStore {
	t.Helper()
	k := &bookStore{dir: t.TempDir(), log: newBookLog()}
	var err error
	if k.config, err = Keygen(KeygenOptions{Store: k.dir, File: filepath.Join(t.TempDir(), "key"), Origin: "example.org/log"}); err != nil {
		t.Fatal(err)
	}
	k.more(t, add)
	return k
}

// more appends events, and makes a head with an audit.sealed of them.
func (k *bookStore) more(t *testing.T, add func(l *bookLog)) {
	t.Helper()
	before := len(k.log.messages)
	n := 0
	keeper, err := Open(t.Context(), Options{Store: k.dir, Log: k.log, Logger: slog.New(slog.DiscardHandler), Stamp: func() events.Stamp {
		n++
		return events.Stamp{ID: fmt.Sprintf("sealed-%d-%d", before, n), Source: "test", Time: time.Unix(1700000000, 0)}
	}})
	if err != nil {
		t.Fatal(err)
	}
	add(k.log)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		keeper.Keep(ctx)
	}()
	defer func() { cancel(); <-done }()
	wait, end := context.WithTimeout(t.Context(), time.Minute)
	defer end()
	last, err := k.log.Last(wait)
	if err != nil {
		t.Fatal(err)
	}
	b := k.book(t)
	for covered := int64(0); covered < int64(last); { //nolint:gosec // small
		_, h, err := b.Want(wait)
		if err != nil {
			t.Fatal(err)
		}
		_, s, err := b.lastSealed(wait, h)
		if err != nil {
			t.Fatal(err)
		}
		covered = s.Size
	}
}

func (k *bookStore) book(t *testing.T) *Book {
	t.Helper()
	b, err := OpenBook(k.dir, k.log)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func (k *bookStore) policy(t *testing.T) audit.Policy {
	t.Helper()
	p, err := audit.ParsePolicy("log " + k.config.Key + "\nquorum none\n")
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func (k *bookStore) path(name string) string { return filepath.Join(k.dir, dirName, name) }

func (k *bookStore) edit(t *testing.T, name string, change func([]byte) []byte) {
	t.Helper()
	text, err := os.ReadFile(k.path(name))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(k.path(name), change(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func hasFinding(t *testing.T, v VerifiedLog, what string) {
	t.Helper()
	if !slices.ContainsFunc(v.Findings, func(f Finding) bool { return strings.Contains(f.Problem, what) }) {
		t.Errorf("findings %v, want one with %q", v.Findings, what)
	}
}

// TestVerifyReplacedKey rewrites a log, and puts a new key, head and configuration into the
// store: a verifier with the policy of before finds it, the store's own word does not.
func TestVerifyReplacedKey(t *testing.T) {
	k := newBookStore(t, func(l *bookLog) { l.iterations("one", 20) })
	p := k.policy(t)
	b := k.book(t)
	b.Accept(p, true)
	if v, err := b.Verify(t.Context(), nil); err != nil || len(v.Findings) > 0 || v.Sealed < 1 {
		t.Fatalf("%+v, %v", v, err)
	}
	b.Accept(p, false)
	if _, err := b.Verify(t.Context(), nil); !errors.Is(err, audit.ErrPolicy) {
		t.Errorf("a policy without witnesses: %v, want %v", err, audit.ErrPolicy)
	}
	forged := newBookStore(t, func(l *bookLog) { l.iterations("one", 10); l.iterations("two", 10) })
	b = forged.book(t)
	if v, err := b.Verify(t.Context(), nil); err != nil || len(v.Findings) > 0 {
		t.Errorf("by the store's own key: %+v, %v", v, err)
	}
	b.Accept(p, true)
	if _, err := b.Verify(t.Context(), nil); !errors.Is(err, audit.ErrTampered) {
		t.Errorf("by the policy of before: %v, want %v", err, audit.ErrTampered)
	}
	// The store's own policy is the key and the witnesses of its configuration.
	own, err := b.OwnPolicy()
	if err != nil || len(own.Logs) != 1 || own.Logs[0].KeyHash() == p.Logs[0].KeyHash() {
		t.Errorf("%+v, %v", own, err)
	}
}

// TestVerifyHeads: each listed head is compared with the log, and the newest must be listed.
func TestVerifyHeads(t *testing.T) {
	k := newBookStore(t, func(l *bookLog) { l.iterations("one", 20) })
	k.more(t, func(l *bookLog) { l.iterations("one", 20) })
	verify := func() VerifiedLog {
		v, err := k.book(t).Verify(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	if v := verify(); len(v.Findings) > 0 {
		t.Fatalf("%+v", v)
	}
	had, err := os.ReadFile(k.path(headsName))
	if err != nil {
		t.Fatal(err)
	}
	// A head of another history, which this or another store has published before.
	line, err := json.Marshal(headLine{Size: 5, Root: tlog.RecordHash([]byte("another history"))})
	if err != nil {
		t.Fatal(err)
	}
	k.edit(t, headsName, func(text []byte) []byte { return append(append(line, '\n'), text...) })
	hasFinding(t, verify(), "lists the root "+tlog.RecordHash([]byte("another history")).String()+" at size 5")
	// Two heads of one size.
	k.edit(t, headsName, func([]byte) []byte {
		first, _, _ := bytes.Cut(had, []byte("\n"))
		var l headLine
		if err := json.Unmarshal(first, &l); err != nil {
			t.Fatal(err)
		}
		l.Root = tlog.RecordHash([]byte("fork"))
		second, err := json.Marshal(l)
		if err != nil {
			t.Fatal(err)
		}
		return append(append(second, '\n'), had...)
	})
	hasFinding(t, verify(), "two heads of size")
	// A newest head that is not listed.
	k.edit(t, headsName, func([]byte) []byte { return nil })
	hasFinding(t, verify(), "does not list the newest head")
	if err := os.Remove(k.path(headsName)); err != nil {
		t.Fatal(err)
	}
	hasFinding(t, verify(), "does not list the newest head")
	// A line that was cut off by a crash is none.
	k.put(t, headsName, append([]byte("{\"size\":3,\n"), had...))
	if v := verify(); len(v.Findings) > 0 {
		t.Errorf("%+v", v)
	}
}

func (k *bookStore) put(t *testing.T, name string, text []byte) {
	t.Helper()
	if err := os.WriteFile(k.path(name), text, 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestExportRange exports runs with the content of some of their events, from a log that has
// other runs between them: the bundles verify, and the log is read once for each bundle of
// entries at most, and not where nothing of the run is.
func TestExportRange(t *testing.T) {
	k := newBookStore(t, func(l *bookLog) {
		l.iterations("one", 300)
		l.iterations("two", 600)
		for range 100 {
			l.iterations("one", 1)
			l.iterations("two", 1)
		}
	})
	p := k.policy(t)
	for _, c := range []struct {
		run                     string
		from, until             uint64
		events, messages, walks int
		read                    int
	}{
		{"one", 1, 0, 400, 400, 4, 300 + 200}, // in the bundles 0, 1, 3 and 4
		{"one", 100, 110, 400, 11, 1, 11},
		{"one", 250, 905, 400, 51 + 3, 3, 51 + 5},
		{"one", 301, 900, 400, 0, 0, 0},
		{"two", 301, 310, 700, 10, 1, 10},
	} {
		b := k.book(t)
		var out bytes.Buffer
		if err := b.Export(t.Context(), ExportOptions{Run: c.run, From: 1, Until: 1}, io.Discard); err != nil {
			t.Fatal(err) // the entries behind the last full bundle are kept from now on
		}
		k.log.walks, k.log.read = 0, 0
		if err := b.Export(t.Context(), ExportOptions{Run: c.run, From: c.from, Until: c.until}, &out); err != nil {
			t.Fatal(err)
		}
		walks, read := k.log.walks-2, k.log.read-2 // two read audit.sealed
		v, err := audit.VerifyBundle(bytes.NewReader(out.Bytes()), p, true, nil)
		if err != nil || v.Events != c.events || v.Messages != c.messages {
			t.Errorf("%s from %d to %d: %+v, %v", c.run, c.from, c.until, v, err)
		}
		if walks > c.walks || read > c.read {
			t.Errorf("%s from %d to %d: %d walks of %d events, want at most %d of %d", c.run, c.from, c.until, walks, read, c.walks, c.read)
		}
	}
	b := k.book(t)
	for _, o := range []ExportOptions{{Run: "one", From: 10, Until: 9}, {Run: "one", From: 5000}, {Run: "three"}} {
		if err := b.Export(t.Context(), o, io.Discard); err == nil || !strings.Contains(err.Error(), "audit checkpoint") {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

// TestProveLarge: what audit prove writes, audit verify reads, of the largest event, too.
func TestProveLarge(t *testing.T) {
	k := newBookStore(t, func(l *bookLog) {
		l.add(events.Message{Subject: "ckpt.one.main.r0.report.metrics", Header: map[string][]string{events.HeaderID: {"large"}}, Data: bytes.Repeat([]byte("x"), 1<<20)})
	})
	proof, err := k.book(t).Prove(t.Context(), 1, nil)
	if err != nil {
		t.Fatal(err)
	}
	if e, err := audit.VerifyProof(proof, k.policy(t), true, nil); err != nil || len(e.Message.Data) != 1<<20 {
		t.Errorf("%d bytes, %v", len(e.Message.Data), err)
	}
}

// TestRemember: entries that are folded after a reader has replaced the kept ones are never
// taken for others.
func TestRemember(t *testing.T) {
	k := newBookStore(t, func(l *bookLog) { l.iterations("one", 300) })
	entry := func(b *Book, sequence uint64) []byte {
		e, _, err := b.entry(k.log.messages[sequence-1], sequence, time.Unix(1700000000, int64(sequence))) //nolint:gosec // small
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	want, err := k.book(t).entries(t.Context(), 1, 10)
	if err != nil {
		t.Fatal(err)
	}
	b := k.book(t)
	b.remember(256, 257, entry(b, 257))
	b.from, b.tail = 0, nil // a reader reads another bundle
	for sequence := uint64(258); sequence < 270; sequence++ {
		b.remember(256, sequence, entry(b, sequence))
	}
	got, err := b.entries(t.Context(), 1, 10)
	if err != nil || !slices.EqualFunc(got, want, bytes.Equal) {
		t.Errorf("entries of another place, %v", err)
	}
	// From then on it continues.
	b.remember(256, 267, entry(b, 267))
	b.remember(256, 267, entry(b, 267))
	if len(b.tail) != 11 {
		t.Errorf("%d entries are kept, want 11", len(b.tail))
	}
}

// TestTilesNeedNoSalts: full tiles are answered without the file of salts, which has a line for each run.
func TestTilesNeedNoSalts(t *testing.T) {
	k := newBookStore(t, func(l *bookLog) { l.iterations("one", 600) })
	if err := errors.Join(os.Remove(k.path(saltsName)), os.Mkdir(k.path(saltsName), 0o700)); err != nil {
		t.Fatal(err)
	}
	var failed []error
	handler := k.book(t).Handler(func(err error) { failed = append(failed, err) })
	for path, want := range map[string]int{"/checkpoint": 200, "/tile/0/000": 200, "/tile/entries/001": 200, "/tile/entries/002.p/9": 500} {
		rec := httptest.NewRecorder()
		handler.ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil))
		if rec.Code != want {
			t.Errorf("%s: %d, want %d: %v", path, rec.Code, want, failed)
		}
	}
}

// TestTileServer reads a log as other people's verifiers do, and with paths that are none.
func TestTileServer(t *testing.T) {
	k := newBookStore(t, func(l *bookLog) { l.iterations("one", 600) })
	var failed []error
	handler := k.book(t).Handler(func(err error) { failed = append(failed, err) })
	get := func(method, path string) *http.Response {
		rec := httptest.NewRecorder()
		handler.ServeHTTP(rec, httptest.NewRequestWithContext(t.Context(), method, path, nil))
		return rec.Result()
	}
	body := func(path string) []byte {
		t.Helper()
		r := get(http.MethodGet, path)
		text, err := io.ReadAll(r.Body)
		if err != nil || r.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s, %v", path, r.Status, err)
		}
		return text
	}
	v, err := note.NewVerifier(k.config.Key)
	if err != nil {
		t.Fatal(err)
	}
	h, err := audit.OpenHead(body("/checkpoint"), v)
	if err != nil || h.Size < 601 || h.Size > 610 {
		t.Fatalf("%v, %v", h, err)
	}
	// All hashes of the tree, from the tiles alone.
	read := tlog.TileHashReader(h.Tree(), tilesBy{body})
	for n := int64(0); n*audit.TileWidth < h.Size; n++ {
		width := int(min(audit.TileWidth, h.Size-n*audit.TileWidth))
		rest := body("/" + audit.TilePath(audit.Entries, n, width))
		for i := range int64(width) {
			var entry []byte
			if entry, rest, err = audit.CutBundle(rest); err != nil {
				t.Fatal(err)
			}
			got, err := read.ReadHashes([]int64{tlog.StoredHashIndex(0, n*audit.TileWidth+i)})
			if err != nil || got[0] != audit.EntryHash(entry) {
				t.Fatalf("entry %d is not that of its tile: %v", n*audit.TileWidth+i, err)
			}
		}
		if len(rest) > 0 {
			t.Errorf("bundle %d has %d bytes more", n, len(rest))
		}
	}
	if r := get(http.MethodHead, "/tile/0/000"); r.StatusCode != http.StatusOK || !strings.Contains(r.Header.Get("Cache-Control"), "immutable") {
		t.Errorf("HEAD: %s, %v", r.Status, r.Header)
	}
	if r := get(http.MethodGet, "/checkpoint"); r.Header.Get("Cache-Control") != "no-cache" {
		t.Errorf("the head may be cached: %v", r.Header)
	}
	for path, status := range map[string]int{
		"/": 404, "/tile/0/003": 404, "/tile/0/002": 404, "/tile/0/002.p/99": 404, "/tile/1/000.p/3": 404, "/tile/2/000.p/1": 404, "/tile/7/000": 404,
		"/tile/8/000": 404, "/tile/entries/002.p/99": 404, "/salts": 404, "/tile/../salts": 404, "//checkpoint": 404, "/tile/0/x036/x028/x797/x018/x963/968": 404,
		"/tile/0/x001/x000/000.p/255": 404,
	} {
		if r := get(http.MethodGet, path); r.StatusCode != status {
			t.Errorf("%s: %s, want %d", path, r.Status, status)
		}
	}
	if r := get(http.MethodPost, "/checkpoint"); r.StatusCode != http.StatusMethodNotAllowed || r.Header.Get("Allow") != "GET, HEAD" {
		t.Errorf("POST: %s, %v", r.Status, r.Header)
	}
	if len(failed) > 0 {
		t.Errorf("errors %v", failed)
	}
	// Damage is reported here. The client is shown no name of a file.
	k.edit(t, "tile/0/000", func(text []byte) []byte { return text[:100] })
	r := get(http.MethodGet, "/tile/0/000")
	text, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != http.StatusInternalServerError || bytes.Contains(text, []byte("tile")) || bytes.Contains(text, []byte(k.dir)) {
		t.Errorf("a damaged tile: %s %q, %v", r.Status, text, err)
	}
	if len(failed) != 1 || !errors.Is(failed[0], ErrDamaged) {
		t.Errorf("errors %v", failed)
	}
	k.edit(t, checkpointName, func(text []byte) []byte { return bytes.Replace(text, []byte("log\n60"), []byte("log\n70"), 1) })
	if r := get(http.MethodGet, "/checkpoint"); r.StatusCode != http.StatusInternalServerError {
		t.Errorf("a forged head: %s", r.Status)
	}
	if len(failed) != 2 || !errors.Is(failed[1], audit.ErrTampered) {
		t.Errorf("errors %v", failed)
	}
	if err := os.Remove(k.path(checkpointName)); err != nil {
		t.Fatal(err)
	}
	if r := get(http.MethodGet, "/checkpoint"); r.StatusCode != http.StatusNotFound {
		t.Errorf("no head: %s", r.Status)
	}
}

// tilesBy reads tiles from a server.
type tilesBy struct{ body func(path string) []byte }

func (tilesBy) Height() int { return audit.TileHeight }

func (s tilesBy) ReadTiles(list []tlog.Tile) (out [][]byte, err error) {
	for _, x := range list {
		out = append(out, s.body("/"+audit.TilePath(x.L, x.N, x.W)))
	}
	return out, nil
}

func (tilesBy) SaveTiles([]tlog.Tile, [][]byte) {}
