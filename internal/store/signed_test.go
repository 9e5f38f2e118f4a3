package store

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/audit/ledger"
	"github.com/ckptstore/ckptstore/internal/private"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/signing"
)

// newSigner makes a key in a file, which is the second result.
func newSigner(t *testing.T, name string) (*audit.Signer, string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "key")
	if _, err := ledger.NewKey(file, name); err != nil {
		t.Fatal(err)
	}
	s, err := ledger.ReadSigner("", file)
	if err != nil {
		t.Fatal(err)
	}
	return s, file
}

func granted(role string, key *audit.Signer, runs, require []string) *events.AccessGranted {
	return &events.AccessGranted{User: key.Name(), Role: role, Key: key.Public(), Runs: runs, Require: require}
}

func keys(t *testing.T, dir string, by *audit.Signer, bodies ...events.Body) {
	t.Helper()
	s := openWith(t, Options{Location: dir, Signer: by})
	for _, b := range bodies {
		if _, err := s.DecideKeys(t.Context(), b); err != nil {
			t.Fatal(err)
		}
	}
	shut(t, s)
}

// unguarded returns a connection with which a user who can write to the log appends anything.
func unguarded(t *testing.T, s *Store) *jetlog.Log {
	t.Helper()
	o := s.owned().server.OwnerOptions()
	o.Archive = archiveDir(s.Location)
	l, err := jetlog.Connect(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	if _, _, err := l.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	return l
}

// force appends a decision at the end of its lane, whatever the store takes.
func force(t *testing.T, l *jetlog.Log, e events.Event) uint64 {
	t.Helper()
	end, err := l.LaneEnd(t.Context(), events.Aggregate{Run: e.Scope.Run, Trial: e.Scope.Trial})
	if err != nil {
		t.Fatal(err)
	}
	seq, err := l.Decide(t.Context(), events.Decision{Event: e}, end)
	if err != nil {
		t.Fatal(err)
	}
	return seq
}

// inProcess connects to the server of the store that this process owns.
type inProcess struct{ s *Store }

// Dial implements [nats.CustomDialer].
func (d inProcess) Dial(string, string) (net.Conn, error) { return d.s.owned().server.Dial() }

// repeat appends an event again at the end of its lane. Without the header by which the
// server knows a repetition, that is a second event.
func repeat(t *testing.T, s *Store, e events.Event) uint64 {
	t.Helper()
	nc, err := nats.Connect("nats://127.0.0.1:1", nats.SetCustomDialer(inProcess{s}))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	agg := events.Aggregate{Run: e.Scope.Run, Trial: e.Scope.Trial}
	after, err := s.Log.LaneEnd(t.Context(), agg)
	if err != nil {
		t.Fatal(err)
	}
	msg := forged(t, e, expectStream, jetlog.Stream, expectLast, fmt.Sprint(after), expectLane, agg.Lane())
	delete(msg.Header, events.HeaderMsgID)
	m, err := nc.RequestMsg(msg, limit)
	if err != nil || strings.Contains(string(m.Data), "error") {
		t.Fatal(m, err)
	}
	end, err := s.Log.LaneEnd(t.Context(), agg)
	if err != nil || end <= after {
		t.Fatalf("the lane ends at event %d, it ended at %d: %v", end, after, err)
	}
	return end
}

func found(list []audit.SignatureFinding) (out []string) {
	for _, f := range list {
		out = append(out, fmt.Sprintf("%d %s", f.Sequence, f.State))
	}
	return out
}

// TestSignedRun: a trainer signs the decisions of its run, which a store takes with no other
// signature. A user who writes to the log behind the store forges a decision without the
// key, replays one, and grants a key of their own: the log, a bundle without the store, and
// the reading of the log name each of them. None of that keeps the store from being opened.
func TestSignedRun(t *testing.T) {
	dir, text := audited(t, "")
	ada, _ := newSigner(t, "ada")
	bert, _ := newSigner(t, "bert")
	eve, _ := newSigner(t, "eve")
	keys(t, dir, ada, granted("admin", ada, nil, nil), granted("operator", bert, []string{"run"}, []string{"run"}))

	s := openWith(t, Options{Location: dir, Signer: bert})
	must(t, s, "run", events.TrialCreated{}, events.CheckpointPinned{Checkpoint: "a"})
	replay, err := decide(t.Context(), s, "run", events.CheckpointUnpinned{Checkpoint: "a"})
	if err != nil {
		t.Fatal(err)
	}
	if replay, err = s.Log.At(t.Context(), replay.Sequence); err != nil || audit.SignerOf(replay.Event) != bert.Key() {
		t.Fatalf("signed by %q, %v", audit.SignerOf(replay.Event), err)
	}
	if _, err := s.DecideKeys(t.Context(), granted("operator", eve, nil, nil)); !slices.Contains(problem.Kinds(err), problem.Denied) {
		t.Errorf("an operator grants a key: %v", err)
	}
	shut(t, s)

	for name, by := range map[string]*audit.Signer{"no key": nil, "an unknown key": eve} {
		s := openWith(t, Options{Location: dir, Signer: by})
		if _, err := decide(t.Context(), s, "run", events.CheckpointPinned{Checkpoint: "a"}); !slices.Contains(problem.Kinds(err), problem.Denied) {
			t.Errorf("%s: %v", name, err)
		}
		d, err := decide(t.Context(), s, "other", events.TrialCreated{}) // there, none is wanted
		if err != nil {
			t.Fatal(err)
		}
		if e, err := s.Log.At(t.Context(), d.Sequence); err != nil || e.Signature != "" {
			t.Errorf("%s: signed by %q, %v", name, audit.SignerOf(e.Event), err)
		}
		shut(t, s)
	}

	s = openWith(t, Options{Location: dir})
	l := unguarded(t, s)
	forged, err := events.NewDecision(Stamp("trainer"), events.Aggregate{Run: "run", Trial: trialName}, events.CheckpointPinned{Checkpoint: "b"})
	if err != nil {
		t.Fatal(err)
	}
	unsigned := force(t, l, forged.Event)
	has, err := audit.ParseSignature(replay.Signature)
	if err != nil {
		t.Fatal(err)
	}
	forged.ID, forged.Signature = NewID(), strings.Replace(replay.Signature, fmt.Sprint(" ", has.After, " "), fmt.Sprint(" ", unsigned, " "), 1)
	wrong := force(t, l, forged.Event)
	again := repeat(t, s, replay.Event)
	grant, err := events.NewDecision(Stamp("ckptstore"), events.Aggregate{Trial: events.Keys}, granted("admin", eve, nil, nil))
	if err != nil {
		t.Fatal(err)
	}
	seized := force(t, l, grant.Event)
	want(t, s)
	book, err := s.Ledger()
	if err != nil {
		t.Fatal(err)
	}
	const signed = 2 + 3 // of keys, and of the trainer
	wants := []string{fmt.Sprint(unsigned, " ", audit.Unsigned), fmt.Sprint(wrong, " ", audit.WrongSignature), fmt.Sprint(again, " ", audit.Replayed), fmt.Sprint(seized, " ", audit.Unsigned)}
	whole := wants
	p := parsePolicy(t, text+"signer "+ada.Public()+"\n")
	book.Accept(p, true)
	v, err := book.Verify(t.Context(), nil)
	if err != nil || !slices.Equal(found(v.Signatures.Findings), whole) || len(v.Findings) != len(whole) || v.Signatures.Keys != 2 || v.Signatures.Roots != "policy" {
		t.Errorf("the log: %+v, %v, want %q", v, err, whole)
	}
	// The trainers that were open in between have signed as owners: audit.sealed too.
	if v.Signatures.Signed < signed {
		t.Errorf("%d decisions are signed, want %d", v.Signatures.Signed, signed)
	}
	read, err := s.VerifyLog(t.Context(), nil)
	if err != nil || len(read.Findings) != len(whole) || slices.ContainsFunc(read.Findings, func(f LogFinding) bool { return !f.Aside }) {
		t.Errorf("reading the log: %+v, %v", read, err)
	}
	bundle := exported(t, s, "run", nil)
	shut(t, s)
	shut(t, open(t, dir)) // a forged decision is no damage

	b, err := audit.VerifyBundle(bytes.NewReader(bundle), p, true, nil)
	if err != nil || b.Signatures == nil || !slices.Equal(found(b.Signatures.Findings), wants) || b.Signatures.Signed != signed || b.Signatures.Decisions != 6+3 {
		t.Errorf("the bundle: %+v, %+v, %v", b, b.Signatures, err)
	}
	_, err = audit.VerifyBundle(bytes.NewReader(bundle), parsePolicy(t, text+"signer "+bert.Public()+"\n"), true, nil)
	if err != nil {
		t.Errorf("with another admin's key: %v", err)
	}
	bundled(t, bundle, p)
}

// bundled takes parts from what a bundle has about keys: each is another error.
func bundled(t *testing.T, bundle []byte, p audit.Policy) {
	t.Helper()
	first, rest, _ := bytes.Cut(bundle, []byte("\n"))
	for name, test := range map[string]struct {
		change func(h *audit.BundleHead)
		want   error
	}{
		"nothing about keys":    {func(h *audit.BundleHead) { h.Created, h.KeyRows, h.Keys = nil, nil, nil }, audit.ErrPolicy},
		"not which store it is": {func(h *audit.BundleHead) { h.Created = nil }, audit.ErrMissingEvent},
		"another first event":   {func(h *audit.BundleHead) { h.Created = &h.Keys[0] }, audit.ErrTampered},
		"no rows":               {func(h *audit.BundleHead) { h.KeyRows = nil }, audit.ErrMissingEvent},
		"not all rows":          {func(h *audit.BundleHead) { h.KeyRows = h.KeyRows[:1] }, audit.ErrMissingTrial},
		"no keys":               {func(h *audit.BundleHead) { h.Keys = nil }, audit.ErrMissingTrial},
		"not the last":          {func(h *audit.BundleHead) { h.Keys = h.Keys[:len(h.Keys)-1] }, audit.ErrMissingEnd},
		"not the first":         {func(h *audit.BundleHead) { h.Keys = h.Keys[1:] }, audit.ErrMissingEvent},
		"another event":         {func(h *audit.BundleHead) { h.Keys[0] = h.Sealed }, audit.ErrTampered},
		"another body":          {func(h *audit.BundleHead) { h.Keys[0].Message.Body[10]++ }, audit.ErrTampered},
	} {
		var h audit.BundleHead
		if err := json.Unmarshal(first, &h); err != nil {
			t.Fatal(err)
		}
		test.change(&h)
		text, err := json.Marshal(h)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := audit.VerifyBundle(bytes.NewReader(slices.Concat(text, []byte("\n"), rest)), p, true, nil); !errors.Is(err, test.want) {
			t.Errorf("%s: %v, want %v", name, err, test.want)
		}
	}
	// Without wishes for signatures, a bundle without keys is one of an older version.
	var h audit.BundleHead
	if err := json.Unmarshal(first, &h); err != nil {
		t.Fatal(err)
	}
	h.Created, h.KeyRows, h.Keys = nil, nil, nil
	text, err := json.Marshal(h)
	if err != nil {
		t.Fatal(err)
	}
	p.Signers = nil
	if v, err := audit.VerifyBundle(bytes.NewReader(slices.Concat(text, []byte("\n"), rest)), p, true, nil); err != nil || v.Signatures != nil || v.Unchecked != 5 {
		t.Errorf("without keys: %+v, %v", v, err)
	}
}

// TestUnsignedLog: a log without signatures verifies as before.
func TestUnsignedLog(t *testing.T) {
	t.Parallel()
	dir, text := audited(t, "")
	s := open(t, dir)
	must(t, s, "run", events.TrialCreated{}, events.TrialPaused{})
	want(t, s)
	bundle := exported(t, s, "run", nil)
	if bytes.Contains(bundle, []byte("key_rows")) {
		t.Error("the bundle has rows of keys, which older verifiers refuse")
	}
	v, err := audit.VerifyBundle(bytes.NewReader(bundle), parsePolicy(t, text), true, nil)
	if err != nil || v.Signatures != nil || v.Unchecked != 0 {
		t.Errorf("%+v, %v", v, err)
	}
	if _, err := audit.VerifyBundle(bytes.NewReader(bundle), parsePolicy(t, text+"signed run\n"), true, nil); !errors.Is(err, audit.ErrPolicy) {
		t.Errorf("where the policy wants signatures: %v", err)
	}
	book, err := s.Ledger()
	if err != nil {
		t.Fatal(err)
	}
	if v, err := book.Verify(t.Context(), nil); err != nil || len(v.Findings) > 0 || v.Signatures.Signed != 0 || v.Signatures.Unsigned < 4 {
		t.Errorf("%+v, %v", v, err)
	}
	if read, err := s.VerifyLog(t.Context(), nil); err != nil || len(read.Findings) > 0 || read.Signed != 0 {
		t.Errorf("%+v, %v", read, err)
	}
}

// TestSignedClients: the front of a store takes decisions of clients with a signature that
// holds. It refuses a decision whose signature is forged, replayed, or of a key that was revoked while the
// client works.
func TestSignedClients(t *testing.T) {
	t.Parallel()
	dir := made(t)
	ada, _ := newSigner(t, "ada")
	bert, _ := newSigner(t, "bert")
	keys(t, dir, ada, granted("admin", ada, nil, []string{"run"}), granted("operator", bert, nil, nil))
	owner, addr := listening(t, dir, &jetlog.Listen{Address: "127.0.0.1:0", Token: secretToken})
	url := "nats://" + addr
	client := openWith(t, Options{Location: url, Access: &Access{Token: secretToken}, Signer: bert})
	defer shut(t, client)
	must(t, client, "run", events.TrialCreated{})
	first, err := decide(t.Context(), client, "run", events.CheckpointPinned{Checkpoint: "a"})
	if err != nil {
		t.Fatal(err)
	}
	if first, err = owner.Log.At(t.Context(), first.Sequence); err != nil || audit.SignerOf(first.Event) != bert.Key() {
		t.Fatalf("signed by %q, %v", audit.SignerOf(first.Event), err)
	}
	if _, err := decide(t.Context(), owner, "run", events.CheckpointPinned{Checkpoint: "a"}); !slices.Contains(problem.Kinds(err), problem.Denied) {
		t.Errorf("the owner, without a key: %v", err)
	}
	// A client without the checks of this program.
	nc, err := nats.Connect(url, nats.Token(secretToken))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	agg := events.Aggregate{Run: "run", Trial: trialName}
	send := func(e events.Event) string {
		t.Helper()
		after, err := owner.Log.LaneEnd(t.Context(), agg)
		if err != nil {
			t.Fatal(err)
		}
		m, err := nc.RequestMsg(forged(t, e, expectStream, jetlog.Stream, expectLast, fmt.Sprint(after), expectLane, agg.Lane()), limit)
		if err != nil {
			t.Fatal(err)
		}
		return string(m.Data)
	}
	d, err := events.NewDecision(Stamp("test"), agg, events.CheckpointPinned{Checkpoint: "b"})
	if err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		e    events.Event
		want string
	}{
		"no signature": {d.Event, "is not signed"},
		"a copied one": {func() events.Event { e := d.Event; e.Signature = first.Signature; return e }(), "forged"},
		"replayed":     {first.Event, "replayed"},
	} {
		if got := send(test.e); !strings.Contains(got, test.want) {
			t.Errorf("%s: %s, want %q", name, got, test.want)
		}
	}
	f, err := metrics("fact", "run", 1)
	if err != nil {
		t.Fatal(err)
	}
	m, err := nc.RequestMsg(forged(t, f.Event, events.HeaderSignature, first.Signature), limit)
	if err != nil || !strings.Contains(string(m.Data), "a fact has no condition") {
		t.Errorf("a signed fact: %v, %v", m, err)
	}
	admin := openWith(t, Options{Location: dir, Signer: ada})
	defer shut(t, admin)
	if _, err := admin.DecideKeys(t.Context(), &events.AccessRevoked{User: "ada", Keys: []string{ada.Key()}}); !errors.Is(err, signing.ErrLastAdmin) {
		t.Errorf("the last key of an admin: %v", err)
	}
	if _, err := admin.DecideKeys(t.Context(), &events.AccessRevoked{User: "bert", Keys: []string{bert.Key()}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the key is refused", func() bool {
		_, err := decide(t.Context(), client, "run", events.CheckpointPinned{Checkpoint: "a"})
		return slices.Contains(problem.Kinds(err), problem.Denied) && strings.Contains(err.Error(), "has revoked")
	})
}

// TestSignedAcrossArchive: a decision whose predecessor is in the archive is signed for that.
func TestSignedAcrossArchive(t *testing.T) {
	t.Parallel()
	dir := made(t)
	ada, _ := newSigner(t, "ada")
	keys(t, dir, ada, granted("admin", ada, nil, []string{"*"}))
	s := openWith(t, Options{Location: dir, Signer: ada})
	must(t, s, "run", events.TrialCreated{}, events.CheckpointPinned{Checkpoint: "a"})
	iterations(t, s, "run", 1, 3000)
	shut(t, s)
	cut(t, dir)
	s = openWith(t, Options{Location: dir, Signer: ada})
	defer shut(t, s)
	if sealedOf(t, s.Log) < 4 {
		t.Fatal("the log was not cut")
	}
	must(t, s, "run", events.CheckpointUnpinned{Checkpoint: "a"})
	if _, err := s.DecideKeys(t.Context(), &events.AccessRevoked{User: "ada", Require: []string{"*"}}); err != nil {
		t.Fatal(err)
	}
	if read, err := s.VerifyLog(t.Context(), nil); err != nil || len(read.Findings) > 0 || read.Signed != 5 {
		t.Errorf("%+v, %v", read, err)
	}
}

// TestSigningKeyFile: a key that others can read, a link, and a key in the store are refused.
func TestSigningKeyFile(t *testing.T) {
	dir := made(t)
	_, file := newSigner(t, "ada")
	use := func(path string) error {
		t.Setenv(signing.EnvKey, path)
		s, err := Open(t.Context(), Options{Location: dir})
		if err == nil {
			shut(t, s)
		}
		return err
	}
	if err := use(file); err != nil {
		t.Errorf("a private file: %v", err)
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	wrong(t, use(link), private.ErrNotPrivate, "symbolic link", signing.EnvKey)
	inside := filepath.Join(dir, "key")
	write(t, inside, read(t, file))
	wrong(t, use(inside), nil, "inside the store")
	if err := os.Remove(inside); err != nil {
		t.Fatal(err)
	}
	wrong(t, use(filepath.Join(dir, "none")), nil, "inside the store")
	wrong(t, use(filepath.Join(t.TempDir(), "none")), os.ErrNotExist, signing.EnvKey)
	if err := os.Chmod(file, 0o640); err != nil {
		t.Fatal(err)
	}
	wrong(t, use(file), private.ErrNotPrivate, "chmod 600")
	// A reader decides nothing and needs no key.
	s, err := Open(t.Context(), Options{Location: dir, Reader: true})
	if err != nil {
		t.Fatal(err)
	}
	shut(t, s)
	other := filepath.Join(t.TempDir(), "other")
	if err := os.WriteFile(other, []byte("no key\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	wrong(t, use(other), nil, "no signing key", other)
}

// signAndDie decides with the key of the environment until it is killed.
func signAndDie(ctx context.Context) error {
	s, err := Open(ctx, Options{Location: os.Getenv("CKPTSTORE_TEST_DIR")})
	if err != nil {
		return err
	}
	for n := 0; ctx.Err() == nil; n++ {
		if _, err := decide(ctx, s, "run", events.CheckpointTagged{Checkpoint: "a", Tag: fmt.Sprint(n)}); err != nil {
			return err
		}
		if n == 1 {
			if err := json.NewEncoder(os.Stdout).Encode(reply{}); err != nil {
				return err
			}
		}
	}
	return ctx.Err()
}

// TestSignerKilled kills a trainer that signs, at any moment: between the signature and the
// append, too. The log has only decisions whose signatures hold.
func TestSignerKilled(t *testing.T) {
	t.Parallel()
	dir := made(t)
	ada, file := newSigner(t, "ada")
	keys(t, dir, ada, granted("admin", ada, nil, []string{"run"}))
	for range 4 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), roleEnv+"=sign", "CKPTSTORE_TEST_DIR="+dir, signing.EnvKey+"="+file)
		cmd.Stderr = t.Output()
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		var r reply
		err = json.NewDecoder(out).Decode(&r)
		_ = cmd.Process.Kill()
		if werr := cmd.Wait(); err != nil || cmd.ProcessState.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatalf("not killed: %v, %v", err, werr)
		}
	}
	s := openWith(t, Options{Location: dir, Signer: ada})
	defer shut(t, s)
	must(t, s, "run", events.TrialCreated{})
	if read, err := s.VerifyLog(t.Context(), nil); err != nil || len(read.Findings) > 0 || read.Signed < 1+4*2+1 || read.Decisions != read.Signed+1 {
		t.Errorf("%+v, %v", read, err)
	}
}
