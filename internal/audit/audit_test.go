package audit_test

import (
	"bytes"
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
	"pgregory.net/rapid"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
)

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	want, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) && os.Getenv("CKPTSTORE_NEW_GOLDEN") == "1" {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil { //nolint:gosec // testdata
			t.Fatal(err)
		}
		return
	}
	if err != nil || string(want) != got {
		t.Errorf("%s: got\n%s\nwant (%v)\n%s", name, got, err, want)
	}
}

func message() (events.Message, time.Time) {
	return events.Message{
		Subject: "ckpt.bert.main.s.checkpoint.committed",
		Header: map[string][]string{
			"ce-id": {"0195-a"}, "ce-type": {"ckpt.checkpoint.committed.v1"}, "Nats-Msg-Id": {"0195-a"},
			"Nats-Expected-Last-Subject-Sequence": {"4"}, "Nats-Batch-Id": {"x"}, "ckpt-actor": {"uid:7"},
		},
		Data: []byte(`{"checkpoint":"step-1.a1"}`),
	}, time.Unix(1700000000, 123456789)
}

// TestSalter compares salts, in any order, with those of the library's HKDF.
func TestSalter(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		key := rapid.SliceOfN(rapid.Byte(), 32, 32).Draw(t, "key")
		salts, err := audit.NewSalter(key)
		if err != nil {
			t.Fatal(err)
		}
		for _, sequence := range rapid.SliceOfN(rapid.Uint64(), 1, 5).Draw(t, "sequences") {
			info := binary.BigEndian.AppendUint64([]byte("ckptstore-salt/v1\x00"), sequence)
			want, err := hkdf.Key(sha256.New, key, nil, string(info), sha256.Size)
			if err != nil {
				t.Fatal(err)
			}
			if got := salts.Of(sequence); !bytes.Equal(got[:], want) {
				t.Fatalf("event %d: %x, want %x", sequence, got, want)
			}
		}
	})
}

// BenchmarkFold measures what the evidence adds to an event: salt, entry, hashes.
func BenchmarkFold(b *testing.B) {
	f, err := events.NewFact(events.Stamp{ID: "01936b2e-8f3a-7c41-9d52-6e0b3a7c1f84", Source: "trainer/job", Time: time.Unix(1700000000, 123456789)},
		events.Scope{Run: "run", Trial: "main", Actor: events.Rank(7)}, &events.Metrics{
			Attempt: 1, Iteration: 1000, Step: 1000, Seconds: 0.25,
			Metrics: map[string]any{"loss": 0.123456789, "lr": 0.001, "grad_norm": 1.5},
		})
	if err != nil {
		b.Fatal(err)
	}
	m := events.Encode(f.Event)
	salts, err := audit.NewSalter(make([]byte, 32))
	if err != nil {
		b.Fatal(err)
	}
	at := time.Unix(1700000000, 123456789)
	full := func(int, int64, []byte) error { return nil }
	b.Run("salt", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			salts.Of(7)
		}
	})
	b.Run("entry", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			audit.Entry(m, 7, at, audit.Salt{})
		}
	})
	b.Run("all", func(b *testing.B) {
		var tree audit.Tree
		var runs audit.Runs
		b.ReportAllocs()
		for b.Loop() {
			sequence := uint64(tree.Size) + 1 //nolint:gosec // not negative
			hash := audit.EntryHash(audit.Entry(m, sequence, at, salts.Of(sequence)))
			if err := tree.Append(hash, full); err != nil {
				b.Fatal(err)
			}
			runs.Add(m.Subject, sequence, hash)
		}
	})
}

// TestEntry compares an entry with its golden form and with one composed by hand from
// the definition.
func TestEntry(t *testing.T) {
	m, at := message()
	salts, err := audit.NewSalter(make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	salt := salts.Of(7)
	entry := audit.Entry(m, 7, at, salt)
	golden(t, "entry.hex", hex.Dump(entry))

	var headers strings.Builder
	for _, part := range []string{
		"Nats-Expected-Last-Subject-Sequence", "4", "Nats-Msg-Id", "0195-a", "ce-id", "0195-a",
		"ce-type", "ckpt.checkpoint.committed.v1", "ckpt-actor", "uid:7",
	} {
		headers.WriteString("\x00\x00\x00" + string(rune(len(part))) + part)
	}
	h := sha256.Sum256([]byte(headers.String()))
	c := sha256.Sum256(append(salt[:], m.Data...))
	want := "ckptstore-entry/v1\x00" + "\x00\x00\x00\x00\x00\x00\x00\x07" + "\x17\x97\x9c\xfe\x3d\x85\xcd\x15" +
		"\x00\x25" + m.Subject + "\x06" + "0195-a" + string(h[:]) + "\x00\x00\x00\x1a" + string(c[:])
	if string(entry) != want {
		t.Errorf("entry\n%swant\n%s", hex.Dump(entry), hex.Dump([]byte(want)))
	}
	leaf, err := audit.ParseEntry(entry)
	if err != nil || leaf.Sequence != 7 || leaf.Subject != m.Subject || leaf.ID != "0195-a" || !leaf.Stored.Equal(at) || int(leaf.Length) != len(m.Data) {
		t.Errorf("parsed: %+v, %v", leaf, err)
	}
	for i := range entry {
		if l, err := audit.ParseEntry(entry[:i]); err == nil {
			t.Errorf("the first %d bytes are an entry: %+v", i, l)
		}
	}
}

// TestEntryBinds changes each bound part of a message, and the parts that a mirror changes.
func TestEntryBinds(t *testing.T) {
	m, at := message()
	had := audit.Entry(m, 7, at, audit.Salt{})
	change := func(name string, same bool, do func(m *events.Message)) {
		m, _ := message()
		do(&m)
		if got := audit.Entry(m, 7, at, audit.Salt{}); (string(got) == string(had)) != same {
			t.Errorf("%s: same %v, want %v", name, !same, same)
		}
	}
	change("body", false, func(m *events.Message) { m.Data[3] ^= 1 })
	change("subject", false, func(m *events.Message) { m.Subject += "x" })
	change("actor", false, func(m *events.Message) { m.Header["ckpt-actor"] = []string{"uid:8"} })
	change("signature", false, func(m *events.Message) { m.Header["ckpt-sig"] = []string{"x"} })
	change("condition", false, func(m *events.Message) { delete(m.Header, "Nats-Expected-Last-Subject-Sequence") })
	change("new attribute", false, func(m *events.Message) { m.Header["ce-subject"] = []string{"x"} })
	change("batch", true, func(m *events.Message) { m.Header["Nats-Batch-Id"] = []string{"y"} })
	change("trace", true, func(m *events.Message) { m.Header["Nats-Trace-Dest"] = []string{"y"} })
	for name, got := range map[string][]byte{
		"sequence": audit.Entry(m, 8, at, audit.Salt{}), "time": audit.Entry(m, 7, at.Add(1), audit.Salt{}), "salt": audit.Entry(m, 7, at, audit.Salt{1}),
	} {
		if string(got) == string(had) {
			t.Errorf("%s is not bound", name)
		}
	}
}

// TestTreeFails lets each write of a full tile fail once, and repeats the call.
func TestTreeFails(t *testing.T) {
	errFull := errors.New("disk full")
	never := func(int, int64, []byte) error { return nil }
	for _, size := range []int64{audit.TileWidth, audit.TileWidth * audit.TileWidth} {
		var clean, tree audit.Tree
		failed := map[string]bool{}
		tiles := map[string]string{}
		for i := range size + 1 {
			h := tlog.RecordHash([]byte{byte(i), byte(i >> 8), byte(i >> 16)})
			if err := clean.Append(h, never); err != nil {
				t.Fatal(err)
			}
			for {
				before := tree.Size
				err := tree.Append(h, func(level int, n int64, tile []byte) error {
					path := audit.TilePath(level, n, audit.TileWidth)
					if had, ok := tiles[path]; ok && had != string(tile) {
						t.Errorf("%s has two contents", path)
					}
					tiles[path] = string(tile)
					if i+1 == size && !failed[path] {
						failed[path] = true
						return errFull
					}
					return nil
				})
				if err == nil {
					break
				}
				if !errors.Is(err, errFull) || tree.Size != before {
					t.Fatalf("at size %d, was %d: %v", tree.Size, before, err)
				}
			}
			if i+1 < size {
				continue
			}
			want, err1 := clean.Root()
			got, err2 := tree.Root()
			if err1 != nil || err2 != nil || got != want {
				t.Errorf("root at %d: %v %v, want %v %v", i+1, got, err2, want, err1)
			}
		}
		if len(failed) == 0 {
			t.Errorf("size %d: nothing failed", size)
		}
	}
}

// TestTreeOfOtherSize: edges that do not fit the size have no root.
func TestTreeOfOtherSize(t *testing.T) {
	for _, tree := range []audit.Tree{
		{Size: 255, Edges: [][]audit.Hash{make([]audit.Hash, 256)}},
		{Size: 256, Edges: [][]audit.Hash{make([]audit.Hash, 256)}},
		{Size: 257, Edges: [][]audit.Hash{make([]audit.Hash, 1)}},
		{Size: 1, Edges: [][]audit.Hash{make([]audit.Hash, 1), make([]audit.Hash, 1)}},
		{Size: 0, Edges: [][]audit.Hash{make([]audit.Hash, 1)}},
		{Size: -1},
		{Size: 3},
	} {
		if root, err := tree.Root(); err == nil {
			t.Errorf("size %d with %d edges has the root %v", tree.Size, len(tree.Edges), root)
		}
	}
}

// TestTree compares the incremental tree and its tiles with package tlog at each size.
func TestTree(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, 3000).Draw(rt, "entries")
		seed := rapid.Byte().Draw(rt, "seed")
		var tree audit.Tree
		var stored []tlog.Hash
		read := tlog.HashReaderFunc(func(at []int64) (out []tlog.Hash, err error) {
			for _, i := range at {
				out = append(out, stored[i])
			}
			return out, nil
		})
		tiles := map[string][]byte{}
		for i := range int64(n) {
			data := fmt.Appendf(nil, "%d/%d", seed, i)
			hashes, err := tlog.StoredHashes(i, data, read)
			if err != nil {
				rt.Fatal(err)
			}
			stored = append(stored, hashes...)
			if err := tree.Append(tlog.RecordHash(data), func(level int, n int64, tile []byte) error {
				tiles[audit.TilePath(level, n, audit.TileWidth)] = tile
				return nil
			}); err != nil {
				rt.Fatal(err)
			}
			if i%97 != 0 && i != int64(n)-1 {
				continue
			}
			want, err := tlog.TreeHash(i+1, read)
			got, err2 := tree.Root()
			if err != nil || err2 != nil || got != want {
				rt.Fatalf("root at %d: %v %v, want %v %v", i+1, got, err2, want, err)
			}
		}
		full := 0
		for _, x := range tlog.NewTiles(audit.TileHeight, 0, int64(n)) {
			if x.W < audit.TileWidth {
				continue
			}
			full++
			want, err := tlog.ReadTileData(x, read)
			if err != nil || string(tiles[audit.TilePath(x.L, x.N, x.W)]) != string(want) {
				rt.Fatalf("tile %v differs: %v", x, err)
			}
		}
		if full != len(tiles) {
			rt.Fatalf("%d tiles, want %d", len(tiles), full)
		}
	})
}

func TestTilePath(t *testing.T) {
	for _, c := range []struct {
		level int
		n     int64
		width int
		path  string
	}{
		{0, 0, 256, "tile/0/000"},
		{audit.Entries, 1234067, 256, "tile/entries/x001/x234/067"},
		{2, 1000, 5, "tile/2/x001/000.p/5"},
		{0, 1 << 46, 256, "tile/0/x070/x368/x744/x177/664"},
	} {
		if got := audit.TilePath(c.level, c.n, c.width); got != c.path {
			t.Errorf("path %s, want %s", got, c.path)
		}
		level, n, width, err := audit.ParseTilePath(c.path)
		if err != nil || level != c.level || n != c.n || width != c.width {
			t.Errorf("%s: %d %d %d %v", c.path, level, n, width, err)
		}
	}
	for _, path := range []string{
		"", "tile/0", "tile/00/000", "tile/0/0", "tile/0/x000/000", "tile/0/000.p/256", "tile/0/000.p/0", "tile/-1/000", "tile/0/../000", "tile/0/+01", "tile/entries/x070/x368/x744/x177/665",
		"tile/0/x036/x028/x797/x018/x963/968", "tile/entries/x036/x028/x797/x018/x963/967.p/255", "tile/0/x9223372036854775807/000", "tile/0/x999/x999/x999/x999/x999/999",
	} {
		if _, _, _, err := audit.ParseTilePath(path); err == nil {
			t.Errorf("%s was accepted", path)
		}
	}
}

// TestRuns checks that the proof of a run's rows shows exactly its trials, and that each
// omission from it is found.
func TestRuns(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		m := audit.Runs{}
		names := rapid.SliceOfN(rapid.StringMatching(`[a-e]`), 1, 40).Draw(rt, "runs")
		for i, name := range names {
			m.Add("ckpt."+name+"."+rapid.StringMatching(`[x-z]`).Draw(rt, "trial")+".s.x.y", uint64(i+1), tlog.RecordHash([]byte{byte(i)}))
		}
		rows := m.Rows()
		root, err := audit.RowsRoot(rows)
		if err != nil {
			rt.Fatal(err)
		}
		run := rapid.StringMatching(`[a-f]`).Draw(rt, "run")
		placed, err := audit.ProveRun(rows, run)
		if err != nil {
			rt.Fatal(err)
		}
		own, err := audit.CheckRun(placed, run, int64(len(rows)), root)
		if err != nil {
			rt.Fatal(err)
		}
		var want []audit.Row
		for _, r := range rows {
			if r.Run == run {
				want = append(want, r)
			}
		}
		if !slices.Equal(own, want) {
			rt.Fatalf("rows %v, want %v", own, want)
		}
		for i := range placed {
			less := slices.Delete(slices.Clone(placed), i, i+1)
			_, err := audit.CheckRun(less, run, int64(len(rows)), root)
			if err == nil {
				rt.Fatalf("without row %d of %v it passes", i, placed)
			}
			more := slices.Clone(placed)
			more[i].Count++
			if _, err := audit.CheckRun(more, run, int64(len(rows)), root); !errors.Is(err, audit.ErrTampered) {
				rt.Fatalf("a changed row: %v", err)
			}
		}
	})
}

func TestHead(t *testing.T) {
	skey, vkey, err := note.GenerateKey(zeros{}, "example.org/log")
	if err != nil {
		t.Fatal(err)
	}
	signer, err := note.NewSigner(skey)
	if err != nil {
		t.Fatal(err)
	}
	h := audit.Head{Origin: "example.org/log", Size: 7, Root: tlog.RecordHash([]byte("x"))}
	signed, err := audit.Sign(h, signer)
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "head.txt", string(signed))
	p, err := audit.ParsePolicy("log " + vkey + "\nquorum none\n")
	if err != nil {
		t.Fatal(err)
	}
	if got, err := p.Open(signed, true); err != nil || got != h {
		t.Errorf("head %v, %v", got, err)
	}
	if _, err := p.Open(signed, false); !errors.Is(err, audit.ErrPolicy) {
		t.Errorf("a head without cosignature: %v, want %v", err, audit.ErrPolicy)
	}
	for i := range signed {
		flipped := slices.Clone(signed)
		flipped[i] ^= 1
		if _, err := p.Open(flipped, true); err == nil {
			t.Errorf("a flip of byte %d passes", i)
		}
	}
	for _, text := range []string{h.Text() + "extension\n", strings.Replace(h.Text(), "7", "07", 1), "\n7\n" + h.Text()[18:]} {
		if got, err := audit.ParseHead(text); err == nil {
			t.Errorf("%q is a head: %v", text, got)
		}
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// TestSealedForm: the schema of the decision has not changed under the parser.
func TestSealedForm(t *testing.T) {
	body, err := json.Marshal(events.AuditSealed{Size: 3, Root: strings.Repeat("0a", 32), Rows: 2, Runs: strings.Repeat("0b", 32), Key: "k"})
	if err != nil {
		t.Fatal(err)
	}
	m := events.Message{Subject: "ckpt._._.s.audit.sealed", Data: body}
	s, err := audit.ParseSealed(m, 4)
	if err != nil || s.Size != 3 || s.Rows != 2 || s.Root[0] != 0x0a || s.Runs[31] != 0x0b {
		t.Errorf("%+v, %v", s, err)
	}
	if _, err := audit.ParseSealed(m, 3); !errors.Is(err, audit.ErrTampered) {
		t.Errorf("a decision about its own sequence: %v", err)
	}
}
