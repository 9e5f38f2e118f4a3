package ledger

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/mod/sumdb/note"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
)

// memLog is a log in memory whose first messages are not kept.
type memLog struct {
	mu    sync.Mutex
	lost  uint64 // messages that are not kept
	list  []events.Message
	grown chan struct{}
}

var _ Log = (*memLog)(nil)

func (l *memLog) add(m events.Message) uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, m)
	if l.grown != nil {
		close(l.grown)
		l.grown = nil
	}
	return l.lost + uint64(len(l.list))
}

// fill appends n facts of three runs.
func (l *memLog) fill(t *testing.T, n int) {
	t.Helper()
	for range n {
		at := l.lost + uint64(len(l.list))
		f, err := events.NewFact(events.Stamp{ID: fmt.Sprintf("id-%d", at), Source: "test", Time: time.Unix(1, 0)},
			events.Scope{Run: fmt.Sprintf("run-%d", at/100%3), Trial: "main", Actor: events.Rank(0)}, events.Metrics{Attempt: 1, Iteration: 1, Step: 1})
		if err != nil {
			t.Fatal(err)
		}
		l.add(events.Encode(f.Event))
	}
}

// Last implements [Log].
func (l *memLog) Last(context.Context) (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lost + uint64(len(l.list)), nil
}

// Walk implements [Log].
func (l *memLog) Walk(ctx context.Context, from, until uint64, each func(events.Message, uint64, time.Time) error) error {
	for at := from; until == 0 || at <= until; {
		l.mu.Lock()
		if l.grown == nil {
			l.grown = make(chan struct{})
		}
		grown, have := l.grown, l.lost+uint64(len(l.list))
		var m events.Message
		if at <= have {
			m = l.list[at-l.lost-1]
		}
		l.mu.Unlock()
		if at > have {
			select {
			case <-grown:
			case <-ctx.Done():
				return ctx.Err()
			}
			continue
		}
		if err := each(m, at, time.Unix(1700000000, int64(at))); err != nil { //nolint:gosec // not that long
			return err
		}
		at++
	}
	return nil
}

// LaneEnd implements [Log].
func (l *memLog) LaneEnd(context.Context, events.Aggregate) (uint64, error) { return 0, nil }

// Decide implements [Log].
func (l *memLog) Decide(_ context.Context, d events.Decision, _ uint64) (uint64, error) {
	return l.add(events.Encode(d.Event)), nil
}

// sealedIn counts the decisions audit.sealed.
func (l *memLog) sealedIn() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, m := range l.list {
		if m.Subject == sealedSubject {
			n++
		}
	}
	return n
}

// configured returns a directory with a ledger. Its key is a copy of that of another, if
// given.
func configured(t *testing.T, as *Config) (dir string, c Config) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "store")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "key")
	if as == nil {
		c, err := Keygen(KeygenOptions{Store: dir, File: file, Origin: "example.org/test"})
		if err != nil {
			t.Fatal(err)
		}
		return dir, c
	}
	c = *as
	c.Signer = file
	text, err := os.ReadFile(as.Signer)
	if err == nil {
		err = os.WriteFile(c.Signer, text, 0o600)
	}
	if err = errors.Join(err, Configure(dir, c)); err != nil {
		t.Fatal(err)
	}
	return dir, c
}

func options(t *testing.T, dir string, log Log) Options {
	stamps := 0
	return Options{
		Store: dir, Log: log, Logger: slog.New(slog.NewTextHandler(t.Output(), nil)),
		Stamp: func() events.Stamp {
			stamps++
			return events.Stamp{ID: fmt.Sprintf("sealed-%d", stamps), Source: "owner", Time: time.Unix(1, 0)}
		},
	}
}

func opened(t *testing.T, o Options) *Keeper {
	t.Helper()
	k, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// headAt folds the log up to a sequence and publishes a head.
func headAt(t *testing.T, k *Keeper, last uint64) {
	t.Helper()
	if err := errors.Join(k.foldUntil(t.Context(), last), k.makeHead(t.Context()), k.saveLast()); err != nil {
		t.Fatal(err)
	}
}

// fails wants an error that matches and contains the texts.
func fails(t *testing.T, err, want error, texts ...string) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%v, want %v", err, want)
		return
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("%v, want %q in it", err, text)
		}
	}
}

// files returns the files of a ledger that a clean run of the same log has, too.
func files(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	root := filepath.Join(dir, dirName)
	if err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		name, _ := filepath.Rel(root, path)
		if err != nil || d.IsDir() || name == configName || name == saltsName || name == headsName {
			return err
		}
		text, err := os.ReadFile(path)
		out[name] = string(text)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return out
}

var errFault = errors.New("injected fault")

// faults fails the call number at of the steps: before the write, after it, or with half
// a line written.
type faults struct {
	dir  string
	mode string // lost, persisted, torn
	at   int    // 0: none
	n    int
	what string
}

func (f *faults) step(step string, done bool) error {
	file := map[string]string{stepSalted: saltsName, stepListed: headsName}[step]
	if done != (f.mode == "persisted") || f.mode == "torn" && file == "" {
		return nil
	}
	if f.n++; f.n != f.at {
		return nil
	}
	f.what = f.mode + " " + step
	if f.mode == "torn" {
		h, err := os.OpenFile(filepath.Join(f.dir, dirName, file), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
		if err != nil {
			return err
		}
		if _, err := h.WriteString(`{"run":"run-1","key":"AAAA`); err != nil {
			return err
		}
		return errors.Join(errFault, h.Close())
	}
	return errFault
}

// TestKeeperFaults lets each write of the owner fail once, at 256 entries and at 65536,
// and repeats what failed. The tree, the run map and the files are those of a run in
// which nothing fails.
func TestKeeperFaults(t *testing.T) {
	_, from := configured(t, nil)
	for _, c := range []struct {
		size  uint64
		start func(t *testing.T, dir string) *memLog
	}{
		{256, func(t *testing.T, _ string) *memLog {
			log := &memLog{}
			log.fill(t, 270)
			return log
		}},
		{1 << 16, func(t *testing.T, dir string) *memLog { return almost(t, dir, from) }},
	} {
		begun := func(t *testing.T, step func(string, bool) error) (*Keeper, string, *memLog) {
			t.Helper()
			dir, _ := configured(t, &from)
			log := c.start(t, dir)
			o := options(t, dir, log)
			o.Step = step
			k := opened(t, o)
			for i := range byte(3) { // the same in each
				k.salts.fresh[fmt.Sprintf("run-%d", i)] = bytes.Repeat([]byte{i}, sha256.Size)
			}
			return k, dir, log
		}
		clean, cleanDir, _ := begun(t, nil)
		drive(t, clean, c.size)
		want, err := clean.tree.Root()
		if err != nil {
			t.Fatal(err)
		}
		for _, mode := range []string{"lost", "persisted", "torn"} {
			t.Run(fmt.Sprintf("%d %s", c.size, mode), func(t *testing.T) {
				t.Parallel()
				seen := map[string]bool{}
				for at := 1; ; at++ {
					f := &faults{mode: mode, at: at}
					k, dir, log := begun(t, func(step string, done bool) error { return f.step(step, done) })
					f.dir = dir
					drive(t, k, c.size)
					if f.what == "" {
						break
					}
					seen[f.what] = true
					if root, err := k.tree.Root(); err != nil || root != want || k.head != clean.head {
						t.Errorf("%s: root %s of %v, want %s of %v: %v", f.what, root, k.head, want, clean.head, err)
					}
					if got, want := k.runs.Rows(), clean.runs.Rows(); !slices.Equal(got, want) {
						t.Errorf("%s: rows %v, want %v", f.what, got, want)
					}
					if got, want := files(t, dir), files(t, cleanDir); !maps.Equal(got, want) {
						t.Errorf("%s: the files differ: %v and %v", f.what, slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(want)))
					}
					// The next owner finds what this one has left in order.
					again := opened(t, options(t, dir, log))
					if again.head != k.head || !again.signed || again.saved != int64(c.size)+10 { //nolint:gosec // not that long
						t.Errorf("%s: opened again with %v, signed %v, saved at %d", f.what, again.head, again.signed, again.saved)
					}
				}
				t.Log(slices.Sorted(maps.Keys(seen)))
				if len(seen) == 0 {
					t.Error("nothing failed")
				}
			})
		}
	}
}

// drive makes a head at a size and one 10 events later, and repeats what fails.
func drive(t *testing.T, k *Keeper, size uint64) {
	t.Helper()
	for _, last := range []uint64{size, size + 10} {
		for _, do := range []func() error{
			func() error { return k.foldUntil(t.Context(), last) },
			func() error { return k.makeHead(t.Context()) },
		} {
			err := do()
			if errors.Is(err, errFault) {
				err = do()
			}
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	err := k.saveLast()
	if errors.Is(err, errFault) {
		err = k.saveLast()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// almost gives a ledger the state of 65280 events that were folded before, and returns
// the log behind them.
func almost(t *testing.T, dir string, c Config) *memLog {
	t.Helper()
	const size = (audit.TileWidth - 1) * audit.TileWidth
	log := &memLog{lost: size}
	log.fill(t, audit.TileWidth+10)
	tree := audit.Tree{Size: size, Edges: [][]audit.Hash{nil, make([]audit.Hash, audit.TileWidth-1)}}
	for i := range tree.Edges[1] {
		tree.Edges[1][i] = sha256.Sum256([]byte{byte(i)})
	}
	root, err := tree.Root()
	if err != nil {
		t.Fatal(err)
	}
	signer, err := c.signer(dir)
	if err != nil {
		t.Fatal(err)
	}
	line, err := json.Marshal(state{Tree: tree, Rows: []audit.Row{{Run: "run-1", Trial: "main", Count: size, Last: size}}})
	if err != nil {
		t.Fatal(err)
	}
	signed, err := note.Sign(&note.Note{Text: stateText(line)}, signer)
	if err != nil {
		t.Fatal(err)
	}
	salts := ""
	for i := range 3 {
		text, err := json.Marshal(saltLine{fmt.Sprintf("run-%d", i), make([]byte, sha256.Size)})
		if err != nil {
			t.Fatal(err)
		}
		salts += string(text) + "\n"
	}
	head, err := json.Marshal(headLine{size, root})
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		stateName: string(line) + "\n" + string(signed), headsName: string(head) + "\n", saltsName: salts,
	} {
		if err := os.WriteFile(filepath.Join(dir, dirName, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return log
}

// shortFile writes half of a line and fails.
type shortFile struct{ *os.File }

func (f shortFile) Write(p []byte) (int, error) {
	n, _ := f.File.Write(p[:len(p)/2])
	return n, errFault
}

// TestAppendShort: a line that was written in part is taken back.
func TestAppendShort(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lines")
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	for _, had := range []string{"", "first\n", "first\nto"} {
		if err := os.WriteFile(path, []byte(had), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := appendTo(shortFile{f}, []byte("second"))
		fails(t, err, errFault)
		if text, err := os.ReadFile(path); err != nil || string(text) != had {
			t.Errorf("after a short write: %q, want %q (%v)", text, had, err)
		}
	}
	if _, err := appendTo(f, []byte("second")); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "first\nto\nsecond\n" {
		t.Errorf("%q, %v", text, err)
	}
}

// TestSaltsRetry: when a key is durable though its write failed, the retry does not make
// another: a reader may use the first already.
func TestSaltsRetry(t *testing.T) {
	dir, _ := configured(t, nil)
	log := &memLog{}
	log.fill(t, 5)
	o := options(t, dir, log)
	f := &faults{mode: "persisted", at: 1}
	o.Step = f.step
	k := opened(t, o)
	fails(t, k.foldUntil(t.Context(), 5), errFault)
	headAt(t, k, 5)
	text, err := read(dir, saltsName)
	if err != nil {
		t.Fatal(err)
	}
	if lines := slices.Collect(bytes.Lines(text)); f.what != "persisted salted" || len(lines) != 2 || !bytes.Equal(lines[0], lines[1]) {
		t.Errorf("after %q: %s", f.what, text)
	}
}

// TestSaltsTorn: a line that power loss cut off, and that others follow, harms nothing.
func TestSaltsTorn(t *testing.T) {
	dir, _ := configured(t, nil)
	log := &memLog{}
	log.fill(t, 50)
	k := opened(t, options(t, dir, log))
	headAt(t, k, 50)
	for range 2 {
		path := filepath.Join(dir, dirName, saltsName)
		f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0o600)
		if err == nil {
			_, err = f.WriteString(`{"run":"run-1","ke`)
		}
		if err := errors.Join(err, f.Close()); err != nil {
			t.Fatal(err)
		}
		log.fill(t, 100) // with another run
		k = opened(t, options(t, dir, log))
		last, _ := log.Last(t.Context())
		headAt(t, k, last)
	}
	opened(t, options(t, dir, log))
}

// TestSaltsLost: without salts that were used, no owner continues with others.
func TestSaltsLost(t *testing.T) {
	for _, stateToo := range []bool{false, true} {
		dir, _ := configured(t, nil)
		log := &memLog{}
		log.fill(t, 50)
		headAt(t, opened(t, options(t, dir, log)), 50)
		names := []string{saltsName}
		if stateToo {
			names = append(names, stateName)
		}
		for _, name := range names {
			if err := os.Remove(filepath.Join(dir, dirName, name)); err != nil {
				t.Fatal(err)
			}
		}
		log.fill(t, 10) // of the same run
		_, err := Open(t.Context(), options(t, dir, log))
		fails(t, err, ErrDamaged, "no salts of run")
		if _, err := read(dir, saltsName); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("new salts were written: %v", err)
		}
	}
}

// TestStateForged removes a run from the saved state without the key: the next owner does
// not use it.
func TestStateForged(t *testing.T) {
	dir, _ := configured(t, nil)
	log := &memLog{}
	log.fill(t, 300)
	k := opened(t, options(t, dir, log))
	headAt(t, k, 300)
	want := k.runs.Rows()
	text, err := read(dir, stateName)
	if err != nil {
		t.Fatal(err)
	}
	if again := opened(t, options(t, dir, log)); again.saved != 300 {
		t.Errorf("the state is not used: %d", again.saved)
	}
	line, signed, _ := bytes.Cut(text, []byte("\n"))
	var s state
	if err := json.Unmarshal(line, &s); err != nil {
		t.Fatal(err)
	}
	s.Rows = s.Rows[1:]
	if line, err = json.Marshal(s); err != nil {
		t.Fatal(err)
	}
	for _, forged := range [][]byte{append(append(line, '\n'), signed...), line} {
		if err := os.WriteFile(filepath.Join(dir, dirName, stateName), forged, 0o600); err != nil {
			t.Fatal(err)
		}
		again := opened(t, options(t, dir, log))
		if got := again.runs.Rows(); !slices.Equal(got, want) || again.saved != 0 {
			t.Errorf("rows %v, want %v; state of %d used", got, want, again.saved)
		}
	}
}

// TestTaken: an owner whose store another has taken writes nothing more.
func TestTaken(t *testing.T) {
	dir, _ := configured(t, nil)
	log := &memLog{}
	log.fill(t, 300)
	lost := make(chan struct{})
	o := options(t, dir, log)
	o.Lost = lost
	k := opened(t, o)
	headAt(t, k, 150)
	if err := k.foldUntil(t.Context(), 200); err != nil {
		t.Fatal(err)
	}
	before := files(t, dir)
	heads, err := read(dir, headsName)
	if err != nil {
		t.Fatal(err)
	}
	close(lost)
	fails(t, k.foldUntil(t.Context(), 300), errTaken)
	fails(t, k.makeHead(t.Context()), errTaken)
	fails(t, k.end(t.Context()), errTaken)
	k.Keep(t.Context()) // ends
	if now, err := read(dir, headsName); err != nil || string(now) != string(heads) || !maps.Equal(files(t, dir), before) {
		t.Errorf("it wrote heads %q, had %q (%v), or other files", now, heads, err)
	}
}

// TestHeadsOfTwo: the newest head is the largest in heads. Two roots of one size are
// damage.
func TestHeadsOfTwo(t *testing.T) {
	dir, _ := configured(t, nil)
	log := &memLog{}
	log.fill(t, 50)
	k := opened(t, options(t, dir, log))
	headAt(t, k, 20)
	late, err := read(dir, headsName) // that a paused owner appends later
	if err != nil {
		t.Fatal(err)
	}
	headAt(t, k, 50)
	path := filepath.Join(dir, dirName, headsName)
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, append(text, late...), 0o600); err != nil {
		t.Fatal(err)
	}
	if k := opened(t, options(t, dir, log)); k.head.Size != 50 {
		t.Errorf("newest head %v, want size 50", k.head)
	}
	fork, err := json.Marshal(headLine{20, audit.Hash{1}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, append(text, append(fork, '\n')...), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = Open(t.Context(), options(t, dir, log))
	fails(t, err, ErrDamaged, "two heads of size 20", audit.Hash{1}.String())
}

// TestHeadsShortened: heads does not grow without bound while an owner lives.
func TestHeadsShortened(t *testing.T) {
	dir, _ := configured(t, nil)
	log := &memLog{}
	log.fill(t, 20)
	k := opened(t, options(t, dir, log))
	var had []byte
	for i := int64(10); len(had) <= headsMost-128; i++ {
		line, err := json.Marshal(headLine{i, audit.Hash{byte(i)}})
		if err != nil {
			t.Fatal(err)
		}
		had = append(append(had, line...), '\n')
	}
	if err := os.WriteFile(filepath.Join(dir, dirName, headsName), had, 0o600); err != nil {
		t.Fatal(err)
	}
	newest, err := k.newest()
	for n := 0; err == nil && n < 3; n++ {
		newest.Size++
		err = k.list(newest)
	}
	if err != nil {
		t.Fatal(err)
	}
	text, err := read(dir, headsName)
	if err != nil || len(text) != k.listed || len(text) > headsMost/2+256 {
		t.Errorf("%d bytes of heads, counted %d: %v", len(text), k.listed, err)
	}
	if h, err := k.newest(); err != nil || h != newest {
		t.Errorf("newest %v, want %v (%v)", h, newest, err)
	}
}

// kept runs Keep until the test ends.
func kept(t *testing.T, k *Keeper) (done chan struct{}) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done = make(chan struct{})
	go func() {
		k.Keep(ctx)
		close(done)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return done
}

// TestWantOnce: while a witness does not answer, a request leads to one audit.sealed,
// and to a head when the witness answers. A process that stops waiting takes its request
// back.
func TestWantOnce(t *testing.T) {
	dir, c := configured(t, nil)
	witness, vkey := witnessOf(t, c)
	var turns atomic.Int64
	up := make(chan struct{})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-up:
			witness.ServeHTTP(w, r)
		default:
			turns.Add(1)
			http.Error(w, "down", http.StatusServiceUnavailable)
		}
	}))
	t.Cleanup(server.Close)
	c.Policy, c.Optional = "witness w "+vkey+" "+server.URL+"\nquorum w\n", true
	if err := Configure(dir, c); err != nil {
		t.Fatal(err)
	}
	log := &memLog{}
	log.fill(t, 20)
	k := opened(t, options(t, dir, log))
	kept(t, k)
	b, err := OpenBook(dir, log)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan error, 1)
	go func() {
		_, _, err := b.Want(ctx)
		gone <- err
	}()
	soon(t, "a second turn that asks the witness", func() bool { return turns.Load() > 1 })
	if n := log.sealedIn(); n != 1 {
		t.Errorf("%d decisions audit.sealed while the witness is down, want 1", n)
	}
	cancel()
	if err := <-gone; err == nil {
		t.Error("a head without the witness")
	}
	if _, err := read(dir, wantName); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the request was not taken back: %v", err)
	}
	close(up)
	late, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, h, err := b.Want(late)
	if err != nil {
		t.Fatal(err)
	}
	if _, s, err := b.lastSealed(t.Context(), h); err != nil || s.Size < 20 {
		t.Errorf("sealed %+v, %v", s, err)
	}
}

// witnessOf makes a witness of the log of a ledger.
func witnessOf(t *testing.T, c Config) (*Witness, string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "witness.key")
	vkey, err := NewKey(file, "example.org/witness")
	if err == nil {
		vkey, err = CosignatureKey(vkey)
	}
	if err != nil {
		t.Fatal(err)
	}
	w, err := NewWitness(filepath.Join(t.TempDir(), "witness"), file, []string{c.Key}, func(err error) { t.Log(err) })
	if err != nil {
		t.Fatal(err)
	}
	return w, vkey
}

// soon waits for a condition.
func soon(t *testing.T, what string, is func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for !is() {
		if !pause(ctx, time.Millisecond) {
			t.Fatalf("%s: not within a minute", what)
		}
	}
}

// TestHalted: when the log contradicts the ledger, the keeper ends at once, tells why, and
// a process that wants a head does not wait.
func TestHalted(t *testing.T) {
	dir, _ := configured(t, nil)
	log := &memLog{}
	log.fill(t, 20)
	k := opened(t, options(t, dir, log))
	headAt(t, k, 20)
	// Another owner's tile.
	path := filepath.Join(dir, dirName, audit.TilePath(0, 0, audit.TileWidth))
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte("other"), 0o600)); err != nil {
		t.Fatal(err)
	}
	done := kept(t, k)
	log.fill(t, 300)
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatal("the keeper continues")
	}
	b, err := OpenBook(dir, log)
	if err != nil {
		t.Fatal(err)
	}
	_, _, err = b.Want(t.Context())
	fails(t, err, ErrDamaged, "other bytes")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	opened(t, options(t, dir, log))
	if why, err := b.Halted(); err != nil || why != "" {
		t.Errorf("halted after another owner opened it: %q, %v", why, err)
	}
}

// TestAnchor deletes the ledger's heads, notes, state and tiles, and rewrites or cuts the
// log: the head next to the key stops the next owner before it signs.
func TestAnchor(t *testing.T) {
	dir, c := configured(t, nil)
	log := &memLog{}
	log.fill(t, 300)
	k := opened(t, options(t, dir, log))
	headAt(t, k, 280)
	want := k.head
	wipe := func() { // as an attacker does, and tiles that Open made of another log

		t.Helper()
		for _, name := range []string{headsName, checkpointName, stateName, "tile"} {
			if err := os.RemoveAll(filepath.Join(dir, dirName, name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	wipe()
	changed := &memLog{list: slices.Clone(log.list)}
	changed.list[100].Data = bytes.Replace(changed.list[100].Data, []byte("1"), []byte("2"), 1)
	_, err := Open(t.Context(), options(t, dir, changed))
	fails(t, err, ErrDamaged, "the log was rewritten", want.Root.String())
	wipe()
	_, err = Open(t.Context(), options(t, dir, &memLog{list: log.list[:200]}))
	fails(t, err, ErrRolledBack, "signed a head of size 280", "the log has 200 events")
	// The same log, with and without the head that lists lost.
	if k := opened(t, options(t, dir, log)); k.size() != 280 {
		t.Errorf("folded %d", k.size())
	}
	headAt(t, opened(t, options(t, dir, log)), 290)
	// A head that was listed and not anchored, as after a crash.
	text, err := json.Marshal(anchored{c.Key, want.Size, want.Root})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(c.Signer+".head", text, 0o600); err != nil {
		t.Fatal(err)
	}
	headAt(t, opened(t, options(t, dir, log)), 300)
	if text, err = json.Marshal(anchored{c.Key, want.Size, audit.Hash{1}}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(c.Signer+".head", text, 0o600); err != nil {
		t.Fatal(err)
	}
	_, err = Open(t.Context(), options(t, dir, log))
	fails(t, err, ErrDamaged, "the log was rewritten", audit.Hash{1}.String())
	// Another key in the same file.
	c.Key += "x"
	if a, err := readAnchor(c); err != nil || a.Size != 0 {
		t.Errorf("the anchor of another key: %+v, %v", a, err)
	}
}

// TestTwoCopies: two copies of a store that are open at the same time and use one key do
// not both sign.
func TestTwoCopies(t *testing.T) {
	dir, _ := configured(t, nil)
	log := &memLog{}
	log.fill(t, 20)
	first := opened(t, options(t, dir, log))
	headAt(t, first, 20)
	copied := filepath.Join(t.TempDir(), "copy")
	if err := errors.Join(os.Mkdir(copied, 0o700), Copy(dir, copied, 20)); err != nil {
		t.Fatal(err)
	}
	other := &memLog{list: slices.Clone(log.list)}
	second := opened(t, options(t, copied, other))
	log.fill(t, 10)
	other.fill(t, 5)
	headAt(t, second, 25)
	if err := first.foldUntil(t.Context(), 30); err != nil {
		t.Fatal(err)
	}
	fails(t, first.makeHead(t.Context()), ErrDamaged, "two copies of the store use one key", second.head.Root.String())
	if _, h, err := first.Checkpoint(); err != nil || h.Size != 20 {
		t.Errorf("published %v, %v", h, err)
	}
}
