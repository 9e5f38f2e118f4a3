package store

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/audit/ledger"
)

// audited returns a new store with tamper evidence, and a policy for its verifiers.
func audited(t *testing.T, witnesses string) (dir, policy string) {
	t.Helper()
	dir = made(t)
	c, err := ledger.Keygen(ledger.KeygenOptions{
		Store: dir, File: filepath.Join(t.TempDir(), "key"), Origin: "example.org/test", Policy: witnesses,
	})
	if err != nil {
		t.Fatal(err)
	}
	return dir, "log " + c.Key + "\n" + c.Policy
}

// want makes a head with a new audit.sealed.
func want(t *testing.T, s *Store) ([]byte, audit.Head) {
	t.Helper()
	b, err := s.Ledger()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	signed, h, err := b.Want(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return signed, h
}

func iterations(t *testing.T, s *Store, run string, from, until int) {
	t.Helper()
	var facts []events.Fact
	for i := from; i <= until; i++ {
		f, err := metrics(NewID(), run, i)
		if err != nil {
			t.Fatal(err)
		}
		facts = append(facts, f)
	}
	for some := range slices.Chunk(facts, 500) { // an append has a deadline
		if _, err := s.Log.Append(t.Context(), some...); err != nil {
			t.Fatal(err)
		}
	}
}

func parsePolicy(t *testing.T, text string) audit.Policy {
	t.Helper()
	p, err := audit.ParsePolicy(text)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func exported(t *testing.T, s *Store, run string, since *audit.Head) []byte {
	t.Helper()
	b, err := s.Ledger()
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := b.Export(t.Context(), ledger.ExportOptions{Run: run, Since: since, Blobs: func(context.Context, events.Blob) ([]byte, error) {
		return nil, errors.New("no blob")
	}}, &out); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// TestAudit makes heads over more than two tiles and over three owners, and verifies the
// log, a proof and a bundle. Then it removes one event, one trial and the last decision
// from the bundle, which are three different errors, and flips bits of each part.
func TestAudit(t *testing.T) {
	dir, policy := audited(t, "")
	p := parsePolicy(t, policy)
	s := open(t, dir)
	iterations(t, s, "one", 1, 300)
	iterations(t, s, "two", 1, 20)
	must(t, s, "one", events.TrialCreated{}, events.TrialPaused{})
	if _, err := s.Log.Append(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, first := want(t, s)
	shut(t, s)
	s = open(t, dir)
	iterations(t, s, "one", 301, 600)
	f, err := events.NewFact(Stamp("test"), events.Scope{Run: "one", Trial: "other", Actor: events.Rank(0)}, events.Metrics{Attempt: 1, Iteration: 1, Step: 1})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Log.Append(t.Context(), f); err != nil {
		t.Fatal(err)
	}
	must(t, s, "one", events.TrialStopRequested{})
	_, h := want(t, s)
	b, err := s.Ledger()
	if err != nil {
		t.Fatal(err)
	}
	v, err := b.Verify(t.Context(), &first)
	if err != nil || len(v.Findings) > 0 || v.Events != h.Size || v.Sealed < 2 {
		t.Errorf("verified %+v, %v", v, err)
	}
	proof, err := b.Prove(t.Context(), 300, &first)
	if err != nil {
		t.Fatal(err)
	}
	if e, err := audit.VerifyProof(proof, p, true, &first); err != nil || e.Sequence != 300 || e.Size != h.Size {
		t.Errorf("proof of %d bytes: %+v, %v", len(proof), e, err)
	}
	if _, err := audit.VerifyProof(proof, p, false, nil); !errors.Is(err, audit.ErrPolicy) {
		t.Errorf("without a witness: %v, want %v", err, audit.ErrPolicy)
	}
	flips(t, "proof", proof, 7, func(b []byte) error { _, err := audit.VerifyProof(b, p, true, nil); return err })
	bundle := exported(t, s, "one", &first)
	if got, err := audit.VerifyBundle(bytes.NewReader(bundle), p, true, &first); err != nil || got.Trials != 2 || got.Events != 604 || got.Messages != 604 {
		t.Errorf("bundle: %+v, %v", got, err)
	}
	lines := bytes.SplitAfter(bundle, []byte("\n"))
	lines = lines[:len(lines)-1] // it ends with a line feed
	verify := func(lines [][]byte) error {
		_, err := audit.VerifyBundle(bytes.NewReader(bytes.Join(lines, nil)), p, true, nil)
		return err
	}
	less := func(drop func(i int, line []byte) bool) (out [][]byte) {
		for i, line := range lines {
			if i == 0 || !drop(i, line) {
				out = append(out, line)
			}
		}
		return out
	}
	trial := func(line []byte) string {
		var it audit.Item
		if err := json.Unmarshal(line, &it); err != nil {
			t.Fatal(err)
		}
		leaf, err := audit.ParseEntry(it.Entry)
		if err != nil {
			t.Fatal(err)
		}
		_, trial := audit.Trial(leaf.Subject)
		return trial
	}
	if err := verify(less(func(i int, _ []byte) bool { return i == 5 })); !errors.Is(err, audit.ErrMissingEvent) {
		t.Errorf("without one event: %v, want %v", err, audit.ErrMissingEvent)
	}
	if err := verify(less(func(_ int, line []byte) bool { return trial(line) == "other" })); !errors.Is(err, audit.ErrMissingTrial) {
		t.Errorf("without one trial: %v, want %v", err, audit.ErrMissingTrial)
	}
	if err := verify(less(func(i int, _ []byte) bool { return i == len(lines)-1 })); !errors.Is(err, audit.ErrMissingEnd) {
		t.Errorf("without the last decision: %v, want %v", err, audit.ErrMissingEnd)
	}
	// A head that leaves the trial out of the rows, too.
	var head audit.BundleHead
	if err := json.Unmarshal(lines[0], &head); err != nil {
		t.Fatal(err)
	}
	head.Rows = slices.DeleteFunc(head.Rows, func(r audit.PlacedRow) bool { return r.Run == "one" && r.Trial == "other" })
	without, err := json.Marshal(head)
	if err != nil {
		t.Fatal(err)
	}
	dropped := less(func(_ int, line []byte) bool { return trial(line) == "other" })
	dropped[0] = append(without, '\n')
	if err := verify(dropped); !errors.Is(err, audit.ErrMissingTrial) {
		t.Errorf("without one trial and its row: %v, want %v", err, audit.ErrMissingTrial)
	}
	flips(t, "bundle", bundle, 20011, func(b []byte) error {
		_, err := audit.VerifyBundle(bytes.NewReader(b), p, true, nil)
		return err
	})
}

// alike compares what a log yields to a follower that feeds a keeper with what it yields to
// any reader.
func alike(t *testing.T, s *Store) {
	t.Helper()
	last, err := s.Log.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	follow, end := iter.Pull2(fedLog{s.Log, &ledger.Keeper{}}.Read(t.Context(), 1, 0))
	defer end()
	for want, err := range s.Log.Read(t.Context(), 1, last) {
		if err != nil {
			t.Fatal(err)
		}
		if got, err, _ := follow(); err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("followed: %+v (%v), want %+v", got, err, want)
		}
	}
}

// TestAuditFed: the reader of the owner's views passes the events on to the evidence, which
// reads from the log itself only what comes too late.
func TestAuditFed(t *testing.T) {
	dir, _ := audited(t, "")
	s := open(t, dir)
	settled := func() (reread int64) {
		last, err := s.Log.Last(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, "all events hashed", func() bool {
			var hashed int64
			hashed, reread = s.Hashed()
			return hashed >= int64(last) //nolint:gosec // small
		})
		return reread
	}
	before := settled()
	const rounds, each = 10, 50
	for i := range rounds {
		iterations(t, s, "one", i*each+1, (i+1)*each)
		settled()
	}
	if reread := settled() - before; reread >= rounds*each {
		t.Errorf("the evidence has read all %d events itself: %d", rounds*each, reread)
	}
	alike(t, s)
	_, h := want(t, s)
	b, err := s.Ledger()
	if err != nil {
		t.Fatal(err)
	}
	if v, err := b.Verify(t.Context(), nil); err != nil || len(v.Findings) > 0 || v.Events != h.Size {
		t.Errorf("verified %+v, %v", v, err)
	}
}

// flips changes one bit of every n-th byte: none of the results may pass. Package audit does
// so with every byte of a small bundle.
func flips(t *testing.T, what string, data []byte, n int, verify func([]byte) error) {
	t.Helper()
	for i := 0; i < len(data); i += n {
		for _, bit := range []byte{1, 4} {
			flipped := slices.Clone(data)
			flipped[i] ^= bit
			if err := verify(flipped); err == nil {
				t.Errorf("%s: a flip of bit %d of byte %d (%q) passes", what, bit, i, data[max(0, i-8):min(len(data), i+8)])
			}
		}
	}
}

// TestAuditTile flips a bit of each file that answers are made from. Verify, and each answer
// that needs the file, must find it.
func TestAuditTile(t *testing.T) {
	dir, _ := audited(t, "")
	s := open(t, dir)
	iterations(t, s, "one", 1, 600)
	want(t, s)
	shut(t, s)
	var files []string
	for _, pattern := range []string{"tile/0/*", "tile/entries/*", "checkpoint"} {
		found, err := filepath.Glob(filepath.Join(dir, "audit", pattern))
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, found...)
	}
	if len(files) != 5 {
		t.Fatalf("files %v, want two tiles, two bundles and a note", files)
	}
	o := Options{Location: dir, Reader: true}
	for _, path := range files {
		had, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, at := range []int{3, len(had) / 2, len(had) - 10} {
			flipped := slices.Clone(had)
			flipped[at] ^= 4
			if err := os.WriteFile(path, flipped, 0o600); err != nil {
				t.Fatal(err)
			}
			r, err := Open(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			b, err := r.Ledger()
			if err != nil {
				t.Fatal(err)
			}
			v, verr := b.Verify(t.Context(), nil)
			if verr == nil && len(v.Findings) == 0 {
				t.Errorf("%s: a flip of byte %d passes audit verify", path, at)
			}
			// The root of both tiles is a part of each proof. Entries are no part of it.
			for _, sequence := range []uint64{1, 500} {
				if _, err := b.Prove(t.Context(), sequence, nil); err == nil && !strings.Contains(path, "entries") {
					t.Errorf("%s: with a flip of byte %d, event %d is proved", path, at, sequence)
				}
			}
			if err := b.Export(t.Context(), ledger.ExportOptions{Run: "one", From: 1}, io.Discard); err == nil {
				t.Errorf("%s: with a flip of byte %d, a bundle is made", path, at)
			}
			shut(t, r)
		}
		if err := os.WriteFile(path, had, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	shut(t, open(t, dir)) // as it was
}

// rewritten copies the log of a store, with one loss changed, into a new store of the same
// identity, and signs it with the same key.
func rewritten(t *testing.T, dir string) string {
	t.Helper()
	to := filepath.Join(t.TempDir(), "rewritten")
	if err := os.CopyFS(to, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Remove(filepath.Join(to, "LOCK")), os.RemoveAll(filepath.Join(to, "log")), os.RemoveAll(filepath.Join(to, "views")), os.Remove(filepath.Join(to, "end.json"))); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"tile", "heads", "checkpoint", "state"} {
		if err := os.RemoveAll(filepath.Join(to, "audit", name)); err != nil {
			t.Fatal(err)
		}
	}
	// The thief has the key, and not the head that lies next to it.
	c, err := ledger.ReadConfig(to)
	if err != nil {
		t.Fatal(err)
	}
	key, err := os.ReadFile(c.Signer)
	if err != nil {
		t.Fatal(err)
	}
	c.Signer = filepath.Join(t.TempDir(), "stolen")
	if err := errors.Join(os.WriteFile(c.Signer, key, 0o600), ledger.Configure(to, c)); err != nil {
		t.Fatal(err)
	}
	return to
}

// TestAuditRewritten rewrites the log with one loss changed and signs the new one with the
// stolen key: the older note names both roots.
func TestAuditRewritten(t *testing.T) {
	dir, policy := audited(t, "")
	p := parsePolicy(t, policy)
	s := open(t, dir)
	iterations(t, s, "one", 1, 300)
	note, old := want(t, s)
	must(t, s, "one", events.TrialPaused{})
	var all []events.Recorded
	for e, err := range s.Log.Read(t.Context(), 1, uint64(old.Size)) { //nolint:gosec // not negative
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, e)
	}
	shut(t, s)
	to := rewritten(t, dir)
	rewriteLog(t, s, to, all)
	r := open(t, to)
	iterations(t, r, "one", 301, 310)
	_, now := want(t, r)
	shut(t, r)
	r = open(t, to)
	b, err := r.Ledger()
	if err != nil {
		t.Fatal(err)
	}
	if now.Size < old.Size {
		t.Fatalf("the new head %v is shorter than %v", now, old)
	}
	// The store's own check, the bundle and the proof name both roots.
	v, err := b.Verify(t.Context(), &old)
	if err != nil || !slices.ContainsFunc(v.Findings, func(f ledger.Finding) bool {
		return strings.Contains(f.Problem, old.Root.String()) && strings.Contains(f.Problem, now.Root.String())
	}) {
		t.Errorf("verify: %+v, %v", v.Findings, err)
	}
	if got, err := audit.OpenHead(note, p.Logs...); err != nil || got != old {
		t.Fatalf("the old note: %v, %v", got, err)
	}
	bundle := exported(t, r, "one", &old)
	_, err = audit.VerifyBundle(bytes.NewReader(bundle), p, true, &old)
	wrong(t, err, audit.ErrTampered, old.Root.String(), now.Root.String())
	if _, err := audit.VerifyBundle(bytes.NewReader(bundle), p, true, nil); err != nil {
		t.Errorf("without the old note the stolen key is enough, and it is: %v", err)
	}
	proof, err := b.Prove(t.Context(), 10, &old)
	if err != nil {
		t.Fatal(err)
	}
	_, err = audit.VerifyProof(proof, p, true, &old)
	wrong(t, err, audit.ErrTampered, old.Root.String(), now.Root.String())
	// The ledger of before over the rewritten log.
	shut(t, r)
	if err := os.RemoveAll(filepath.Join(to, "audit")); err != nil {
		t.Fatal(err)
	}
	if err := os.CopyFS(filepath.Join(to, "audit"), os.DirFS(filepath.Join(dir, "audit"))); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(to, "audit", "state")); err != nil {
		t.Fatal(err)
	}
	refused(t, Options{Location: to}, ErrDamaged)
}

// witnessd starts a witness for a log. Its policy text names it.
func witnessd(t *testing.T, logs ...string) (*ledger.Witness, string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "witness.key")
	vkey, err := ledger.NewKey(file, "example.org/witness")
	if err != nil {
		t.Fatal(err)
	}
	vkey, err = ledger.CosignatureKey(vkey)
	if err != nil {
		t.Fatal(err)
	}
	w, err := ledger.NewWitness(filepath.Join(t.TempDir(), "witness"), file, logs, func(err error) { t.Log(err) })
	if err != nil {
		t.Fatal(err)
	}
	return w, vkey
}

// TestAuditWitness puts an older state of the whole directory back: the witness's answer
// stops the owner before one append.
func TestAuditWitness(t *testing.T) {
	dir := made(t)
	c, err := ledger.Keygen(ledger.KeygenOptions{Store: dir, File: filepath.Join(t.TempDir(), "key"), Origin: "example.org/test"})
	if err != nil {
		t.Fatal(err)
	}
	w, vkey := witnessd(t, c.Key)
	server := httptest.NewServer(w)
	t.Cleanup(server.Close)
	c.Policy = "witness w " + vkey + " " + server.URL + "\nquorum w\n"
	if err := ledger.Configure(dir, c); err != nil {
		t.Fatal(err)
	}
	p := parsePolicy(t, "log "+c.Key+"\n"+c.Policy)
	s := open(t, dir)
	iterations(t, s, "one", 1, 20)
	want(t, s)
	shut(t, s)
	backup := filepath.Join(t.TempDir(), "older")
	if out, err := exec.Command("cp", "-a", dir, backup).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	s = open(t, dir)
	iterations(t, s, "one", 21, 300)
	signed, h := want(t, s)
	if got, err := p.Open(signed, false); err != nil || got != h {
		t.Errorf("the note is not witnessed: %v, %v", got, err)
	}
	shut(t, s)
	if err := os.Rename(dir, dir+".newer"); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(backup, dir); err != nil {
		t.Fatal(err)
	}
	// The head next to the key stops it too, where that was not put back.
	refused(t, Options{Location: dir}, ledger.ErrRolledBack, "the key has signed a head of size", "older state")
	if err := os.Remove(c.Signer + ".head"); err != nil {
		t.Fatal(err)
	}
	refused(t, Options{Location: dir}, ledger.ErrRolledBack, "knows a head of size", "older state")
	r, err := Open(t.Context(), Options{Location: dir, Reader: true})
	if err != nil {
		t.Fatal(err)
	}
	last, err := r.Log.Last(t.Context())
	if err != nil || int64(last) > h.Size-280 { //nolint:gosec // not that long
		t.Errorf("the log has %d events (%v): something was appended", last, err)
	}
	shut(t, r)
	// With no witness the store does not open either.
	server.Close()
	refused(t, Options{Location: dir}, nil, "no witness answers")
}

// The steps of a head at which TestAuditKilled kills the owner.
var auditSteps = []string{"salted", "tiled", "sealed", "folded", "listed", "anchored", "saved", "signed", "witnessed", "published", "granted"}

const envAuditKill = "CKPTSTORE_TEST_AUDIT_KILL" // STEP=N: the owner kills itself at the N-th

// auditVictim appends until it kills itself. It runs in a process of its own.
func auditVictim(ctx context.Context, dir, at string) error {
	step, left := at[:strings.IndexByte(at, '=')], 0
	if _, err := fmt.Sscan(at[len(step)+1:], &left); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	s, err := Open(ctx, Options{Location: dir, auditStep: func(name string, done bool) error {
		if name != step || !done {
			return nil
		}
		if left--; left <= 0 {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		return nil
	}})
	if err != nil {
		return err
	}
	b, err := s.Ledger()
	if err != nil {
		return err
	}
	go func() {
		for ctx.Err() == nil && (step == "sealed" || step == "granted") {
			_, _, _ = b.Want(ctx)
		}
	}()
	for i := 0; ctx.Err() == nil; i++ { // many events, so that each process fills tiles, and some runs
		var facts []events.Fact
		for range 16 {
			f, err := metrics(NewID(), fmt.Sprintf("killed-%d-%d", os.Getpid(), i/64), i)
			if err != nil {
				return err
			}
			facts = append(facts, f)
		}
		if _, err := s.Log.Append(ctx, facts...); err != nil {
			return err
		}
	}
	return errors.New("it was not killed")
}

// TestAuditKilled kills the owner at each step from the acknowledgement to the published
// note and the answered request, several times, over many tiles. A witness and this test
// note each signed head: there are never two of one size with different roots, and each
// next owner opens the store.
func TestAuditKilled(t *testing.T) {
	dir := made(t)
	c, err := ledger.Keygen(ledger.KeygenOptions{Store: dir, File: filepath.Join(t.TempDir(), "key"), Origin: "example.org/test"})
	if err != nil {
		t.Fatal(err)
	}
	w, vkey := witnessd(t, c.Key)
	seen := &heads{roots: map[int64]audit.Hash{}}
	server := httptest.NewServer(seen.before(t, w))
	t.Cleanup(server.Close)
	c.Policy = "witness w " + vkey + " " + server.URL + "\nquorum w\n"
	if err := ledger.Configure(dir, c); err != nil {
		t.Fatal(err)
	}
	for _, step := range auditSteps {
		for n := 1; n <= 2; n++ {
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), roleEnv+"=audit", envAuditKill+"="+fmt.Sprintf("%s=%d", step, n), "CKPTSTORE_TEST_AUDIT_STORE="+dir)
			out, err := cmd.CombinedOutput()
			if state := cmd.ProcessState; state == nil || state.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("%s %d: not killed: %v\n%s", step, n, err, out)
			}
			text, err := os.ReadFile(filepath.Join(dir, "audit", "heads"))
			if err == nil {
				for line := range bytes.Lines(text) {
					var l struct {
						Size int64      `json:"size"`
						Root audit.Hash `json:"root"`
					}
					if json.Unmarshal(line, &l) == nil {
						seen.note(t, audit.Head{Size: l.Size, Root: l.Root})
					}
				}
			}
		}
	}
	s := open(t, dir)
	_, h := want(t, s)
	b, err := s.Ledger()
	if err != nil {
		t.Fatal(err)
	}
	if v, err := b.Verify(t.Context(), nil); err != nil || len(v.Findings) > 0 {
		t.Errorf("%+v, %v", v.Findings, err)
	}
	server.Close() // a request of a killed owner may still run
	for size, root := range seen.roots {
		old := audit.Head{Origin: h.Origin, Size: size, Root: root}
		c, err := b.Since(t.Context(), old, h)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Check(old, h); err != nil {
			t.Errorf("head of size %d: %v", size, err)
		}
	}
	if len(seen.roots) < len(auditSteps) || h.Size < 2*audit.TileWidth {
		t.Errorf("only %d heads were seen, the last with %v", len(seen.roots), h)
	}
}

// heads are roots by size. The test notes them, and the witness while a killed owner's last
// request still runs.
type heads struct {
	mu    sync.Mutex
	roots map[int64]audit.Hash
}

func (s *heads) note(t *testing.T, h audit.Head) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if had, ok := s.roots[h.Size]; ok && had != h.Root {
		t.Errorf("two heads of size %d: %v and %v", h.Size, had, h.Root)
	}
	s.roots[h.Size] = h.Root
}

// before notes the heads that a witness is sent.
func (s *heads) before(t *testing.T, next *ledger.Witness) *recording { return &recording{t, s, next} }

type recording struct {
	t    *testing.T
	seen *heads
	next *ledger.Witness
}

// ServeHTTP implements [http.Handler].
func (r *recording) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(req.Body)
	if err != nil {
		r.t.Error(err)
	}
	if _, note, ok := bytes.Cut(body, []byte("\n\n")); ok {
		text, _, _ := bytes.Cut(note, []byte("\n\n"))
		if h, err := audit.ParseHead(string(text) + "\n"); err == nil && h.Size > 0 {
			r.seen.note(r.t, h)
		}
	}
	req.Body = io.NopCloser(bytes.NewReader(body))
	r.next.ServeHTTP(w, req)
}

// rewriteLog writes a log of the same events into a directory, with one loss changed.
func rewriteLog(t *testing.T, s *Store, dir string, all []events.Recorded) {
	t.Helper()
	server, log, err := serveAlone(t.Context(), s, filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer server.Shutdown()
	defer log.Close()
	if err := log.Create(t.Context(), events.Decision{Event: all[0].Event}); err != nil {
		t.Fatal(err)
	}
	for i, e := range all[1:] {
		if i == 100 {
			e.Data = bytes.Replace(e.Data, []byte("0.5"), []byte("0.001"), 1)
		}
		var err error
		if e.Kind.Decides() {
			agg := events.Aggregate{Run: e.Scope.Run, Trial: e.Scope.Trial}
			var end uint64
			if end, err = log.LaneEnd(t.Context(), agg); err == nil {
				_, err = log.Decide(t.Context(), events.Decision{Event: e.Event}, end)
			}
		} else {
			_, err = log.Append(t.Context(), events.Fact{Event: e.Event})
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestAuditBackup: a restored backup keeps the evidence up to its end. With witnesses, and a
// key that has signed later events, it opens for writing under a new origin only: its first
// event quotes the cosigned note of the later events. Notes from before the backup's end are
// followed then, later ones are not.
func TestAuditBackup(t *testing.T) {
	dir := made(t)
	c, err := ledger.Keygen(ledger.KeygenOptions{Store: dir, File: filepath.Join(t.TempDir(), "key"), Origin: "example.org/test"})
	if err != nil {
		t.Fatal(err)
	}
	w, vkey := witnessd(t, c.Key)
	server := httptest.NewServer(w)
	t.Cleanup(server.Close)
	c.Policy = "witness w " + vkey + " " + server.URL + "\nquorum w\n"
	if err := ledger.Configure(dir, c); err != nil {
		t.Fatal(err)
	}
	s := open(t, dir)
	iterations(t, s, "one", 1, 300)
	_, old := want(t, s)
	backup, restored := filepath.Join(t.TempDir(), "backup"), filepath.Join(t.TempDir(), "restored")
	report, err := s.Backup(t.Context(), backup, BackupOptions{})
	if err != nil {
		t.Fatal(err)
	}
	iterations(t, s, "one", 301, 320)
	lost, later := want(t, s)
	shut(t, s)
	if _, err := Restore(t.Context(), RestoreOptions{Backup: backup, Location: restored}); err != nil {
		t.Fatal(err)
	}
	refused(t, Options{Location: restored}, ledger.ErrRolledBack, "to continue a restored backup", "audit keygen FILE --new-origin")
	next, err := ledger.NewOrigin(ledger.KeygenOptions{Store: restored, File: filepath.Join(t.TempDir(), "key"), Origin: "example.org/test"}, lost)
	if err != nil {
		t.Fatal(err)
	}
	refused(t, Options{Location: restored}, nil, "register the log's key there first")
	again, vkey := witnessd(t, next.Key)
	second := httptest.NewServer(again)
	t.Cleanup(second.Close)
	next.Policy = "witness w " + vkey + " " + second.URL + "\nquorum w\n"
	if err := ledger.Configure(restored, next); err != nil {
		t.Fatal(err)
	}
	r := open(t, restored)
	iterations(t, r, "one", 301, 310)
	_, now := want(t, r)
	if now.Origin != "example.org/test/2" || now.Size <= old.Size {
		t.Errorf("the head %v of %s", now, now.Origin)
	}
	e, err := r.Log.At(t.Context(), report.Sequence+1)
	if err != nil {
		t.Fatal(err)
	}
	body, err := e.Body()
	if err != nil {
		t.Fatal(err)
	}
	if sealed, ok := body.(*events.AuditSealed); !ok || sealed.Previous != string(lost) || sealed.Key != next.Key {
		t.Errorf("the first event after the backup is %s: %+v", e.Kind, body)
	}
	b, err := r.Ledger()
	if err != nil {
		t.Fatal(err)
	}
	if v, err := b.Verify(t.Context(), &old); err != nil || len(v.Findings) > 0 || len(v.Origins) != 1 {
		t.Errorf("since a head from before the backup: %+v, %v", v, err)
	}
	if v, err := b.Verify(t.Context(), &later); err != nil || len(v.Findings) != 1 || !strings.Contains(v.Findings[0].Problem, "log replaced") {
		t.Errorf("since a head of the lost events: %+v, %v", v, err)
	}
	// An outsider with the keys of both origins, and the witness of each.
	p := parsePolicy(t, "log "+c.Key+"\nlog "+next.Key+"\n"+next.Policy)
	bundle := exported(t, r, "one", &old)
	if _, err := audit.VerifyBundle(bytes.NewReader(bundle), p, false, &old); err != nil {
		t.Errorf("a bundle since that head: %v", err)
	}
	_, err = audit.VerifyBundle(bytes.NewReader(bundle), p, false, &later)
	wrong(t, err, audit.ErrReplaced, later.Root.String())
	shut(t, r)
	shut(t, open(t, restored)) // it has begun
}
