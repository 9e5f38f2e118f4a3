package ledger

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// forge returns a copy of a store whose log is another one, and whose ledger has only one
// listed head, of that log at a size.
func (k *bookStore) forge(t *testing.T, size int64, messages []events.Message) *bookStore {
	t.Helper()
	forged := &bookStore{dir: t.TempDir(), log: newBookLog(), config: k.config}
	err := os.CopyFS(forged.dir, os.DirFS(k.dir))
	for _, name := range []string{"tile", stateName, headsName} {
		err = errors.Join(err, os.RemoveAll(forged.path(name)))
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range messages {
		forged.log.add(m)
	}
	line, err := json.Marshal(headLine{size, k.rootOf(t, forged.log, size)})
	if err != nil {
		t.Fatal(err)
	}
	forged.put(t, headsName, append(line, '\n'))
	return forged
}

// rootOf returns the root over the first events of a log, with the salts of the store.
func (k *bookStore) rootOf(t *testing.T, log *bookLog, size int64) audit.Hash {
	t.Helper()
	b, tree := k.book(t), audit.Tree{}
	err := log.Walk(t.Context(), 1, uint64(size), func(m events.Message, sequence uint64, stored time.Time) error { //nolint:gosec // not negative
		entry, _, err := b.entry(m, sequence, stored)
		if err != nil {
			return err
		}
		return tree.Append(audit.EntryHash(entry), func(int, int64, []byte) error { return nil })
	})
	if err != nil {
		t.Fatal(err)
	}
	root, err := tree.Root()
	if err != nil {
		t.Fatal(err)
	}
	return root
}

// changed returns the messages of the store's log with another event 101.
func (k *bookStore) changed() []events.Message {
	list := slices.Clone(k.log.messages)
	list[100].Data = []byte(`{"loss":0}`)
	return list
}

// sealedBy returns a message audit.sealed that names a key and quotes a note.
func sealedBy(t *testing.T, key, previous string) events.Message {
	t.Helper()
	d, err := events.NewDecision(events.Stamp{ID: "forged", Source: "test", Time: time.Unix(1, 0)}, events.Aggregate{}, &events.AuditSealed{
		Size: 1, Root: strings.Repeat("0", 64), Rows: 1, Runs: strings.Repeat("0", 64), Key: key, Previous: previous,
	})
	if err != nil {
		t.Fatal(err)
	}
	return events.Encode(d.Event)
}

// newOrigin gives the store a new key and origin, with a witness that knows its key.
func (k *bookStore) newOrigin(t *testing.T) *Witness {
	t.Helper()
	var err error
	if k.config, err = NewOrigin(KeygenOptions{Store: k.dir, File: filepath.Join(t.TempDir(), "key"), Origin: "example.org/log"}, nil); err != nil {
		t.Fatal(err)
	}
	w, key := newWitness(t, "example.org/w", k.config.Key)
	setPolicy(t, k.dir, k.config, "witness w "+key+" "+listen(t, w)+"\nquorum w\n", false)
	if k.config, err = ReadConfig(k.dir); err != nil {
		t.Fatal(err)
	}
	return w
}

// TestForgedBeforeNewKey rewrites the log of a store whose new key has signed nothing yet,
// with listed heads that fit, and with decisions that pretend that the new origin has begun.
// It is refused before a witness is shown anything, and the witness accepts the true log.
func TestForgedBeforeNewKey(t *testing.T) {
	k := newBookStore(t, func(l *bookLog) { l.iterations("one", 600) })
	quoted, old := noteOf(t, k)
	w := k.newOrigin(t)
	begun := k.changed()
	begun[300] = sealedBy(t, k.config.Key, quoted)
	for what, forged := range map[string]*bookStore{
		"heads":     k.forge(t, old.Size, k.changed()),
		"no quote":  k.forge(t, old.Size, append(k.changed(), sealedBy(t, k.config.Key, ""))),
		"beginning": k.forge(t, old.Size, append(k.changed(), sealedBy(t, k.config.Key, quoted))),
		"early":     k.forge(t, old.Size, begun),
	} {
		_, err := tryOpen(t, forged.dir, forged.log)
		wants(t, err, ErrDamaged, "a note of example.org/log has "+old.String())
		files, err := filepath.Glob(filepath.Join(w.dir, "*"))
		if err != nil || len(files) != 1 || filepath.Base(files[0]) != "LOCK" {
			t.Fatalf("%s: the witness holds %v, %v", what, files, err)
		}
	}
	keeper := mustOpen(t, k.dir, k.log)
	if err := head(t, keeper); err != nil {
		t.Fatal(err)
	}
	if v, err := k.book(t).Verify(t.Context(), &old); err != nil || len(v.Findings) > 0 || len(v.Origins) != 1 || !v.Origins[0].Checked {
		t.Errorf("%+v, %v", v, err)
	}
}

// TestBegunWithoutQuote appends a decision of the new key that quotes nothing, or a note of
// another key, before the owner begins the new origin: it still begins it.
func TestBegunWithoutQuote(t *testing.T) {
	for _, previous := range []string{"", string(signedBy(t, newNoteSigner(t, "example.org/log"), audit.Head{Origin: "example.org/log", Size: 1}))} {
		k := newBookStore(t, func(l *bookLog) { l.iterations("one", 20) })
		quoted, old := noteOf(t, k)
		k.newOrigin(t)
		k.log.add(sealedBy(t, k.config.Key, previous))
		n := len(k.log.messages)
		mustOpen(t, k.dir, k.log)
		if len(k.log.messages) != n+1 {
			t.Fatalf("%d decisions follow", len(k.log.messages)-n)
		}
		s, err := audit.ParseSealed(k.log.messages[n], uint64(n)+1) //nolint:gosec // small
		if err != nil || s.Previous != quoted || s.Size <= old.Size {
			t.Errorf("%+v, %v", s, err)
		}
	}
}

// TestOlderNote: of the notes of the old key that lie in the store, each that the log is as
// long as must fit, not only the newest.
func TestOlderNote(t *testing.T) {
	k := newBookStore(t, func(l *bookLog) { l.iterations("one", 300) })
	signed, old := noteOf(t, k)
	k.more(t, func(l *bookLog) { l.iterations("one", 100) })
	later, _ := noteOf(t, k)
	k.newOrigin(t)
	// The log ends between the two notes, and is another one below the first.
	forged := k.forge(t, old.Size, k.changed()[:old.Size+10])
	forged.put(t, checkpointName, []byte(signed))
	forged.put(t, notedName, []byte(later))
	_, err := tryOpen(t, forged.dir, forged.log)
	wants(t, err, ErrDamaged, "a note of example.org/log has "+old.String())
}

// TestPublishedRewritten: a log that was rewritten below the published head is refused, also
// where heads lists a later head that fits, and the key's own head is gone.
func TestPublishedRewritten(t *testing.T) {
	k := newBookStore(t, func(l *bookLog) { l.iterations("one", 300) })
	_, old := noteOf(t, k)
	k.log.iterations("one", 20)
	if err := os.Remove(k.config.Signer + ".head"); err != nil {
		t.Fatal(err)
	}
	forged := k.forge(t, old.Size+20, k.changed())
	_, err := tryOpen(t, forged.dir, forged.log)
	wants(t, err, ErrDamaged, "the published head has "+old.String(), k.rootOf(t, forged.log, old.Size).String())
	same := k.forge(t, old.Size+20, k.log.messages)
	mustOpen(t, same.dir, same.log)
}

// TestAnchoredFirst: a head that an earlier owner has only listed is kept next to the key
// before a witness is shown it.
func TestAnchoredFirst(t *testing.T) {
	dir, c := newLedger(t)
	w, key := newWitness(t, "example.org/w", c.Key)
	log := &tape{}
	log.record(t, 20)
	if err := head(t, mustOpen(t, dir, log)); err != nil {
		t.Fatal(err)
	}
	log.record(t, 5)
	o := options(t, dir, log)
	o.Step = func(step string, done bool) error {
		if step == stepAnchored && !done {
			return errFault
		}
		return nil
	}
	wants(t, head(t, opened(t, o)), errFault)
	anchoredSize := func() int64 {
		a, err := readAnchor(c)
		if err != nil {
			t.Fatal(err)
		}
		return a.Size
	}
	if n := anchoredSize(); n != 20 {
		t.Fatalf("anchored %d, want 20", n)
	}
	asked := false
	setPolicy(t, dir, c, "witness w "+key+" "+listen(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if n := anchoredSize(); !asked && n != 25 {
			t.Errorf("the witness is asked while the key's head has size %d, want 25", n)
		}
		asked = true
		w.ServeHTTP(rw, r)
	}))+"\nquorum w\n", false)
	mustOpen(t, dir, log)
	if !asked {
		t.Error("the witness was not asked")
	}
}

// TestLostAgain: the link to a lost log stays where that log was of a restored backup, which
// has published no head, and where a log that was recovered is lost again before its first.
func TestLostAgain(t *testing.T) {
	k := newBookStore(t, func(l *bookLog) { l.iterations("one", 30) })
	quoted, old := noteOf(t, k)
	id := 0
	recovered := func(r *bookStore) *bookStore {
		t.Helper()
		id++
		if _, err := SetAside(r.dir, fmt.Sprint("store-", id)); err != nil {
			t.Fatal(err)
		}
		next := &bookStore{dir: r.dir, log: newBookLog()}
		next.log.iterations("recovered", 40)
		var formerly []string
		for n := id; n > 0; n-- {
			formerly = append(formerly, fmt.Sprint("store-", n))
		}
		var err error
		if next.config, err = Keygen(KeygenOptions{Store: r.dir, File: filepath.Join(t.TempDir(), "key"), Origin: fmt.Sprint("example.org/new-", id), Formerly: formerly}); err != nil {
			t.Fatal(err)
		}
		return next
	}
	links := func(what string, c Config, want ...string) {
		t.Helper()
		var got []string
		for _, e := range c.Earlier {
			got = append(got, e.Origin)
		}
		if !slices.Equal(got, want) || c.Earlier[0].Note != quoted || !c.Earlier[len(want)-1].Apart {
			t.Errorf("%s: earlier origins %+v, want %v", what, c.Earlier, want)
		}
	}
	r := recovered(restored(t, k, uint64(old.Size)-5)) //nolint:gosec // small
	links("a restored backup is lost", r.config, "example.org/log")
	r = recovered(r)
	links("lost again before a head", r.config, "example.org/log")
	r.more(t, func(l *bookLog) { l.iterations("recovered", 3) })
	links("lost after a head", recovered(r).config, "example.org/log", "example.org/new-2")

	// A new origin, for the same log, that is lost before its first head: the note lies in
	// checkpoint, of the old key.
	id = 0
	k.newOrigin(t)
	r = recovered(k)
	links("a new key, lost before a head", r.config, "example.org/log")
	r.more(t, func(l *bookLog) { l.iterations("recovered", 3) })
	v, err := r.book(t).Verify(t.Context(), &old)
	if err != nil || len(v.Origins) != 1 || v.Origins[0].Kept {
		t.Errorf("%+v, %v", v, err)
	}
	hasFinding(t, v, "log replaced")
}

// TestNoteUnreadable: a note that cannot be read is no reason to quote an older one, or none.
func TestNoteUnreadable(t *testing.T) {
	k := newBookStore(t, func(l *bookLog) { l.iterations("one", 30) })
	if err := errors.Join(os.Remove(k.path(checkpointName)), os.Mkdir(k.path(checkpointName), 0o700)); err != nil {
		t.Fatal(err)
	}
	o := KeygenOptions{Store: k.dir, File: filepath.Join(t.TempDir(), "key"), Origin: "example.org/log"}
	if _, err := NewOrigin(o, nil); err == nil || kindOf(err) == problem.NotFound || !strings.Contains(err.Error(), checkpointName) {
		t.Errorf("a new origin: %v", err)
	}
	if err := Copy(k.dir, t.TempDir(), 30); err == nil || !strings.Contains(err.Error(), checkpointName) {
		t.Errorf("a copy: %v", err)
	}
	if _, err := SetAside(k.dir, "store-1"); err != nil {
		t.Fatal(err)
	}
	o.Formerly = []string{"store-1"}
	if _, err := Keygen(o); err == nil || !strings.Contains(err.Error(), "move that directory away") {
		t.Errorf("after a recovery: %v", err)
	}
}

// TestCopyBeforeBegin copies a store whose new origin has not begun: the copy knows the
// newest note of the old key, which an owner has published since.
func TestCopyBeforeBegin(t *testing.T) {
	k := newBookStore(t, func(l *bookLog) { l.iterations("one", 30) })
	before := k.config
	k.newOrigin(t)
	after := k.config
	if err := Configure(k.dir, before); err != nil { // an owner that runs keeps the old key
		t.Fatal(err)
	}
	k.more(t, func(l *bookLog) { l.iterations("one", 5) })
	newest, _ := noteOf(t, k)
	after.Policy = noWitness
	if err := Configure(k.dir, after); err != nil {
		t.Fatal(err)
	}
	r := restored(t, k, 30)
	if got, err := read(r.dir, notedName); err != nil || string(got) != newest {
		t.Errorf("%q, %v", got, err)
	}
}

func newNoteSigner(t *testing.T, name string) note.Signer {
	t.Helper()
	private, _, err := note.GenerateKey(rand.Reader, name)
	if err != nil {
		t.Fatal(err)
	}
	s, err := note.NewSigner(private)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func signedBy(t *testing.T, s note.Signer, h audit.Head) []byte {
	t.Helper()
	signed, err := audit.Sign(h, s)
	if err != nil {
		t.Fatal(err)
	}
	return signed
}

// TestVerifyForgedQuote: an owner that invents what the log before had, by a key of its own
// with the name of that log, is found by a verifier that has the key. A log whose key the
// policy does not name is not vouched for.
func TestVerifyForgedQuote(t *testing.T) {
	k := newBookStore(t, func(l *bookLog) { l.iterations("one", 600) })
	_, old := noteOf(t, k)
	before := k.config.Key
	k.newOrigin(t)
	private, public, err := note.GenerateKey(rand.Reader, old.Origin)
	if err != nil {
		t.Fatal(err)
	}
	s, err := note.NewSigner(private)
	if err != nil {
		t.Fatal(err)
	}
	e := &k.config.Earlier[0]
	e.Key, e.Note = public, string(signedBy(t, s, audit.Head{Origin: old.Origin, Size: 3, Root: k.rootOf(t, k.log, 3)}))
	if err := errors.Join(Configure(k.dir, k.config), k.config.keepFollowed(), os.Remove(k.path(checkpointName))); err != nil {
		t.Fatal(err)
	}
	k.more(t, func(l *bookLog) { l.iterations("one", 40) })
	b := k.book(t)
	b.Accept(parsed(t, "log "+before+"\nlog "+k.config.Key+"\nquorum none\n"), true)
	for _, since := range []*audit.Head{nil, &old} {
		v, err := b.Verify(t.Context(), since)
		if err != nil || len(v.Origins) > 0 {
			t.Errorf("%+v, %v", v, err)
		}
		hasFinding(t, v, "quotes a note of example.org/log: tampered")
		if since != nil {
			hasFinding(t, v, "shows that it follows that one")
		}
	}
	// By its own word, the store is whole: that is what --policy is for.
	if err := b.AcceptOwn(true); err != nil {
		t.Fatal(err)
	}
	v, err := b.Verify(t.Context(), nil)
	if err != nil || len(v.Findings) > 0 || len(v.Origins) != 1 || !v.Origins[0].Checked {
		t.Errorf("%+v, %v", v, err)
	}
	b.Accept(parsed(t, "log "+k.config.Key+"\nquorum none\n"), true)
	v, err = b.Verify(t.Context(), nil)
	if err != nil || len(v.Findings) > 0 || len(v.Origins) != 1 || v.Origins[0].Checked || !strings.Contains(v.Origins[0].String(), "nothing shows that example.org/log had it") {
		t.Errorf("%+v, %v", v, err)
	}
	if v, err = b.Verify(t.Context(), &old); err != nil {
		t.Fatal(err)
	}
	hasFinding(t, v, "add a line `log` with the key of example.org/log")
}

// TestHeadLines: a line that was cut off is no head, also if only its line feed is missing.
func TestHeadLines(t *testing.T) {
	text := `{"size":1,"root":""}` + "\n" + `{"size":3` + "\n" + `{"size":0}` + "\n" + `{"size":-4}` + "\n" + `{"size":2,"more":5}` + "\n" + `{"size":5}`
	var sizes []int64
	var lines string
	for line, l := range headLines([]byte(text)) {
		sizes, lines = append(sizes, l.Size), lines+string(line)
	}
	if !slices.Equal(sizes, []int64{2}) || lines != `{"size":2,"more":5}`+"\n" {
		t.Errorf("%v %q", sizes, lines)
	}
	for range headLines([]byte("{\"size\":1}\n{\"size\":2}\n")) {
		break
	}
	k := newBookStore(t, func(l *bookLog) { l.iterations("one", 20) })
	_, h := noteOf(t, k)
	k.edit(t, headsName, func(text []byte) []byte {
		return fmt.Appendf(text, `{"size":%d,"root":"%s"}`, h.Size, audit.Hash{1})
	})
	if v, err := k.book(t).Verify(t.Context(), nil); err != nil || len(v.Findings) > 0 {
		t.Errorf("a head that was never signed: %+v, %v", v, err)
	}
	mustOpen(t, k.dir, k.log)
}

// lines collects the messages of a log.
type lines struct {
	mu   sync.Mutex
	list []string
}

// Enabled implements [slog.Handler].
func (*lines) Enabled(context.Context, slog.Level) bool { return true }

// Handle implements [slog.Handler].
func (l *lines) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	r.Attrs(func(a slog.Attr) bool {
		l.list = append(l.list, r.Message+": "+a.String())
		return true
	})
	return nil
}

// WithAttrs implements [slog.Handler].
func (l *lines) WithAttrs([]slog.Attr) slog.Handler { return l }

// WithGroup implements [slog.Handler].
func (l *lines) WithGroup(string) slog.Handler { return l }

func (l *lines) with(text string) (found []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.list {
		if strings.Contains(line, text) {
			found = append(found, line)
		}
	}
	return found
}

// TestRepeated: an error is logged once while its cause stays, whatever head it is about and
// whichever port the connection had. No error is no change.
func TestRepeated(t *testing.T) {
	failed := func(head audit.Head, port int, cause string) error {
		return fmt.Errorf("%w: head with %v lacks cosignatures: %w", audit.ErrPolicy, head, &net.OpError{
			Op: "read", Net: "tcp", Source: &net.TCPAddr{Port: port}, Addr: &net.TCPAddr{Port: 7380}, Err: errors.New(cause),
		})
	}
	var r repeated
	for i, step := range []struct {
		err  error
		want bool
	}{
		{nil, false},
		{failed(audit.Head{Size: 5, Root: audit.Hash{1}}, 40000, "reset"), true},
		{failed(audit.Head{Size: 900, Root: audit.Hash{251, 239, 190}}, 40001, "reset"), false},
		{failed(audit.Head{Size: 901, Root: audit.Hash{4}}, 40002, "refused"), true},
		{nil, false},
		{nil, false},
		{failed(audit.Head{Size: 901, Root: audit.Hash{4}}, 40002, "refused"), true},
	} {
		if got := r.changed(step.err); got != step.want {
			t.Errorf("step %d: %v, want %v", i, got, step.want)
		}
	}
}

// TestWitnessDownLog: while a witness is down and the log grows, the owner logs one error.
func TestWitnessDownLog(t *testing.T) {
	dir, c := newLedger(t)
	_, key := newWitness(t, "example.org/w", c.Key)
	url := listen(t, http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		http.Error(rw, "down", http.StatusServiceUnavailable)
	}))
	setPolicy(t, dir, c, "witness w "+key+" "+url+"\nquorum w\n", true)
	log, out := &tape{}, &lines{}
	o := options(t, dir, log)
	o.Logger = slog.New(out)
	k := opened(t, o)
	kept(t, k)
	sizes := func() (n int) {
		text, err := read(dir, headsName)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		for range headLines(text) {
			n++
		}
		return n
	}
	for n := 1; n <= 4; n++ {
		log.record(t, 3)
		soon(t, fmt.Sprint("head ", n), func() bool { return sizes() >= n })
	}
	soon(t, "an error", func() bool { return len(out.with("no head made")) > 0 })
	if got := out.with("no head made"); len(got) != 1 {
		t.Errorf("%d errors for one witness that is down: %v", len(got), got)
	}
	if got := out.with("log not followed"); len(got) > 0 {
		t.Errorf("%v", got)
	}
}

// endless is a log whose Walk ends at once, as if its reader was closed.
type endless struct {
	*tape
	walks chan struct{}
}

func (l *endless) Walk(context.Context, uint64, uint64, func(events.Message, uint64, time.Time) error) error {
	select {
	case l.walks <- struct{}{}:
	default:
	}
	return nil
}

// TestFollowedWithoutError: a walk that ends without an error is no error in the log.
func TestFollowedWithoutError(t *testing.T) {
	dir, _ := newLedger(t)
	out, log := &lines{}, &endless{&tape{}, make(chan struct{})}
	o := options(t, dir, log)
	o.Logger = slog.New(out)
	k := opened(t, o)
	kept(t, k)
	for range 2 {
		select {
		case <-log.walks:
		case <-time.After(time.Minute):
			t.Fatal("the log is not followed")
		}
	}
	if got := out.with("log not followed"); len(got) > 0 {
		t.Errorf("%v", got)
	}
}

// TestStateWithoutKey: an owner without the key makes no state, which it could not sign.
func TestStateWithoutKey(t *testing.T) {
	dir, c := configured(t, nil)
	log := &memLog{}
	log.fill(t, 2*stateEvents)
	k := opened(t, options(t, dir, log))
	if err := k.foldUntil(t.Context(), 2*stateEvents); err != nil {
		t.Fatal(err)
	}
	if !k.stateDue(2 * stateEvents) {
		t.Error("with the key, no state is due")
	}
	if err := os.Remove(c.Signer); err != nil {
		t.Fatal(err)
	}
	k = opened(t, options(t, dir, log))
	headAt(t, k, 2*stateEvents)
	if k.stateDue(2 * stateEvents) {
		t.Error("without the key, a state is due")
	}
	if _, err := read(dir, stateName); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a state without the key: %v", err)
	}
	log.fill(t, 1)
	if err := k.foldUntil(t.Context(), 2*stateEvents+1); err != nil {
		t.Fatal(err)
	}
	broken := k.runs // a snapshot would read it
	k.runs = nil
	if err := errors.Join(k.makeHead(t.Context()), k.saveLast()); err != nil {
		t.Error(err)
	}
	k.runs = broken
}

// TestWitnessForks: a witness keeps the evidence of each fork, once, and reports it; also
// that it cannot keep it.
func TestWitnessForks(t *testing.T) {
	_, c := newLedger(t)
	file := filepath.Join(t.TempDir(), "witness.key")
	if _, err := NewKey(file, "example.org/w"); err != nil {
		t.Fatal(err)
	}
	var reports []string
	w, err := NewWitness(filepath.Join(t.TempDir(), "heads"), file, []string{c.Key}, func(err error) { reports = append(reports, err.Error()) })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.Close() })
	signer, err := c.signer(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	add := func(seed byte, old int64, more string) (string, int) {
		signed := string(signedBy(t, signer, audit.Head{Origin: c.Origin, Size: 7, Root: audit.Hash{seed}})) + more
		_, status, _ := w.add(fmt.Appendf(nil, "old %d\n\n%s", old, signed))
		return signed, status
	}
	reported := func(texts ...string) {
		t.Helper()
		if len(reports) != len(texts) {
			t.Fatalf("reports %q, want %q", reports, texts)
		}
		for i, text := range texts {
			if !strings.Contains(reports[i], text) {
				t.Errorf("report %q, want %q in it", reports[i], text)
			}
		}
		reports = nil
	}
	one, _ := add(1, 0, "")
	two, status := add(2, 7, "")
	reported("both notes are the evidence: " + w.dir)
	three, status3 := add(3, 7, "")
	reported("both notes are the evidence: " + w.dir)
	add(2, 7, "— example.org/more AAAAAAA=\n") // the same head
	reported()
	if status != http.StatusConflict || status3 != http.StatusConflict {
		t.Errorf("statuses %d and %d", status, status3)
	}
	files, err := filepath.Glob(filepath.Join(w.dir, "*.fork"))
	if err != nil || len(files) != 1 {
		t.Fatalf("%v, %v", files, err)
	}
	want := one + "\n" + two + "\n" + one + "\n" + three
	if text, err := os.ReadFile(files[0]); err != nil || string(text) != want {
		t.Errorf("evidence %q, want %q (%v)", text, want, err)
	}
	// Full, and not a file.
	full := want + strings.Repeat("x", forksMost)
	if err := os.WriteFile(files[0], []byte(full), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, status := add(4, 7, ""); status != http.StatusConflict {
		t.Errorf("status %d", status)
	}
	reported("cannot be kept in " + files[0] + ": it would have more than")
	if text, err := os.ReadFile(files[0]); err != nil || string(text) != full {
		t.Errorf("the full evidence has %d bytes, had %d (%v)", len(text), len(full), err)
	}
	if err := errors.Join(os.Remove(files[0]), os.Mkdir(files[0], 0o700)); err != nil {
		t.Fatal(err)
	}
	if _, status := add(5, 7, ""); status != http.StatusConflict {
		t.Errorf("status %d", status)
	}
	reported("cannot be kept in " + files[0])
}
