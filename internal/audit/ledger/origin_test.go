package ledger

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// noteOf returns the published note of a store, and its head.
func noteOf(t *testing.T, k *bookStore) (string, audit.Head) {
	t.Helper()
	signed, h, err := k.book(t).Checkpoint()
	if err != nil {
		t.Fatal(err)
	}
	return string(signed), h
}

// restored returns a copy of a store whose log ends at a sequence.
func restored(t *testing.T, k *bookStore, last uint64) *bookStore {
	t.Helper()
	to := &bookStore{dir: t.TempDir(), log: newBookLog(), config: k.config}
	if err := Copy(k.dir, to.dir, last); err != nil {
		t.Fatal(err)
	}
	for _, m := range k.log.messages[:last] {
		to.log.add(m)
	}
	return to
}

// TestNewOrigin restores a backup whose key has signed later events. It is refused. Under a
// new origin it continues, with a first event that quotes the note of the later events. A
// note from before the backup's end is followed by the log, a bundle and a proof; a later
// one is not, and neither is any after the old events were changed.
func TestNewOrigin(t *testing.T) {
	k := newBookStore(t, func(l *bookLog) { l.iterations("one", 300); l.iterations("two", 10) })
	_, old := noteOf(t, k)
	cut, _ := k.log.Last(t.Context())
	k.more(t, func(l *bookLog) { l.iterations("one", 50) })
	quoted, later := noteOf(t, k)
	r := restored(t, k, cut)
	_, err := tryOpen(t, r.dir, r.log)
	wants(t, err, ErrRolledBack, "audit keygen FILE --new-origin")

	stranger := newBookStore(t, func(l *bookLog) { l.iterations("one", 3) })
	alien, _ := noteOf(t, stranger)
	o := KeygenOptions{Store: r.dir, File: filepath.Join(t.TempDir(), "key"), Origin: "example.org/log"}
	if _, err := NewOrigin(o, []byte(alien)); kindOf(err) != problem.Invalid {
		t.Errorf("a note of another log: %v", err)
	}
	if r.config, err = NewOrigin(o, nil); err != nil || r.config.Origin != "example.org/log/2" || len(r.config.Earlier) != 1 || r.config.Earlier[0].Note != quoted {
		t.Fatalf("%+v, %v", r.config, err)
	}
	if _, err := NewOrigin(o, nil); !errors.Is(err, os.ErrExist) {
		t.Errorf("into the same file: %v", err)
	}
	r.more(t, func(l *bookLog) { l.iterations("one", 20) })
	s, err := audit.ParseSealed(r.log.messages[cut], cut+1)
	if err != nil || s.Previous != quoted || s.Key != r.config.Key || s.Size != int64(cut) { //nolint:gosec // small
		t.Errorf("the first event of the new origin: %+v, %v", s, err)
	}
	r.more(t, func(l *bookLog) { l.iterations("one", 5) })
	for i, m := range r.log.messages[cut+1:] {
		if s, err := audit.ParseSealed(m, cut+2+uint64(i)); err == nil && s.Previous != "" { //nolint:gosec // small
			t.Errorf("event %d quotes a note, too", cut+2+uint64(i)) //nolint:gosec // small
		}
	}

	b := r.book(t)
	v, err := b.Verify(t.Context(), &old)
	if err != nil || len(v.Findings) > 0 || len(v.Origins) != 1 || v.Origins[0].Sequence != cut+1 || v.Origins[0].Size != later.Size || v.Origins[0].Kept {
		t.Errorf("since a head from before the backup: %+v, %v", v, err)
	}
	v, err = b.Verify(t.Context(), &later)
	if err != nil {
		t.Fatal(err)
	}
	hasFinding(t, v, "log replaced: the log example.org/log had "+later.String())
	hasFinding(t, v, fmt.Sprintf("has %d events from before it", cut))

	p := parsed(t, "log "+k.config.Key+"\nlog "+r.config.Key+"\nquorum none\n")
	alone := parsed(t, "log "+r.config.Key+"\nquorum none\n")
	proof, err := b.Prove(t.Context(), 7, &old)
	if err != nil {
		t.Fatal(err)
	}
	var bundle bytes.Buffer
	if err := b.Export(t.Context(), ExportOptions{Run: "one", Since: &old}, &bundle); err != nil {
		t.Fatal(err)
	}
	for what, verify := range map[string]func(p audit.Policy, old *audit.Head) error{
		"proof": func(p audit.Policy, old *audit.Head) error {
			_, err := audit.VerifyProof(proof, p, true, old)
			return err
		},
		"bundle": func(p audit.Policy, old *audit.Head) error {
			_, err := audit.VerifyBundle(bytes.NewReader(bundle.Bytes()), p, true, old)
			return err
		},
	} {
		if err := errors.Join(verify(p, &old), verify(alone, nil)); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		wants(t, verify(alone, &old), audit.ErrPolicy, "has no line `log` with its key")
		wants(t, verify(p, &later), audit.ErrReplaced, fmt.Sprintf("has %d events from before it", cut))
		other := old
		other.Root[3]++
		wants(t, verify(p, &other), audit.ErrReplaced, other.Root.String(), old.Root.String())
		other = old
		other.Origin = "example.org/another"
		wants(t, verify(p, &other), audit.ErrTampered, "nothing here shows that the one follows the other")
	}
	_, err = b.Prove(t.Context(), 7, &later)
	wants(t, err, audit.ErrReplaced)
	// The decision is the proof: without it, or with another one, nothing follows.
	line, rest, _ := bytes.Cut(bundle.Bytes(), []byte("\n"))
	var head audit.BundleHead
	if err := json.Unmarshal(line, &head); err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func(c *audit.Consistency){
		"no decision":        func(c *audit.Consistency) { c.Follows = nil },
		"another decision":   func(c *audit.Consistency) { c.Follows = []audit.Item{head.Sealed} },
		"the decision twice": func(c *audit.Consistency) { c.Follows = append(c.Follows, c.Follows[0]) },
	} {
		forged := head
		c := *head.Consistency
		c.Follows = slices.Clone(c.Follows)
		change(&c)
		forged.Consistency = &c
		text, err := json.Marshal(forged)
		if err != nil {
			t.Fatal(err)
		}
		_, err = audit.VerifyBundle(bytes.NewReader(slices.Concat(text, []byte("\n"), rest)), p, true, &old)
		if !errors.Is(err, audit.ErrTampered) {
			t.Errorf("%s: %v, want %v", what, err, audit.ErrTampered)
		}
	}
}

func parsed(t *testing.T, policy string) audit.Policy {
	t.Helper()
	p, err := audit.ParsePolicy(policy)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// TestNewKey replaces the key of a store that loses nothing: the log continues every note,
// and the saved state of the old key is not used. A log that was rewritten meanwhile is
// refused, so a new key does not launder it.
func TestNewKey(t *testing.T) {
	k := newBookStore(t, func(l *bookLog) { l.iterations("one", 600) })
	note, old := noteOf(t, k)
	before := k.config
	var err error
	if k.config, err = NewOrigin(KeygenOptions{Store: k.dir, File: filepath.Join(t.TempDir(), "key"), Origin: "example.org/log"}, nil); err != nil {
		t.Fatal(err)
	}
	_, _, err = k.book(t).Checkpoint()
	wants(t, err, ErrOff, "no head was published yet under the origin example.org/log/2")
	// The same key, on a log with another event.
	forged := &bookStore{dir: t.TempDir(), log: newBookLog(), config: k.config}
	if err := os.CopyFS(forged.dir, os.DirFS(k.dir)); err != nil {
		t.Fatal(err)
	}
	for i, m := range k.log.messages {
		if i == 100 {
			m.Data = []byte(`{"loss":0}`)
		}
		forged.log.add(m)
	}
	if err := errors.Join(os.RemoveAll(forged.path("tile")), os.Remove(forged.path(headsName))); err != nil {
		t.Fatal(err)
	}
	_, err = tryOpen(t, forged.dir, forged.log)
	wants(t, err, ErrDamaged, "a note of example.org/log has", old.Root.String())

	k.more(t, func(l *bookLog) { l.iterations("one", 40) })
	v, err := k.book(t).Verify(t.Context(), &old)
	if err != nil || len(v.Findings) > 0 || len(v.Origins) != 1 || !v.Origins[0].Kept || v.Origins[0].Follows != before.Origin {
		t.Errorf("%+v, %v", v, err)
	}
	s, err := audit.ParseSealed(k.log.messages[old.Size], uint64(old.Size)+1) //nolint:gosec // small
	if err != nil || s.Previous != note {
		t.Errorf("%+v, %v", s, err)
	}
	// A third one: the head of the first is followed over two decisions.
	if k.config, err = NewOrigin(KeygenOptions{Store: k.dir, File: filepath.Join(t.TempDir(), "key"), Origin: "example.org/log"}, nil); err != nil || k.config.Origin != "example.org/log/3" {
		t.Fatalf("%+v, %v", k.config, err)
	}
	k.more(t, func(l *bookLog) { l.iterations("one", 5) })
	var keys []string
	for _, e := range k.config.Earlier {
		keys = append(keys, "log "+e.Key)
	}
	p := parsed(t, strings.Join(keys, "\n")+"\nlog "+k.config.Key+"\nquorum none\n")
	var bundle bytes.Buffer
	if err := k.book(t).Export(t.Context(), ExportOptions{Run: "one", Since: &old}, &bundle); err != nil {
		t.Fatal(err)
	}
	if v, err := audit.VerifyBundle(&bundle, p, true, &old); err != nil || v.Origin != "example.org/log/3" {
		t.Errorf("%+v, %v", v, err)
	}
	if v, err := k.book(t).Verify(t.Context(), &old); err != nil || len(v.Findings) > 0 || len(v.Origins) != 2 {
		t.Errorf("%+v, %v", v, err)
	}
}

// TestFollowedForged changes, before the first owner with a new key, what its origin follows:
// the owner does not sign a quote of another log.
func TestFollowedForged(t *testing.T) {
	k := newBookStore(t, func(l *bookLog) { l.iterations("one", 20) })
	evil := newBookStore(t, func(l *bookLog) { l.iterations("evil", 3) })
	note, _ := noteOf(t, evil)
	file := filepath.Join(t.TempDir(), "key")
	var err error
	if k.config, err = NewOrigin(KeygenOptions{Store: k.dir, File: file, Origin: "example.org/log"}, nil); err != nil {
		t.Fatal(err)
	}
	forged := k.config
	forged.Earlier = []Earlier{{Origin: evil.config.Origin, Key: evil.config.Key, Note: note, Apart: true}}
	kept := []string{k.path(checkpointName), k.path(headsName)}
	for _, path := range kept { // what contradicts the forger
		if err := os.Rename(path, path+".kept"); err != nil {
			t.Fatal(err)
		}
	}
	if err := Configure(k.dir, forged); err != nil {
		t.Fatal(err)
	}
	_, err = tryOpen(t, k.dir, k.log)
	wants(t, err, ErrDamaged, "was changed since its key was made", file+".follows")
	if err := os.WriteFile(file+".follows", []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = tryOpen(t, k.dir, k.log)
	wants(t, err, ErrDamaged, file+".follows")
	if err := errors.Join(k.config.keepFollowed(), Configure(k.dir, k.config)); err != nil {
		t.Fatal(err)
	}
	for _, path := range kept {
		if err := os.Rename(path+".kept", path); err != nil {
			t.Fatal(err)
		}
	}
	k.more(t, func(l *bookLog) { l.iterations("one", 3) })
	// Of a key that an older version made, nothing is known.
	if err := os.Remove(file + ".follows"); err != nil {
		t.Fatal(err)
	}
	if known, err := k.config.checkFollowed(); known || err != nil {
		t.Errorf("known: %v, %v", known, err)
	}
}

// TestTiles: a server of the evidence has one book, until the configuration changes.
func TestTiles(t *testing.T) {
	k := newBookStore(t, func(l *bookLog) { l.iterations("one", 20) })
	var tiles Tiles
	book := func() *Book {
		t.Helper()
		b, err := tiles.Open(k.dir, k.log)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	first := book()
	k.more(t, func(l *bookLog) { l.iterations("two", 3) })
	if book() != first {
		t.Error("the ledger was opened again")
	}
	if _, h, err := first.Checkpoint(); err != nil || h.Size < 24 {
		t.Errorf("%v, %v", h, err)
	}
	var err error
	if k.config, err = NewOrigin(KeygenOptions{Store: k.dir, File: filepath.Join(t.TempDir(), "key"), Origin: "example.org/log"}, nil); err != nil {
		t.Fatal(err)
	}
	if book() == first || book().Config().Origin != "example.org/log/2" {
		t.Error("the book is of another configuration")
	}
	if err := os.RemoveAll(k.path("")); err != nil {
		t.Fatal(err)
	}
	if _, err := tiles.Open(k.dir, k.log); !errors.Is(err, ErrOff) {
		t.Errorf("without evidence: %v", err)
	}
}

// TestOriginCrash lets an owner die while it begins an origin: the next one begins it, once.
func TestOriginCrash(t *testing.T) {
	for _, decided := range []bool{false, true} {
		k := newBookStore(t, func(l *bookLog) { l.iterations("one", 20) })
		n := len(k.log.messages)
		var err error
		if k.config, err = NewOrigin(KeygenOptions{Store: k.dir, File: filepath.Join(t.TempDir(), "key"), Origin: "example.org/log"}, nil); err != nil {
			t.Fatal(err)
		}
		o := options(t, k.dir, k.log)
		o.Step = func(step string, done bool) error {
			if step == stepSealed && done == decided {
				return errFault
			}
			return nil
		}
		_, err = Open(t.Context(), o)
		wants(t, err, errFault)
		k.more(t, func(l *bookLog) { l.iterations("one", 3) })
		quotes := 0
		for i, m := range k.log.messages[n:] {
			if m.Subject != sealedSubject {
				continue
			}
			s, err := audit.ParseSealed(m, uint64(n+i)+1) //nolint:gosec // small
			if err != nil {
				t.Fatal(err)
			}
			if s.Previous != "" {
				quotes++
			}
		}
		if quotes != 1 || k.log.messages[n].Subject != events.Subject(events.Scope{Run: events.None, Trial: events.None, Actor: events.Server}, events.AuditSealed{}.Kind()) {
			t.Errorf("after a crash with the decision in the log: %v: %d decisions quote the note, the first event is %s", decided, quotes, k.log.messages[n].Subject)
		}
	}
}

// TestLost: the evidence of a recovered store quotes the newest note of the lost log, whose
// events the new log need not have. Evidence that is not whole is no reason to begin without.
func TestLost(t *testing.T) {
	k := newBookStore(t, func(l *bookLog) { l.iterations("one", 30) })
	quoted, old := noteOf(t, k)
	if _, err := SetAside(k.dir, "store-1"); err != nil {
		t.Fatal(err)
	}
	before := k.config.Key
	k.log = newBookLog()
	k.log.iterations("recovered", 40)
	o := KeygenOptions{Store: k.dir, File: filepath.Join(t.TempDir(), "key"), Origin: "example.org/new", Formerly: []string{"store-0", "store-1"}}
	aside := filepath.Join(k.dir, "audit.store-1", checkpointName)
	if err := os.WriteFile(aside, []byte(strings.Replace(quoted, "\n", "x\n", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Keygen(o)
	wants(t, err, ErrDamaged, "move that directory away")
	if err := os.WriteFile(aside, []byte(quoted), 0o600); err != nil {
		t.Fatal(err)
	}
	if k.config, err = Keygen(o); err != nil {
		t.Fatal(err)
	}
	k.more(t, func(l *bookLog) { l.iterations("recovered", 3) })
	s, err := audit.ParseSealed(k.log.messages[40], 41)
	if err != nil || s.Previous != quoted {
		t.Errorf("%+v, %v", s, err)
	}
	v, err := k.book(t).Verify(t.Context(), &old)
	if err != nil || len(v.Origins) != 1 || v.Origins[0].Kept || v.Origins[0].Follows != "example.org/log" {
		t.Errorf("%+v, %v", v, err)
	}
	hasFinding(t, v, "log replaced")
	var bundle bytes.Buffer
	if err := k.book(t).Export(t.Context(), ExportOptions{Run: "recovered", Since: &old}, &bundle); err != nil {
		t.Fatal(err)
	}
	_, err = audit.VerifyBundle(&bundle, parsed(t, "log "+before+"\nlog "+k.config.Key+"\nquorum none\n"), true, &old)
	wants(t, err, audit.ErrReplaced, old.Root.String())
}

// TestQuoteRestored: a restored store whose owner has not published a note has that of the backup.
// The store that is recovered from it quotes that.
func TestQuoteRestored(t *testing.T) {
	k := newBookStore(t, func(l *bookLog) { l.iterations("one", 30) })
	quoted, _ := noteOf(t, k)
	r, recovered := restored(t, k, 30), t.TempDir()
	if _, err := os.Stat(r.path(checkpointName)); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("the restored store has a note of its own: %v", err)
	}
	if _, err := Quote(r.dir, recovered, "store-1"); err != nil {
		t.Fatal(err)
	}
	c, err := Keygen(KeygenOptions{Store: recovered, File: filepath.Join(t.TempDir(), "key"), Origin: "example.org/new", Formerly: []string{"store-1"}})
	if err != nil || len(c.Earlier) != 1 || c.Earlier[0].Note != quoted {
		t.Errorf("%+v, %v", c.Earlier, err)
	}
}
