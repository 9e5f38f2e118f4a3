package audit_test

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/zeebo/blake3"
	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// smallLog is a log in memory with an audit.sealed at its end and a signed head.
type smallLog struct {
	t       *testing.T
	vkey    string
	signed  []byte
	head    audit.Head
	items   []audit.Item // with content and proof
	rows    []audit.Row
	content []byte // kept aside of event 3
}

func newKey(t *testing.T, name string, seed byte) (note.Signer, string) {
	t.Helper()
	skey, vkey, err := note.GenerateKey(bytes.NewReader(bytes.Repeat([]byte{seed}, 64)), name)
	if err != nil {
		t.Fatal(err)
	}
	signer, err := note.NewSigner(skey)
	if err != nil {
		t.Fatal(err)
	}
	return signer, vkey
}

// newSmallLog has the events 2 to 6 of run bert, in two trials, and further ones. The body
// of the last event of bert has a length.
func newSmallLog(t *testing.T, length int) *smallLog {
	t.Helper()
	signer, vkey := newKey(t, "example.org/log", 0)
	l := &smallLog{t: t, vkey: vkey, content: []byte("a plan kept aside")}
	digest := blake3.Sum256(l.content)
	messages := []events.Message{
		{Subject: "ckpt._._.s.store.created", Data: []byte(`{}`)},
		{Subject: "ckpt.bert.main.s.trial.created", Data: []byte(`{"config":{"lr":1}}`)},
		{Subject: "ckpt.bert.main.r0.plan.local", Data: fmt.Appendf(nil, `{"plan":{"digest":%q,"size":%d}}`, hex.EncodeToString(digest[:]), len(l.content))},
		{Subject: "ckpt.plan.main.s.trial.created", Data: []byte(`{"plan":{"digest":"no claim: the run is named plan"}}`)},
		{Subject: "ckpt.bert.other.s.trial.created", Data: []byte(`{}`)},
		{Subject: "ckpt.bert.main.s.trial.completed", Data: bytes.Repeat([]byte("x"), length), Header: map[string][]string{"Nats-Batch-Id": {"b"}, "ce-more": {"b", "a"}}},
	}
	var tree audit.Tree
	var stored []tlog.Hash
	read := tlog.HashReaderFunc(func(at []int64) (out []tlog.Hash, err error) {
		for _, i := range at {
			out = append(out, stored[i])
		}
		return out, nil
	})
	runs := audit.Runs{}
	add := func(m events.Message) {
		sequence := uint64(len(l.items) + 1)
		if m.Header == nil {
			m.Header = map[string][]string{}
		}
		m.Header[events.HeaderID] = []string{fmt.Sprint("id-", sequence)}
		salts, err := audit.NewSalter(make([]byte, 32))
		if err != nil {
			t.Fatal(err)
		}
		salt := salts.Of(sequence)
		entry := audit.Entry(m, sequence, time.Unix(1700000000, 0), salt)
		hashes, err := tlog.StoredHashes(int64(len(l.items)), entry, read)
		if err != nil {
			t.Fatal(err)
		}
		stored = append(stored, hashes...)
		if err := tree.Append(audit.EntryHash(entry), nil); err != nil {
			t.Fatal(err)
		}
		runs.Add(m.Subject, sequence, audit.EntryHash(entry))
		l.items = append(l.items, audit.NewItem(m, entry, salt))
	}
	for _, m := range messages {
		add(m)
	}
	l.rows = runs.Rows()
	root, err := tree.Root()
	if err != nil {
		t.Fatal(err)
	}
	rowsRoot, err := audit.RowsRoot(l.rows)
	if err != nil {
		t.Fatal(err)
	}
	body, err := json.Marshal(events.AuditSealed{Size: uint64(tree.Size), Root: hex.EncodeToString(root[:]), Rows: uint64(len(l.rows)), Runs: hex.EncodeToString(rowsRoot[:]), Key: vkey})
	if err != nil {
		t.Fatal(err)
	}
	add(events.Message{Subject: "ckpt._._.s.audit.sealed", Data: body})
	if root, err = tree.Root(); err != nil {
		t.Fatal(err)
	}
	l.head = audit.Head{Origin: "example.org/log", Size: tree.Size, Root: root}
	if l.signed, err = audit.Sign(l.head, signer); err != nil {
		t.Fatal(err)
	}
	for i := range l.items {
		if l.items[i].Proof, err = tlog.ProveRecord(tree.Size, int64(i), read); err != nil {
			t.Fatal(err)
		}
	}
	l.items[2].Blob = l.content
	return l
}

func (l *smallLog) policy() audit.Policy {
	l.t.Helper()
	p, err := audit.ParsePolicy("log " + l.vkey + "\nquorum none\n")
	if err != nil {
		l.t.Fatal(err)
	}
	return p
}

// bundle returns the head and the items of a bundle about a run, with the content of events
// from one to another.
func (l *smallLog) bundle(run string, from, until uint64) (audit.BundleHead, []audit.Item) {
	l.t.Helper()
	placed, err := audit.ProveRun(l.rows, run)
	if err != nil {
		l.t.Fatal(err)
	}
	head := audit.BundleHead{Format: audit.BundleFormat, Run: run, From: from, Until: until, Checkpoint: string(l.signed), Sealed: l.items[len(l.items)-1], Rows: placed}
	var items []audit.Item
	for i, it := range l.items[:len(l.items)-1] {
		leaf, err := audit.ParseEntry(it.Entry)
		if err != nil {
			l.t.Fatal(err)
		}
		if of, _ := audit.Trial(leaf.Subject); of != run {
			continue
		}
		if sequence := uint64(i + 1); sequence < from || sequence > until {
			it = audit.Item{Entry: it.Entry}
		}
		items = append(items, it)
	}
	head.Items = len(items)
	return head, items
}

func (l *smallLog) text(head audit.BundleHead, items []audit.Item) []byte {
	l.t.Helper()
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	if err := enc.Encode(head); err != nil {
		l.t.Fatal(err)
	}
	for _, it := range items {
		if err := enc.Encode(it); err != nil {
			l.t.Fatal(err)
		}
	}
	return out.Bytes()
}

func (l *smallLog) verify(text []byte) (audit.Verified, error) {
	return audit.VerifyBundle(bytes.NewReader(text), l.policy(), true, nil)
}

// TestForgedBundle: a bundle with anything that nothing proves is refused.
func TestForgedBundle(t *testing.T) {
	l := newSmallLog(t, 20)
	good, items := l.bundle("bert", 3, 5)
	got, err := l.verify(l.text(good, items))
	if err != nil || got.Events != 4 || got.Messages != 2 || got.Blobs != 1 || got.Trials != 2 || got.Complete != 6 {
		t.Fatalf("a good bundle: %+v, %v", got, err)
	}
	whole, all := l.bundle("bert", 1, 6)
	if got, err := l.verify(l.text(whole, all)); err != nil || got.Messages != 4 {
		t.Fatalf("a whole bundle: %+v, %v", got, err)
	}
	message := func(it *audit.Item) *audit.Content {
		m := *it.Message
		m.Header = map[string][]string{}
		for name, values := range it.Message.Header {
			m.Header[name] = slices.Clone(values)
		}
		it.Message = &m
		return &m
	}
	last := len(items) - 1
	for _, c := range []struct {
		name   string
		whole  bool
		want   error
		change func(h *audit.BundleHead, items []audit.Item) (more string)
	}{
		{"forged message outside the range", false, audit.ErrTampered, func(_ *audit.BundleHead, items []audit.Item) string {
			items[last].Message = &audit.Content{Subject: "ckpt.bert.main.s.trial.completed", Header: map[string][]string{}, Body: []byte("forged")}
			return ""
		}},
		{"true message outside the range", false, audit.ErrTampered, func(_ *audit.BundleHead, items []audit.Item) string {
			items[last] = all[last]
			return ""
		}},
		{"salt outside the range", false, audit.ErrTampered, func(_ *audit.BundleHead, items []audit.Item) string {
			items[last].Salt = []byte("salt")
			return ""
		}},
		{"content kept aside outside the range", false, audit.ErrTampered, func(_ *audit.BundleHead, items []audit.Item) string {
			items[last].Blob = []byte("forged")
			return ""
		}},
		{"content kept aside that no body names", true, audit.ErrTampered, func(_ *audit.BundleHead, items []audit.Item) string {
			items[0].Blob = []byte("forged")
			return ""
		}},
		{"other content kept aside", true, audit.ErrTampered, func(_ *audit.BundleHead, items []audit.Item) string {
			items[1].Blob = []byte("forged")
			return ""
		}},
		{"no content kept aside", true, audit.ErrMissingEvent, func(_ *audit.BundleHead, items []audit.Item) string {
			items[1].Blob = nil
			return ""
		}},
		{"content kept aside of audit.sealed", true, audit.ErrTampered, func(h *audit.BundleHead, _ []audit.Item) string {
			h.Sealed.Blob = []byte("forged")
			return ""
		}},
		{"header without values", true, audit.ErrTampered, func(_ *audit.BundleHead, items []audit.Item) string {
			message(&items[0]).Header["ce-forged"] = []string{}
			return ""
		}},
		{"header that is not bound", true, audit.ErrTampered, func(_ *audit.BundleHead, items []audit.Item) string {
			message(&items[0]).Header["Nats-Batch-Id"] = []string{"x"}
			return ""
		}},
		{"another order of values", true, audit.ErrTampered, func(_ *audit.BundleHead, items []audit.Item) string {
			slices.Reverse(message(&items[last]).Header["ce-more"])
			return ""
		}},
		{"another body", true, audit.ErrTampered, func(_ *audit.BundleHead, items []audit.Item) string {
			message(&items[0]).Body = []byte("forged")
			return ""
		}},
		{"no message in the range", true, audit.ErrMissingEvent, func(_ *audit.BundleHead, items []audit.Item) string {
			items[0] = audit.Item{Entry: items[0].Entry}
			return ""
		}},
		{"line after the items", false, audit.ErrTampered, func(*audit.BundleHead, []audit.Item) string { return "{\"note\":\"forged\"}\n" }},
		{"empty line after the items", false, audit.ErrTampered, func(*audit.BundleHead, []audit.Item) string { return "\n" }},
		{"fewer items than named", false, audit.ErrTampered, func(h *audit.BundleHead, _ []audit.Item) string { h.Items++; return "" }},
		{"more items than named", false, audit.ErrMissingEnd, func(h *audit.BundleHead, _ []audit.Item) string { h.Items--; return "" }},
		{"negative number of items", false, audit.ErrTampered, func(h *audit.BundleHead, _ []audit.Item) string { h.Items = -1; return "" }},
		{"range from 0", true, audit.ErrTampered, func(h *audit.BundleHead, _ []audit.Item) string { h.From = 0; return "" }},
		{"range beyond the run map", true, audit.ErrTampered, func(h *audit.BundleHead, _ []audit.Item) string { h.Until = 7; return "" }},
		{"another run", true, audit.ErrTampered, func(h *audit.BundleHead, _ []audit.Item) string { h.Run = "plan"; return "" }},
	} {
		head, list := good, slices.Clone(items)
		if c.whole {
			head, list = whole, slices.Clone(all)
		}
		more := c.change(&head, list)
		if _, err := l.verify(append(l.text(head, list), more...)); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
	// A run that is named like a kind with a content kept aside has none.
	head, list := l.bundle("plan", 1, 6)
	if got, err := l.verify(l.text(head, list)); err != nil || got.Blobs != 0 || got.Events != 1 {
		t.Errorf("a run named plan: %+v, %v", got, err)
	}
}

// TestBundleBytes changes one bit of each byte of a bundle, and cuts it at each: nothing of
// that passes. What has lost its first bytes is no bundle, everything else is a finding.
func TestBundleBytes(t *testing.T) {
	l := newSmallLog(t, 20)
	head, items := l.bundle("bert", 2, 5)
	text := l.text(head, items)
	check := func(what string, i int, text []byte) {
		_, err := l.verify(text)
		want := problem.Findings
		if i < len(`{"format":"ckptstore-bundle/v1",`) {
			want = problem.Invalid
		}
		if err == nil || !slices.Contains(problem.Kinds(err), want) {
			t.Errorf("%s byte %d: %v of kinds %v, want %s", what, i, err, problem.Kinds(err), want)
		}
	}
	for i := range text {
		flipped := slices.Clone(text)
		flipped[i] ^= []byte{1, 4}[i%2]
		check("a flip of", i, flipped)
		check("a cut at", i, text[:i])
	}
}

// TestProof: the proof of one event binds each of its bytes, has no content that nothing
// proves, and may be of an event of any size.
func TestProof(t *testing.T) {
	l := newSmallLog(t, 20)
	prove := func(l *smallLog, i int, change func(it *audit.Item)) []byte {
		it := l.items[i]
		change(&it)
		text, err := audit.MarshalProof(it, int64(i), l.signed, nil)
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	verify := func(l *smallLog, text []byte) (audit.ProvedEvent, error) {
		return audit.VerifyProof(text, l.policy(), true, nil)
	}
	none := func(*audit.Item) {}
	text := prove(l, 1, none)
	if e, err := verify(l, text); err != nil || e.Sequence != 2 {
		t.Fatalf("%+v, %v", e, err)
	}
	for i := range text {
		flipped := slices.Clone(text)
		flipped[i] ^= []byte{1, 4}[i%2]
		want := problem.Findings
		if i < len("c2sp.org/tlog-proof@v1\n") {
			want = problem.Invalid
		}
		for what, bad := range map[string][]byte{"a flip of": flipped, "a cut at": text[:i]} {
			if _, err := verify(l, bad); err == nil || !slices.Contains(problem.Kinds(err), want) {
				t.Errorf("%s byte %d: %v of kinds %v, want %s", what, i, err, problem.Kinds(err), want)
			}
		}
	}
	inside, err := json.Marshal(map[string]audit.Item{"item": l.items[1]})
	if err != nil {
		t.Fatal(err)
	}
	for name, bad := range map[string][]byte{
		"hashes in the extra line":              fmt.Appendf(nil, "c2sp.org/tlog-proof@v1\nextra %s\nindex 1\n\n%s", base64.StdEncoding.EncodeToString(inside), l.signed),
		"content kept aside that no body names": prove(l, 1, func(it *audit.Item) { it.Blob = []byte("forged") }),
		"other content kept aside":              prove(l, 2, func(it *audit.Item) { it.Blob = []byte("forged") }),
		"another entry":                         prove(l, 1, func(it *audit.Item) { it.Entry = l.items[2].Entry }),
		"a line more":                           append(slices.Clone(text), "forged\n"...),
	} {
		if _, err := verify(l, bad); !errors.Is(err, audit.ErrTampered) {
			t.Errorf("%s: %v, want %v", name, err, audit.ErrTampered)
		}
	}
	for _, blob := range [][]byte{nil, l.content} {
		if _, err := verify(l, prove(l, 2, func(it *audit.Item) { it.Blob = blob })); err != nil {
			t.Errorf("with %d bytes kept aside: %v", len(blob), err)
		}
	}
	large := newSmallLog(t, 1<<20)
	if e, err := verify(large, prove(large, 5, none)); err != nil || len(e.Message.Data) != 1<<20 {
		t.Errorf("an event of 1 MiB: %d bytes, %v", len(e.Message.Data), err)
	}
}

// TestTwoLogs: with two logs in a policy, neither can sign heads of the other.
func TestTwoLogs(t *testing.T) {
	a, akey := newKey(t, "example.org/a", 1)
	b, bkey := newKey(t, "example.org/b", 2)
	p, err := audit.ParsePolicy("log " + akey + "\nlog " + bkey + "\nquorum none\n")
	if err != nil {
		t.Fatal(err)
	}
	of := func(origin string, signers ...note.Signer) []byte {
		signed, err := note.Sign(&note.Note{Text: audit.Head{Origin: origin, Size: 3, Root: tlog.RecordHash([]byte("x"))}.Text()}, signers...)
		if err != nil {
			t.Fatal(err)
		}
		return signed
	}
	for _, c := range []struct {
		name   string
		signed []byte
		want   error
	}{
		{"a by a", of("example.org/a", a), nil},
		{"b by b", of("example.org/b", b), nil},
		{"a by both", of("example.org/a", b, a), nil},
		{"a by b", of("example.org/a", b), audit.ErrTampered},
		{"b by a", of("example.org/b", a), audit.ErrTampered},
		{"c by both", of("example.org/c", a, b), audit.ErrTampered},
	} {
		h, err := p.Open(c.signed, true)
		if !errors.Is(err, c.want) || c.want == nil && (h.Size != 3 || !strings.HasPrefix(c.name, h.Origin[len("example.org/"):])) {
			t.Errorf("%s: %v, %v, want %v", c.name, h, err, c.want)
		}
	}
	// A signed text that is no head.
	signed, err := note.Sign(&note.Note{Text: "example.org/a\nno head\n"}, a)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Open(signed, true); !errors.Is(err, audit.ErrTampered) {
		t.Errorf("no head: %v, want %v", err, audit.ErrTampered)
	}
}

// TestSignatureBits: the last character of a signature has bits that do not count. A change
// of them is refused, too.
func TestSignatureBits(t *testing.T) {
	l := newSmallLog(t, 20)
	text := strings.TrimSuffix(string(l.signed), "=\n")
	last := text[len(text)-1]
	const digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
	at := strings.IndexByte(digits, last)
	for i := at &^ 3; i < at&^3+4; i++ {
		_, err := l.policy().Open([]byte(text[:len(text)-1]+digits[i:i+1]+"=\n"), true)
		if (err == nil) != (i == at) || i != at && !errors.Is(err, audit.ErrTampered) {
			t.Errorf("signature that ends with %q in place of %q: %v", digits[i], last, err)
		}
	}
}

// TestLongSubject: an entry fits a bundle of entries whatever its message has.
func TestLongSubject(t *testing.T) {
	m := events.Message{Subject: strings.Repeat("s", 1<<17), Header: map[string][]string{events.HeaderID: {strings.Repeat("i", 255)}}}
	entry := audit.Entry(m, 1, time.Unix(0, 0), audit.Salt{})
	got, rest, err := audit.CutBundle(audit.AppendBundle(nil, entry))
	if err != nil || len(rest) > 0 || !bytes.Equal(got, entry) || len(entry) > 1<<16-1 {
		t.Errorf("an entry of %d bytes: %d, and %d more, %v", len(entry), len(got), len(rest), err)
	}
	if leaf, err := audit.ParseEntry(entry); err != nil || leaf.ID != m.Header[events.HeaderID][0] {
		t.Errorf("%+v, %v", leaf, err)
	}
}
