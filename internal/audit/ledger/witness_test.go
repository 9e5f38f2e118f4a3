package ledger

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	fnote "github.com/transparency-dev/formats/note"
	"go.uber.org/goleak"
	"golang.org/x/mod/sumdb/note"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// tape is a log in memory.
type tape struct {
	mu   sync.Mutex
	list []events.Message
}

var _ Log = (*tape)(nil)

// record appends n events.
func (l *tape) record(t *testing.T, n int) {
	t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for range n {
		f, err := events.NewFact(events.Stamp{ID: fmt.Sprint("id-", len(l.list)), Source: "test", Time: time.Unix(1, 0)},
			events.Scope{Run: "run", Trial: "main", Actor: events.Rank(0)}, events.Metrics{Attempt: 1, Iteration: 1, Step: 1})
		if err != nil {
			t.Fatal(err)
		}
		l.list = append(l.list, events.Encode(f.Event))
	}
}

// Walk implements [Log].
func (l *tape) Walk(ctx context.Context, from, until uint64, each func(events.Message, uint64, time.Time) error) error {
	for at := from; until == 0 || at <= until; {
		last, _ := l.Last(ctx)
		if at > last {
			if !pause(ctx, time.Millisecond) {
				return ctx.Err()
			}
			continue
		}
		l.mu.Lock()
		m := l.list[at-1]
		l.mu.Unlock()
		if err := each(m, at, time.Unix(1700000000, 0)); err != nil {
			return err
		}
		at++
	}
	return nil
}

// Last implements [Log].
func (l *tape) Last(context.Context) (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return uint64(len(l.list)), nil
}

// LaneEnd implements [Log].
func (*tape) LaneEnd(context.Context, events.Aggregate) (uint64, error) { return 0, nil }

// Decide implements [Log].
func (l *tape) Decide(_ context.Context, d events.Decision, _ uint64) (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, events.Encode(d.Event))
	return uint64(len(l.list)), nil
}

// newLedger turns the evidence of an empty directory on.
func newLedger(t *testing.T) (dir string, c Config) {
	t.Helper()
	dir = t.TempDir()
	c, err := Keygen(KeygenOptions{Store: dir, File: filepath.Join(t.TempDir(), "key"), Origin: "example.org/log"})
	if err != nil {
		t.Fatal(err)
	}
	return dir, c
}

// sameKey configures a second directory for the same log, with a copy of the key.
func sameKey(t *testing.T, c Config) (string, Config) {
	t.Helper()
	text, err := os.ReadFile(c.Signer)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	c.Signer = filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(c.Signer, text, 0o600); err != nil {
		t.Fatal(err)
	}
	setPolicy(t, dir, c, noWitness, false)
	return dir, c
}

func setPolicy(t *testing.T, dir string, c Config, policy string, optional bool) {
	t.Helper()
	c.Policy, c.Optional = policy, optional
	if err := Configure(dir, c); err != nil {
		t.Fatal(err)
	}
}

// tryOpen opens the ledger.
func tryOpen(t *testing.T, dir string, log Log) (*Keeper, error) {
	t.Helper()
	k, err := Open(t.Context(), Options{
		Store: dir, Log: log, Logger: slog.New(slog.NewTextHandler(t.Output(), nil)),
		Stamp: func() events.Stamp {
			return events.Stamp{ID: fmt.Sprint("sealed-", time.Now().UnixNano()), Source: "owner", Time: time.Unix(1, 0)}
		},
	})
	if err == nil {
		t.Cleanup(k.witnesses.close)
	}
	return k, err
}

func mustOpen(t *testing.T, dir string, log Log) *Keeper {
	t.Helper()
	k, err := tryOpen(t, dir, log)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// head folds the whole log and makes a head.
func head(t *testing.T, k *Keeper) error {
	t.Helper()
	last, err := k.log.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := k.foldUntil(t.Context(), last); err != nil {
		t.Fatal(err)
	}
	return k.makeHead(t.Context())
}

// newWitness returns a witness that knows logs, its key in policies, and its signer.
func newWitness(t *testing.T, name string, logs ...string) (*Witness, string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "witness.key")
	key, err := NewKey(file, name)
	if err != nil {
		t.Fatal(err)
	}
	if key, err = CosignatureKey(key); err != nil {
		t.Fatal(err)
	}
	w, err := NewWitness(filepath.Join(t.TempDir(), "heads"), file, logs, func(error) {})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = w.Close() })
	return w, key
}

// listen serves a handler on loopback.
func listen(t *testing.T, h http.Handler) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.URL
}

// wants requires an error that matches and has the texts.
func wants(t *testing.T, err, want error, texts ...string) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Fatalf("%v, want %v", err, want)
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Fatalf("%v, want %q in it", err, text)
		}
	}
}

// kindOf returns the kind that an error declares.
func kindOf(err error) problem.Kind {
	if kinds := problem.Kinds(err); len(kinds) > 0 {
		return kinds[0]
	}
	return ""
}

// transport answers requests without a network.
type transport func(*http.Request) (*http.Response, error)

// RoundTrip implements [http.RoundTripper].
func (f transport) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// direct passes requests to a handler.
func direct(h http.Handler) *http.Client {
	return &http.Client{Transport: transport(func(r *http.Request) (*http.Response, error) {
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, r)
		return rec.Result(), nil
	})}
}

// TestWitnessAnswers sends a head to a witness that answers in each way that C2SP
// tlog-witness has, and in others.
func TestWitnessAnswers(t *testing.T) {
	_, c := newLedger(t)
	signer, err := c.signer(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	h := audit.Head{Origin: c.Origin, Size: 7, Root: audit.Hash{1}}
	signed, err := audit.Sign(h, signer)
	if err != nil {
		t.Fatal(err)
	}
	cosigner, key := cosignerOf(t, "example.org/w")
	stranger, _ := cosignerOf(t, "example.org/stranger")
	cosignature := func(by note.Signer, text string) string {
		n, err := note.Sign(&note.Note{Text: text}, by)
		if err != nil {
			t.Fatal(err)
		}
		return string(n[strings.LastIndex(string(n), "\n\n")+2:])
	}
	good, foreign := cosignature(cosigner, h.Text()), cosignature(stranger, h.Text())
	other := string(signed) + "more\n" // what a note is whose text the answer extends
	for what, test := range map[string]struct {
		status     int
		kind, body string
		lines      string
		size       int64 // of a [knowsError]
		refused    bool  // a [refusedError]
		text       string
	}{
		"cosigned":              {status: 200, body: good, lines: good},
		"cosigned twice":        {status: 200, body: good + good, lines: good},
		"with other signatures": {status: 200, body: foreign + good + "— example.org/log AAAAAAA=\n", lines: good},
		"only others":           {status: 200, body: foreign, text: "does not verify"},
		"nothing":               {status: 200, text: "does not verify"},
		"no lines":              {status: 200, body: "<html>welcome</html>", text: "does not verify"},
		"another note":          {status: 200, body: "more\n\n" + cosignature(cosigner, other), text: "does not verify"},
		"size":                  {status: 409, kind: sizeType, body: "5\n", size: 5, text: "knows a head of size 5"},
		"size with parameters":  {status: 409, kind: "Text/X.tlog.size; charset=utf-8", body: "5\n", size: 5, text: "knows a head of size 5"},
		"negative size":         {status: 409, kind: sizeType, body: "-5\n", text: "answered the size"},
		"no size":               {status: 409, kind: sizeType, body: "many\n", text: "answered the size"},
		"fork":                  {status: 409, kind: "text/plain", body: "conflict", refused: true, text: "409 Conflict"},
		"malformed":             {status: 400, body: "no\n", refused: true, text: `400 Bad Request ("no")`},
		"another key":           {status: 403, refused: true, text: "another key for this log"},
		"unknown log":           {status: 404, refused: true, text: "register the log's key there first"},
		"proof":                 {status: 422, refused: true, text: "422"},
		"broken":                {status: 500, body: strings.Repeat("x", 1000), refused: true, text: "500"},
		"elsewhere":             {status: 307, refused: true, text: "307"},
	} {
		t.Run(what, func(t *testing.T) {
			client := direct(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
				if test.kind != "" {
					rw.Header().Set("Content-Type", test.kind)
				}
				rw.Header().Set("Location", "http://example.org/elsewhere")
				rw.WriteHeader(test.status)
				_, _ = io.WriteString(rw, test.body)
			}))
			client.CheckRedirect = newClient(t.Context()).CheckRedirect
			w := &witnessed{url: "http://w.example.org/add-checkpoint", key: key, client: client}
			lines, err := w.post(t.Context(), 3, nil, signed)
			if string(lines) != test.lines || (err == nil) != (test.lines != "") {
				t.Fatalf("lines %q, %v; want %q", lines, err, test.lines)
			}
			var knows *knowsError
			if errors.As(err, &knows) != (test.size != 0) || knows != nil && knows.size != test.size {
				t.Errorf("%v, want size %d", err, test.size)
			}
			var refused *refusedError
			if errors.As(err, &refused) != test.refused {
				t.Errorf("%v, want refused: %v", err, test.refused)
			}
			if err != nil && (!strings.Contains(err.Error(), test.text) || !strings.Contains(err.Error(), w.url) || len(err.Error()) > 500) {
				t.Errorf("%v, want %q in it", err, test.text)
			}
		})
	}
}

func cosignerOf(t *testing.T, name string) (note.Signer, note.Verifier) {
	t.Helper()
	private, public, err := newPair(name)
	if err != nil {
		t.Fatal(err)
	}
	s, err := fnote.NewSignerForCosignatureV1(private)
	if err != nil {
		t.Fatal(err)
	}
	v, err := fnote.NewVerifierForCosignatureV1(public)
	if err != nil {
		t.Fatal(err)
	}
	return s, v
}

// TestForks: only an answer to a head that is compared with an older one shows a fork.
func TestForks(t *testing.T) {
	for _, test := range []struct {
		status    int
		old, size int64
		want      bool
	}{
		{409, 5, 5, true},
		{409, 5, 7, false},
		{409, 0, 0, false},
		{409, 0, 5, false},
		{422, 5, 7, true},
		{422, 5, 5, false},
		{422, 0, 7, false},
		{404, 5, 7, false},
		{400, 5, 5, false},
	} {
		if got := (&refusedError{status: test.status}).forks(test.old, test.size); got != test.want {
			t.Errorf("%+v: %v", test, got)
		}
	}
}

// TestWitnessHostile publishes a head through a witness that adds lines to its answer: they
// are not published.
func TestWitnessHostile(t *testing.T) {
	dir, c := newLedger(t)
	w, key := newWitness(t, "example.org/w", c.Key)
	url := listen(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		rec := httptest.NewRecorder()
		w.ServeHTTP(rec, r)
		if rec.Code == http.StatusOK {
			_, _ = io.WriteString(rw, "— example.org/log "+base64.StdEncoding.EncodeToString(make([]byte, 68))+"\n")
			_, _ = rw.Write(rec.Body.Bytes())
			_, _ = io.WriteString(rw, strings.Repeat("— example.org/noise "+base64.StdEncoding.EncodeToString(make([]byte, 40))+"\n", 50))
			return
		}
		rw.Header().Set("Content-Type", rec.Header().Get("Content-Type"))
		rw.WriteHeader(rec.Code)
		_, _ = rw.Write(rec.Body.Bytes())
	}))
	setPolicy(t, dir, c, "witness w "+key+" "+url+"\nquorum w\n", false)
	log := &tape{}
	log.record(t, 3)
	k := mustOpen(t, dir, log)
	if err := head(t, k); err != nil {
		t.Fatal(err)
	}
	signed, h, err := k.Checkpoint()
	if err != nil || h.Size != 3 {
		t.Fatalf("%v, %v", h, err)
	}
	if n := bytes.Count(signed, []byte("\n— ")); n != 2 || bytes.Contains(signed, []byte("noise")) {
		t.Errorf("the note has %d signatures, want those of the log and the witness:\n%s", n, signed)
	}
}

// TestWitnessFork: a copy of the store, whose log became another one, is refused although
// it is longer than what the witness knows, and one of equal length. So is one whose fork is
// noticed while it is open.
func TestWitnessFork(t *testing.T) {
	dir, c := newLedger(t)
	w, key := newWitness(t, "example.org/w", c.Key)
	var down atomic.Bool
	url := listen(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if down.Load() {
			http.Error(rw, "down", http.StatusServiceUnavailable)
			return
		}
		w.ServeHTTP(rw, r)
	}))
	policy := "witness w " + key + " " + url + "\nquorum w\n"
	setPolicy(t, dir, c, policy, false)
	log := &tape{}
	log.record(t, 20)
	if err := head(t, mustOpen(t, dir, log)); err != nil {
		t.Fatal(err)
	}
	log.record(t, 5)
	if err := head(t, mustOpen(t, dir, log)); err != nil { // it continues what the witness knows
		t.Fatal(err)
	}
	mustOpen(t, dir, log)

	for _, size := range []int{25, 30} {
		fork, c := sameKey(t, c)
		log := &tape{}
		log.record(t, size)
		k := mustOpen(t, fork, log)
		if err := head(t, k); err != nil {
			t.Fatal(err)
		}
		early, err := k.Since(t.Context(), audit.Head{Origin: c.Origin, Size: 25}, k.head)
		if err != nil {
			t.Fatal(err)
		}
		setPolicy(t, fork, c, policy, false)
		_, err = tryOpen(t, fork, log)
		wants(t, err, ErrDamaged, "cosigned another log of size 25", early.Root.String())
		if errors.Is(err, ErrRolledBack) {
			t.Errorf("%v is no rollback", err)
		}

		down.Store(true)
		setPolicy(t, fork, c, policy, true)
		k = mustOpen(t, fork, log)
		down.Store(false)
		log.record(t, 1)
		k.witnesses.list[0].until = time.Time{}
		err = head(t, k)
		wants(t, err, ErrDamaged, "cosigned another log of size 25", early.Root.String())
		wants(t, err, audit.ErrPolicy)
	}
}

// TestWitnessRolledBack: an older state is refused, and its next step is true: under a new
// origin, whose key the witness must know, the log continues.
func TestWitnessRolledBack(t *testing.T) {
	dir, c := newLedger(t)
	w, key := newWitness(t, "example.org/w", c.Key)
	var known atomic.Pointer[Witness]
	known.Store(w)
	url := listen(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { known.Load().ServeHTTP(rw, r) }))
	policy := "witness w " + key + " " + url + "\nquorum w\n"
	setPolicy(t, dir, c, policy, false)
	log := &tape{}
	log.record(t, 20)
	if err := head(t, mustOpen(t, dir, log)); err != nil {
		t.Fatal(err)
	}
	later, err := read(dir, checkpointName)
	if err != nil {
		t.Fatal(err)
	}
	older, c := sameKey(t, c)
	setPolicy(t, older, c, policy, false)
	log.list = log.list[:10]
	_, err = tryOpen(t, older, log)
	wants(t, err, ErrRolledBack, "knows a head of size 20", "--new-origin")
	o := KeygenOptions{Store: older, File: filepath.Join(t.TempDir(), "key"), Origin: "example.org/log"}
	if _, err = NewOrigin(o, nil); kindOf(err) != problem.NotFound || !strings.Contains(err.Error(), "--previous") {
		t.Errorf("without a note to quote: %v", err)
	}
	next, err := NewOrigin(o, later)
	if err != nil || next.Origin != "example.org/log/2" || next.Policy != policy {
		t.Fatalf("%+v, %v", next, err)
	}
	if _, err = tryOpen(t, older, log); kindOf(err) != problem.Unavailable || !strings.Contains(err.Error(), "register the log's key there first") {
		t.Errorf("with a witness that does not know the new key: %v", err)
	}
	if len(log.list) != 10 {
		t.Errorf("an event was appended: %d", len(log.list))
	}
	again, key2 := newWitness(t, "example.org/w", c.Key, next.Key)
	known.Store(again)
	setPolicy(t, older, next, "witness w "+key2+" "+url+"\nquorum w\n", false)
	if err := head(t, mustOpen(t, older, log)); err != nil {
		t.Error(err)
	}
	s, err := audit.ParseSealed(log.list[10], 11)
	if err != nil || s.Previous != string(later) || s.Key != next.Key {
		t.Errorf("the first event of the new origin: %+v, %v", s, err)
	}
}

// TestWitnessOptional opens a store while no witness gives a good answer. It opens only if
// witnesses are optional, and publishes nothing.
func TestWitnessOptional(t *testing.T) {
	for what, h := range map[string]http.Handler{
		"not there": nil,
		"unknown":   http.NotFoundHandler(),
		"broken":    http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) { http.Error(rw, "x", http.StatusInternalServerError) }),
		"hangs up":  http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }),
	} {
		t.Run(what, func(t *testing.T) {
			dir, c := newLedger(t)
			_, key := newWitness(t, "example.org/w", c.Key)
			url := "http://127.0.0.1:1"
			if h != nil {
				url = listen(t, h)
			}
			policy := "witness w " + key + " " + url + "\nquorum w\n"
			setPolicy(t, dir, c, policy, false)
			log := &tape{}
			log.record(t, 3)
			_, err := tryOpen(t, dir, log)
			if kindOf(err) != problem.Unavailable || !strings.Contains(err.Error(), "no witness answers") || !strings.Contains(err.Error(), url) {
				t.Errorf("%v, want one of %s", err, problem.Unavailable)
			}
			setPolicy(t, dir, c, policy, true)
			k := mustOpen(t, dir, log)
			k.witnesses.list[0].until = time.Time{}
			wants(t, head(t, k), audit.ErrPolicy, url)
			if _, _, err := k.Checkpoint(); !errors.Is(err, ErrOff) {
				t.Errorf("a head was published: %v", err)
			}
			// It is left alone for a while, and its error stays the reason.
			k.witnesses.list[0].until = time.Now().Add(time.Hour)
			k.witnesses.list[0].client = nil // a request would panic
			wants(t, head(t, k), audit.ErrPolicy, url)
		})
	}
}

// TestWitnessOneOfTwo: one witness that answers is enough to open, and one of a quorum of
// two is not enough to publish.
func TestWitnessOneOfTwo(t *testing.T) {
	dir, c := newLedger(t)
	w, key := newWitness(t, "example.org/w", c.Key)
	_, key2 := newWitness(t, "example.org/w2", c.Key)
	lines := "witness w " + key + " " + listen(t, w) + "\nwitness w2 " + key2 + " http://127.0.0.1:1\n"
	log := &tape{}
	log.record(t, 3)
	setPolicy(t, dir, c, lines+"group g all w w2\nquorum g\n", false)
	wants(t, head(t, mustOpen(t, dir, log)), audit.ErrPolicy, "127.0.0.1:1")
	setPolicy(t, dir, c, lines+"group g any w w2\nquorum g\n", false)
	if err := head(t, mustOpen(t, dir, log)); err != nil {
		t.Error(err)
	}
}

// TestWitnessesAtOnce: no witness answers before all are asked, and the request to a witness that
// never answers is cancelled when the others suffice.
func TestWitnessesAtOnce(t *testing.T) {
	dir, c := newLedger(t)
	log := &tape{}
	log.record(t, 3)
	var lines strings.Builder
	var arrived sync.WaitGroup
	all := make(chan struct{})
	arrived.Add(3)
	go func() { arrived.Wait(); close(all) }()
	for i := range 3 {
		w, key := newWitness(t, fmt.Sprint("example.org/w", i), c.Key)
		var first sync.Once
		fmt.Fprintf(&lines, "witness w%d %s %s\n", i, key, listen(t, http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body) // the server notices then that the client is gone
			if err != nil {
				return
			}
			r.Body = io.NopCloser(bytes.NewReader(body))
			first.Do(arrived.Done)
			select {
			case <-all:
				w.ServeHTTP(rw, r)
			case <-r.Context().Done():
			}
		})))
	}
	setPolicy(t, dir, c, lines.String()+"group g 2 w0 w1 w2\nquorum g\n", false)
	k := mustOpen(t, dir, log)
	if err := k.witnesses.failed(); err != nil {
		t.Errorf("not all witnesses have answered: %v", err)
	}
	why := make(chan error, 1)
	silent := k.witnesses.list[1]
	silent.client = &http.Client{Transport: transport(func(r *http.Request) (*http.Response, error) {
		<-r.Context().Done()
		why <- r.Context().Err()
		return nil, r.Context().Err()
	})}
	if err := head(t, k); err != nil {
		t.Fatal(err)
	}
	if err := <-why; !errors.Is(err, context.Canceled) {
		t.Errorf("the request to the silent witness ended by %v, want %v", err, context.Canceled)
	}
	if silent.last != nil {
		t.Errorf("a cancelled request counts as a failure: %v", silent.last)
	}
}

// TestWitnessNoLeak: after Keep, no goroutine is left, also none that connects to or waits
// for a witness which never answers.
func TestWitnessNoLeak(t *testing.T) {
	dir, c := newLedger(t)
	w, key := newWitness(t, "example.org/w", c.Key)
	_, key2 := newWitness(t, "example.org/silent", c.Key)
	silent, err := net.Listen("tcp", "127.0.0.1:0") // connects, and answers nothing
	if err != nil {
		t.Fatal(err)
	}
	url := listen(t, w)
	before := goleak.IgnoreCurrent() // also ignores the server, which still runs at the end
	lines := "witness w " + key + " " + url + "\nwitness silent " + key2 + " http://" + silent.Addr().String() + "\n"
	log := &tape{}
	log.record(t, 3)
	setPolicy(t, dir, c, lines+"group g any w silent\nquorum g\n", false)
	k, err := tryOpen(t, dir, log)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		k.Keep(ctx)
	}()
	for h := (audit.Head{}); h.Size < 3; {
		if _, h, err = k.Checkpoint(); err != nil && !errors.Is(err, ErrOff) {
			t.Fatal(err)
		}
		if !pause(t.Context(), time.Millisecond) {
			t.Fatal("no head")
		}
	}
	cancel()
	<-done
	goleak.VerifyNone(t, before)
	if err := silent.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestRest lets a witness rest longer with each failure, up to a limit.
func TestRest(t *testing.T) {
	now, bad := time.Unix(1000, 0), errors.New("bad")
	var r rest
	for i, want := range []time.Duration{1, 2, 4, 8, 16, 30, 30} {
		r.after(bad, now)
		if got := r.until.Sub(now); got != want*time.Second || !r.resting(now) || r.resting(r.until) {
			t.Errorf("failure %d: it rests %v, want %v s", i+1, got, int64(want))
		}
	}
	for range 100 {
		r.after(bad, now)
	}
	if got := r.until.Sub(now); got != restMost {
		t.Errorf("it rests %v", got)
	}
	if r.after(nil, now); r.resting(now) || r.times != 0 {
		t.Error("it rests after an answer")
	}
}

// TestKeyPrivate opens a ledger whose key is not there, is readable by others, is a link or
// belongs to another user.
func TestKeyPrivate(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test gives files to another user: run it as root")
	}
	for what, test := range map[string]struct {
		change  func(path string) error
		refused string // "": it opens, without the key
	}{
		"missing":                   {os.Remove, ""},
		"another user's":            {func(path string) error { return os.Chown(path, 20002, -1) }, ""},
		"group-readable":            {func(path string) error { return os.Chmod(path, 0o640) }, "chmod 600"},
		"world-readable":            {func(path string) error { return os.Chmod(path, 0o604) }, "chmod 600"},
		"a link":                    {func(path string) error { return errors.Join(os.Rename(path, path+"2"), os.Symlink(path+"2", path)) }, "symbolic link"},
		"of another user, readable": {func(path string) error { return errors.Join(os.Chown(path, 20002, -1), os.Chmod(path, 0o644)) }, "chmod 600"},
	} {
		t.Run(what, func(t *testing.T) {
			dir, c := newLedger(t)
			if err := test.change(c.Signer); err != nil {
				t.Fatal(err)
			}
			k, err := tryOpen(t, dir, &tape{})
			switch {
			case test.refused != "":
				wants(t, err, fs.ErrPermission, c.Signer, test.refused)
			case err != nil || k.signer != nil:
				t.Errorf("%v, want a ledger without a key", err)
			}
		})
	}
}

// TestKeygen refuses names that notes cannot have, and leaves no key file behind where it
// fails.
func TestKeygen(t *testing.T) {
	for _, name := range []string{"", "a b", "a+b", "a\u00a0b", "a\rb", "a\nb", "a\tb", "a\x1b[31m", "a\u202eb", "a\xffb"} {
		dir, file := t.TempDir(), filepath.Join(t.TempDir(), "key")
		if _, err := Keygen(KeygenOptions{Store: dir, File: file, Origin: name}); kindOf(err) != problem.Invalid || On(dir) {
			t.Errorf("%q: %v, on: %v", name, err, On(dir))
		}
		if _, err := NewKey(file, name); kindOf(err) != problem.Invalid {
			t.Errorf("%q as a witness: %v", name, err)
		}
		if _, err := os.Lstat(file); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%q: key file: %v", name, err)
		}
	}
	dir, file := t.TempDir(), filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(filepath.Join(dir, dirName), nil, 0o600); err != nil { // where the directory would be
		t.Fatal(err)
	}
	if _, err := Keygen(KeygenOptions{Store: dir, File: file, Origin: "example.org/log"}); err == nil {
		t.Error("it configured a store without a place for it")
	}
	if _, err := os.Lstat(file); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("key file: %v", err)
	}
	dir, c := newLedger(t)
	if _, err := Keygen(KeygenOptions{Store: dir, File: c.Signer + "2", Origin: "example.org/log"}); err == nil || !strings.Contains(err.Error(), "already") {
		t.Errorf("a second key: %v", err)
	}
}

// TestSetWitnesses configures witnesses: those that do not know the log, or do not answer,
// change nothing.
func TestSetWitnesses(t *testing.T) {
	dir, c := newLedger(t)
	knowing, key := newWitness(t, "example.org/w", c.Key)
	unknowing, key2 := newWitness(t, "example.org/w2")
	good := "witness w " + key + " " + listen(t, knowing) + "\n"
	unknown := "witness w2 " + key2 + " " + listen(t, unknowing) + "\n"
	away := "witness w2 " + key2 + " http://127.0.0.1:1\n"
	_, other := newLedger(t)
	for _, test := range []struct {
		policy   string
		optional bool
		want     string // "": it is configured
	}{
		{unknown + "quorum w2\n", false, "register the log's key there first"},
		{unknown + "quorum w2\n", true, "register the log's key there first"},
		{good + unknown + "group g any w w2\nquorum g\n", true, "register the log's key there first"},
		{good + away + "group g any w w2\nquorum g\n", false, "127.0.0.1:1"},
		{good + "quorum x\n", false, "not found"},
		{"log " + other.Key + "\n" + good + "quorum w\n", false, "of other logs"},
		{good + away + "group g any w w2\nquorum g\n", true, ""},
		{"log " + c.Key + "\n" + good + "quorum w\n", false, ""},
		{"", true, ""},
	} {
		had, err := ReadConfig(dir)
		if err != nil {
			t.Fatal(err)
		}
		states, err := SetWitnesses(t.Context(), WitnessesOptions{Store: dir, Policy: test.policy, Optional: test.optional})
		now, rerr := ReadConfig(dir)
		if rerr != nil {
			t.Fatal(rerr)
		}
		if test.want != "" {
			if err == nil || !strings.Contains(err.Error(), test.want) || !reflect.DeepEqual(now, had) {
				t.Errorf("%q: %v, want %q; changed: %v", test.policy, err, test.want, !reflect.DeepEqual(now, had))
			}
			continue
		}
		want := had
		if want.Optional = test.optional; test.policy != "" {
			want.Policy = strings.TrimPrefix(test.policy, "log "+c.Key+"\n")
		}
		answered := 0
		for _, s := range states {
			if s.Error == "" {
				answered++
			}
		}
		if err != nil || !reflect.DeepEqual(now, want) || answered != 1 {
			t.Errorf("%q: %+v, %v: %+v, want %+v", test.policy, states, err, now, want)
		}
	}
	// The witness knows a head by now.
	log := &tape{}
	log.record(t, 3)
	if err := head(t, mustOpen(t, dir, log)); err != nil {
		t.Fatal(err)
	}
	states, err := SetWitnesses(t.Context(), WitnessesOptions{Store: dir})
	if err != nil || len(states) != 1 || states[0].Size != 3 {
		t.Errorf("%+v, %v", states, err)
	}
	if states, err := SetWitnesses(t.Context(), WitnessesOptions{Store: dir, Policy: noWitness}); err != nil || len(states) != 0 {
		t.Errorf("%+v, %v", states, err)
	}
	if _, err := SetWitnesses(t.Context(), WitnessesOptions{Store: t.TempDir(), Policy: good + "quorum w\n"}); !errors.Is(err, ErrOff) {
		t.Errorf("%v, want %v", err, ErrOff)
	}
}

// TestWitnessWithoutKey: an owner that cannot read the key shows the published note.
func TestWitnessWithoutKey(t *testing.T) {
	dir, c := newLedger(t)
	w, key := newWitness(t, "example.org/w", c.Key)
	policy := "witness w " + key + " " + listen(t, w) + "\nquorum w\n"
	setPolicy(t, dir, c, policy, false)
	text, err := os.ReadFile(c.Signer)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(c.Signer); err != nil {
		t.Fatal(err)
	}
	log := &tape{}
	log.record(t, 3)
	_, err = tryOpen(t, dir, log)
	if kindOf(err) != problem.Unavailable || !strings.Contains(err.Error(), "signing key") {
		t.Errorf("nothing is published: %v", err)
	}
	setPolicy(t, dir, c, policy, true)
	mustOpen(t, dir, log)
	if err := os.WriteFile(c.Signer, text, 0o600); err != nil {
		t.Fatal(err)
	}
	setPolicy(t, dir, c, policy, false)
	if err := head(t, mustOpen(t, dir, log)); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(c.Signer); err != nil {
		t.Fatal(err)
	}
	log.record(t, 3)
	k := mustOpen(t, dir, log)
	if err := head(t, k); err != nil || k.signed {
		t.Errorf("%v, signed: %v", err, k.signed)
	}
	mustOpen(t, dir, log) // the listed head is newer than the published one
	if err := os.WriteFile(c.Signer, text, 0o600); err != nil {
		t.Fatal(err)
	}
	mustOpen(t, dir, log) // shows the listed head
	if err := os.Remove(c.Signer); err != nil {
		t.Fatal(err)
	}
	k = mustOpen(t, dir, log)
	if got := k.witnesses.list[0].size; got != 6 {
		t.Errorf("the witness knows size %d, want that of the head that was listed and not published", got)
	}
}

// TestSetAside also moves a ledger whose configuration is gone.
func TestSetAside(t *testing.T) {
	dir, _ := newLedger(t)
	if err := os.Remove(filepath.Join(dir, dirName, configName)); err != nil {
		t.Fatal(err)
	}
	to, err := SetAside(dir, "old")
	if err != nil || to != filepath.Join(dir, "audit.old") {
		t.Errorf("%q, %v", to, err)
	}
	if _, err := os.Lstat(filepath.Join(dir, dirName)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("audit/: %v", err)
	}
	if to, err := SetAside(dir, "old"); err != nil || to != "" {
		t.Errorf("again: %q, %v", to, err)
	}
}

// TestCopyTorn copies a ledger while its owner appends lines.
func TestCopyTorn(t *testing.T) {
	from, _ := newLedger(t)
	to := t.TempDir()
	for _, name := range []string{saltsName, headsName} {
		if err := os.WriteFile(filepath.Join(from, dirName, name), []byte(`{"size":1,"run":"r"}`+"\n"+`{"size":2`), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := Copy(from, to, 9); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{saltsName, headsName} {
		if got, err := read(to, name); err != nil || string(got) != `{"size":1,"run":"r"}`+"\n" {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

// TestNewWitness refuses a directory that another witness uses, and two keys of one log.
func TestNewWitness(t *testing.T) {
	dir, file := t.TempDir(), filepath.Join(t.TempDir(), "key")
	if _, err := NewKey(file, "example.org/w"); err != nil {
		t.Fatal(err)
	}
	_, c := newLedger(t)
	_, c2 := newLedger(t) // the same origin, another key
	w, err := NewWitness(dir, file, []string{c.Key}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewWitness(dir, file, []string{c.Key}, nil); kindOf(err) != problem.Locked || !strings.Contains(err.Error(), dir) {
		t.Errorf("a second witness in %s: %v", dir, err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if w, err = NewWitness(dir, file, []string{c.Key}, nil); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := NewWitness(dir, file, []string{c.Key, c2.Key}, nil); kindOf(err) != problem.Invalid || !strings.Contains(err.Error(), c.Origin) {
		t.Errorf("two keys of one log: %v", err)
	}
}

// TestWitnessStatuses sends requests to a witness that it refuses, each with the status of
// C2SP tlog-witness.
func TestWitnessStatuses(t *testing.T) {
	_, c := newLedger(t)
	_, stranger := newLedger(t)
	w, key := newWitness(t, "example.org/w", c.Key)
	verifier, err := fnote.NewVerifierForCosignatureV1(key)
	if err != nil {
		t.Fatal(err)
	}
	var leaves []audit.Hash
	grow := func(seed byte, n int) (tree audit.Tree) {
		leaves = leaves[:0]
		for i := range n {
			h := audit.EntryHash([]byte{seed, byte(i)})
			leaves = append(leaves, h)
			if err := tree.Append(h, func(int, int64, []byte) error { return nil }); err != nil {
				t.Fatal(err)
			}
		}
		return tree
	}
	sign := func(c Config, tree audit.Tree) string {
		s, err := c.signer(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		root, err := tree.Root()
		if err != nil {
			t.Fatal(err)
		}
		signed, err := audit.Sign(audit.Head{Origin: c.Origin, Size: tree.Size, Root: root}, s)
		if err != nil {
			t.Fatal(err)
		}
		return string(signed)
	}
	signRoot := func(root audit.Hash) string {
		s, err := c.signer(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		signed, err := audit.Sign(audit.Head{Origin: c.Origin, Root: root}, s)
		if err != nil {
			t.Fatal(err)
		}
		return string(signed)
	}
	// The tree of two entries is the root over their hashes, so the second hash is the
	// proof from size 1 to 2.
	one, two, fork := grow(1, 1), grow(1, 2), grow(2, 2)
	grow(1, 2)
	proof := base64.StdEncoding.EncodeToString(leaves[1][:]) + "\n"
	wrongHash := base64.StdEncoding.EncodeToString(make([]byte, 32)) + "\n"
	unknown := stranger
	unknown.Origin = "example.org/unknown"
	unknownText := strings.Replace(sign(c, one), c.Origin, unknown.Origin, 1)
	type request struct {
		what, body string
		status     int
		size       string
	}
	for _, r := range []request{
		{"no old size", sign(c, one), 400, ""},
		{"leading zero", "old 00\n\n" + sign(c, one), 400, ""},
		{"negative", "old -1\n\n" + sign(c, one), 400, ""},
		{"no hash", "old 0\nxyz\n\n" + sign(c, one), 400, ""},
		{"64 hashes", "old 0\n" + strings.Repeat(wrongHash, 64) + "\n" + sign(c, one), 400, ""},
		{"too large", "old 0\n\n" + sign(c, one) + strings.Repeat("— x AAAAAAA=\n", answerMost/8), 400, ""},
		{"unknown log", "old 0\n\n" + unknownText, 404, ""},
		{"another key", "old 0\n\n" + sign(stranger, one), 403, ""},
		{"altered", "old 0\n\n" + strings.Replace(sign(c, one), "\n1\n", "\n2\n", 1), 403, ""},
		{"old beyond the size", "old 2\n\n" + sign(c, one), 400, ""},
		{"empty with a root", "old 0\n\n" + signRoot(audit.Hash{1}), 422, ""},
		{"empty", "old 0\n\n" + signRoot(emptyRoot), 200, ""},
		{"proof for the first", "old 0\n" + proof + "\n" + sign(c, one), 422, ""},
		{"first", "old 0\n\n" + sign(c, one), 200, ""},
		{"again", "old 1\n\n" + sign(c, one), 200, ""},
		{"ask", "old 0\n\n" + sign(c, one), 409, "1\n"},
		{"empty again", "old 0\n\n" + signRoot(emptyRoot), 409, "1\n"},
		{"no proof", "old 1\n\n" + sign(c, two), 422, ""},
		{"wrong proof", "old 1\n" + wrongHash + "\n" + sign(c, two), 422, ""},
		{"fork", "old 1\n" + proof + "\n" + sign(c, fork), 422, ""},
		{"second", "old 1\n" + proof + "\n" + sign(c, two), 200, ""},
		{"fork of the second", "old 2\n\n" + sign(c, fork), 409, ""},
		{"old head", "old 1\n\n" + sign(c, one), 409, "2\n"},
	} {
		rec := httptest.NewRecorder()
		w.ServeHTTP(rec, httptest.NewRequest(http.MethodPost, "/add-checkpoint", strings.NewReader(r.body)))
		isSize := rec.Header().Get("Content-Type") == sizeType
		if rec.Code != r.status || isSize != (r.size != "") || isSize && rec.Body.String() != r.size {
			t.Errorf("%s: %d %s %q, want %d %q", r.what, rec.Code, rec.Header().Get("Content-Type"), rec.Body, r.status, r.size)
		}
		if r.status == http.StatusOK {
			_, signed, _ := strings.Cut(r.body, "\n\n")
			if n, err := note.Open(append([]byte(signed), rec.Body.Bytes()...), note.VerifierList(verifier)); err != nil || len(n.Sigs) != 1 {
				t.Errorf("%s: %v, %v", r.what, n, err)
			}
		}
	}
	forks, err := filepath.Glob(filepath.Join(w.dir, "*.fork"))
	if err != nil || len(forks) != 1 {
		t.Fatalf("evidence of the fork: %v, %v", forks, err)
	}
	text, err := os.ReadFile(forks[0])
	if err != nil || string(text) != sign(c, two)+"\n"+sign(c, fork) {
		t.Errorf("evidence of the fork: %q, %v", text, err)
	}
	for _, r := range []struct {
		method, path string
		status       int
	}{{http.MethodGet, "/add-checkpoint", 405}, {http.MethodPost, "/", 404}, {http.MethodPost, "/add-checkpoint/", 404}} {
		rec := httptest.NewRecorder()
		w.ServeHTTP(rec, httptest.NewRequest(r.method, r.path, http.NoBody))
		if rec.Code != r.status {
			t.Errorf("%s %s: %d, want %d", r.method, r.path, rec.Code, r.status)
		}
	}
	// A directory that cannot be written: the answer does not name it.
	if err := os.RemoveAll(w.dir); err != nil {
		t.Fatal(err)
	}
	rec := httptest.NewRecorder()
	w.ServeHTTP(rec, httptest.NewRequest(http.MethodPost, "/add-checkpoint", strings.NewReader("old 0\n\n"+sign(c, one))))
	if rec.Code != http.StatusInternalServerError || strings.Contains(rec.Body.String(), w.dir) || !strings.Contains(rec.Body.String(), "no such file") {
		t.Errorf("%d %q", rec.Code, rec.Body)
	}
}
