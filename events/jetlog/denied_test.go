package jetlog

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go/jetstream"
)

// users configures a server with an administrator and users of limited rights.
const users = `
accounts { ckpt { jetstream: enabled, users: [
  { user: admin, password: a }
  { user: trainer, password: t, permissions: {
      publish: { allow: [ "ckpt.run%2E1.>", "$KV.CKPT_LEASES.>", "$JS.API.STREAM.INFO.>", "$JS.API.STREAM.MSG.GET.>", "$JS.API.CONSUMER.>" ] }
      subscribe: { allow: [ "_INBOX.>" ] } } }
  { user: writer, password: w, permissions: {
      publish: { allow: [ "ckpt.>", "$JS.API.STREAM.INFO.CKPT", "$JS.API.STREAM.MSG.GET.CKPT" ] }, subscribe: { allow: [ "_INBOX.>" ] } } }
  { user: deaf, password: d, permissions: { publish: { allow: [ ">" ] }, subscribe: { allow: [ "news" ] } } }
] }, SYS {} }
system_account: SYS`

func startUsers(t *testing.T) (url func(user, password string) string) {
	t.Helper()
	o := &server.Options{}
	if err := o.ProcessConfigString(users); err != nil {
		t.Fatal(err)
	}
	o.Host, o.Port, o.NoSigs, o.NoLog, o.JetStream, o.StoreDir, o.SyncAlways = "127.0.0.1", server.RANDOM_PORT, true, true, true, t.TempDir(), true
	ns, err := server.NewServer(o)
	if err != nil {
		t.Fatal(err)
	}
	ns.Start()
	t.Cleanup(func() {
		ns.Shutdown()
		ns.WaitForShutdown()
	})
	if !ns.ReadyForConnections(30 * time.Second) {
		t.Fatal("the server is not ready")
	}
	return func(user, password string) string {
		return fmt.Sprintf("nats://%s:%s@%s", user, password, strings.TrimPrefix(ns.ClientURL(), "nats://"))
	}
}

// A denial by the server ends the call with the subject, the user and the remedy, and
// affects no other call. The calls would be retried for hours, so only the denial can
// have ended them.
func TestDenied(t *testing.T) {
	t.Parallel()
	url := startUsers(t)
	patient, cancel := context.WithTimeout(t.Context(), time.Hour)
	defer cancel()
	open := func(user, password string) *Log {
		t.Helper()
		l := connectTo(t, Options{URL: url(user, password), Timeout: time.Hour})
		if _, _, err := l.Open(patient); err != nil {
			t.Fatal(err)
		}
		return l
	}
	denied := func(what string, err error, subject string, says ...string) {
		t.Helper()
		var d *DeniedError
		if !errors.Is(err, ErrNotAllowed) || !errors.As(err, &d) || !strings.HasPrefix(d.Subject, subject) || Unanswered(err) {
			t.Fatalf("%s: %v", what, err)
		}
		for _, text := range append(says, d.Subject) {
			if !strings.Contains(err.Error(), text) {
				t.Errorf("%s: %q is not in: %v", what, text, err)
			}
		}
	}

	writer := connectTo(t, Options{URL: url("writer", "w"), Timeout: time.Hour})
	denied("create", writer.Create(patient, created(t, "store-1")), "$JS.API.STREAM.CREATE.CKPT", `the user "writer" publish`)

	admin := connectTo(t, Options{URL: url("admin", "a")})
	if err := admin.Create(patient, created(t, "store-1")); err != nil {
		t.Fatal(err)
	}
	trainer := open("trainer", "t")
	_, err := trainer.Lease(patient, "job", []byte("a"), long)
	denied("a lease without its bucket", err, apiAccount, `the user "trainer"`, "a bucket of the store is missing", "ckptstore init")
	for range 2 { // they exist the second time
		if err := admin.CreateBuckets(patient); err != nil {
			t.Fatal(err)
		}
	}
	lease, err := trainer.Lease(patient, "job", []byte("a"), long)
	if err != nil {
		t.Fatal(err)
	}
	if err := lease.Renew(patient); err != nil {
		t.Fatal(err)
	}

	other := events.Scope{Run: "another", Trial: "t", Actor: events.Rank(0)}
	foreign, err := events.NewFact(stamp(), other, events.Metrics{Attempt: 1, Iteration: 1})
	if err != nil {
		t.Fatal(err)
	}
	// In parallel with facts that it may append: those are stored.
	done := make(chan error, 20)
	for i := range cap(done) {
		go func() {
			_, err := trainer.Append(patient, fact(t, i))
			done <- err
		}()
	}
	_, err = trainer.Append(patient, foreign)
	denied("a fact of another run", err, "ckpt.another.t.r0.", `does not let the user "trainer" publish`, "permissions to publish")
	for range cap(done) {
		if err := <-done; err != nil {
			t.Errorf("a fact of its own run: %v", err)
		}
	}
	_, err = trainer.Append(patient, append(factsOf(t, 12), foreign)...)
	denied("a batch with it", err, "ckpt.another.t.r0.")
	d, err := events.NewDecision(stamp(), events.Aggregate{Run: "another", Trial: "t"}, events.TrialCreated{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = trainer.Decide(patient, d, 0)
	denied("a decision of another run", err, "ckpt.another.t.s.")
	if _, err := trainer.Decide(patient, begun(t, "step-1"), 0); err != nil {
		t.Errorf("a decision of its own: %v", err)
	}

	writer = open("writer", "w")
	_, err = writer.LeaseHolder(patient, "job")
	denied("a question", err, "$JS.API.STREAM.MSG.GET.KV_CKPT_LEASES")
	for _, err := range writer.Read(patient, 1, 0) {
		if err != nil {
			denied("reading", err, "$JS.API.")
		}
	}
	_, err = writer.Lease(patient, "other", []byte("b"), long)
	denied("a lease", err, "$JS.API.STREAM.")
	deaf := connectTo(t, Options{URL: url("deaf", "d"), Timeout: time.Hour})
	_, _, err = deaf.Open(patient)
	denied("answers", err, "_INBOX.", `the user "deaf" subscribe`, "permissions to subscribe")
}

// A user is named, and a token is not.
func TestDeniedUser(t *testing.T) {
	for url, want := range map[string]string{
		"nats://ann:secret@h:1,nats://h:2": `the user "ann"`,
		"nats://secret@h:1":                "the user of this token",
		"nats://h:1":                       "clients without a token or password",
	} {
		if got := (Options{URL: url}).user(); got != want {
			t.Errorf("%s: %s", url, got)
		}
	}
	if got := (Options{URL: "nats://h", Token: "secret"}).user(); got != "the user of this token" {
		t.Error(got)
	}
}

// A cluster that seems to have too few servers is asked again for a while, and for nothing
// else.
func TestPeerPatience(t *testing.T) {
	few, other := &jetstream.APIError{Code: 400, ErrorCode: codeNoPeers}, &jetstream.APIError{Code: 503, ErrorCode: codeNotClustered}
	p := newPeerPatience()
	for _, c := range []struct {
		err   error
		again bool
	}{{few, true}, {fmt.Errorf("bucket: %w", few), true}, {other, false}, {nil, false}} {
		if got := p.again(c.err); got != c.again {
			t.Errorf("%v: %t", c.err, got)
		}
	}
	if (peerPatience{time.Now().Add(-time.Second)}).again(few) {
		t.Error("it never ends")
	}
}

// Buckets have as many copies as the log and are not compressed either; a bucket with
// another number of copies is named.
func TestBucketsReplicated(t *testing.T) {
	t.Parallel()
	c := startCluster(t, 3)
	l := connectTo(t, Options{URL: c.url()})
	if err := l.Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatal(err)
	}
	if err := l.CreateBuckets(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{Stream, leaseStream, cursorStream, witnessStream} {
		s, err := l.js.Stream(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		if got := s.CachedInfo().Config; got.Replicas != 3 || got.Compression != jetstream.NoCompression {
			t.Errorf("%s has %d copies, compressed by %v", name, got.Replicas, got.Compression)
		}
	}
	s, err := l.js.Stream(t.Context(), leaseStream)
	if err != nil {
		t.Fatal(err)
	}
	one := s.CachedInfo().Config
	one.Replicas = 1
	if _, err := c.inside().UpdateStream(t.Context(), one); err != nil {
		t.Fatal(err)
	}
	if err := l.CreateBuckets(t.Context()); !errors.Is(err, ErrUnsafe) || !strings.Contains(err.Error(), "nats stream edit KV_CKPT_LEASES --replicas 3") {
		t.Errorf("a bucket of one copy: %v", err)
	}
}

// A replicated compressed stream is refused with the remedy; after the remedy it opens.
func TestCompressedReplicas(t *testing.T) {
	t.Parallel()
	c := startCluster(t, 3)
	l := connectTo(t, Options{URL: c.url()})
	inside, config := c.inside(), streamConfig(3)
	config.Compression = jetstream.S2Compression
	if _, err := l.js.CreateStream(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	refused := func(err error) {
		t.Helper()
		if !errors.Is(err, ErrUnsafe) || !strings.Contains(err.Error(), "compressed and has 3 copies") || !strings.Contains(err.Error(), "nats stream edit CKPT --compression none") {
			t.Fatalf("a compressed stream of three copies: %v", err)
		}
	}
	refused(l.Create(t.Context(), created(t, "store-1")))
	update := func() {
		t.Helper()
		_, err := inside.UpdateStream(t.Context(), config)
		// A busy server is taken for a missing one.
		for tick := time.Tick(100 * time.Millisecond); hasCode(err, codeNoPeers) && t.Context().Err() == nil; <-tick {
			_, err = inside.UpdateStream(t.Context(), config)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	config.Replicas = 1
	update()
	if err := l.Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatalf("a compressed stream of one copy: %v", err)
	}
	config.Replicas = 3
	update()
	_, _, err := l.Open(t.Context())
	refused(err)
	config.Compression = jetstream.NoCompression
	update()
	if _, _, err := l.Open(t.Context()); err != nil {
		t.Errorf("after the advice: %v", err)
	}
}

// A cluster that loses its quorum for many terms loses no lease and no append.
func TestLeaseOutlivesQuorum(t *testing.T) {
	t.Parallel()
	c := startCluster(t, 3)
	l := connectTo(t, Options{URL: c.url(), Timeout: time.Second})
	if err := l.Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatal(err)
	}
	lease, err := l.Lease(t.Context(), "job", []byte("a"), 300*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	c.servers[0].Shutdown()
	c.servers[1].Shutdown()
	short, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond) // five terms
	defer cancel()
	if err := lease.Renew(short); err == nil || errors.Is(err, ErrLeaseLost) {
		t.Fatalf("without a quorum: %v", err)
	}
	long, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	appended := make(chan error, 1)
	go func() {
		_, err := l.Append(long, fact(t, 1))
		appended <- err
	}()
	c.restart(0)
	c.restart(1)
	if err := lease.Renew(long); err != nil {
		t.Fatal(err)
	}
	if err := <-appended; err != nil {
		t.Fatal(err)
	}
	if n := len(readAll(t, l, 1, 2)); n != 2 {
		t.Errorf("%d events", n)
	}
}
