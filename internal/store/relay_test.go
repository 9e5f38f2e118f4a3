package store

import (
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/front"
	"github.com/ckptstore/ckptstore/internal/natstest"
)

// cluster starts a NATS server that requires a password, with a store. url has the password.
func cluster(t *testing.T) (url string) {
	t.Helper()
	bare, stop, err := natstest.Start(t.TempDir(), `accounts { ckpt { jetstream: enabled, users: [ { user: own, password: "p w" } ] } }`)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	url = strings.Replace(bare, "nats://", "nats://own:p%20w@", 1)
	if _, err := Init(t.Context(), url, filepath.Join(t.TempDir(), "shared")); err != nil {
		t.Fatal(err)
	}
	refused(t, Options{Location: bare}, jetlog.ErrNotAllowed)
	return url
}

// relaying opens the store of a server and lets clients connect through it.
func relaying(t *testing.T, url string) (s *Store, at string) {
	t.Helper()
	var bound net.Addr
	s = openWith(t, Options{
		Location: url, Listen: &jetlog.Listen{Address: "127.0.0.1:0", Token: secretToken},
		Bound: func(addr net.Addr) { bound = addr },
	})
	t.Cleanup(func() { shut(t, s) })
	return s, "nats://" + bound.String()
}

// TestRelayIntruder: a client of a relay to a server's store has no more rights than a client of an
// owner.
func TestRelayIntruder(t *testing.T) {
	t.Parallel()
	s, at := relaying(t, cluster(t))
	intrudes(t, s, at)
}

// TestRelays: two relays serve one log. A client of one relay cannot take what a client of the other
// holds. When one relay ends, its clients continue through the other.
func TestRelays(t *testing.T) {
	t.Parallel()
	url := cluster(t)
	a, first := relaying(t, url)
	// This relay does not wait for clients that may come back.
	r, addr, err := a.Log.Relay(t.Context(), jetlog.RelayOptions{
		Listen: jetlog.Listen{Address: "127.0.0.1:0", Token: secretToken}, Bounds: front.Limits{Comeback: time.Nanosecond},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	second := "nats://" + addr.String()
	access := &Access{Token: secretToken}
	trainer := openWith(t, Options{Location: first + "," + second, Access: access})
	defer shut(t, trainer)
	held, release, err := trainer.HoldRun(t.Context(), "run", "job-1")
	if err != nil {
		t.Fatal(err)
	}
	must(t, trainer, "run", begun("step-1"))
	other := openWith(t, Options{Location: second, Access: access})
	defer shut(t, other)
	_, _, err = other.HoldRun(t.Context(), "run", "job-2")
	wrong(t, err, nil, "job-1")
	d, err := events.NewDecision(Stamp("other"), events.Aggregate{Run: "run", Trial: trialName}, events.CheckpointAborted{Attempt: 1, Checkpoint: "step-1.a1", Reason: "forged"})
	if err != nil {
		t.Fatal(err)
	}
	_, err = other.Log.Decide(t.Context(), d, last(t, other))
	wrong(t, err, jetlog.ErrNotAllowed, "lease")
	if e, err := a.Log.At(t.Context(), last(t, a)); err != nil || e.Principal != "token" {
		t.Errorf("%s was appended by %q, %v", e.Kind, e.Principal, err)
	}

	if err := a.relay.close(); err != nil {
		t.Fatal(err)
	}
	a.relay = nil
	must(t, trainer, "run", events.CheckpointAborted{Attempt: 1, Checkpoint: "step-1.a1", Reason: "the end"})
	if held.Err() != nil {
		t.Error(held.Err())
	}
	if err := release(); err != nil {
		t.Error(err)
	}
}

// TestRelayByToken: the relay sends the server a token, over the TLS that the server requires.
func TestRelayByToken(t *testing.T) {
	t.Parallel()
	certs := certificates(t)
	const own = "token-of-the-server-itself-0123456789"
	bare, stop, err := natstest.Start(t.TempDir(), fmt.Sprintf("authorization { token: %q }\ntls { cert_file: %q, key_file: %q }", own, certs["server.pem"], certs["server.key"]))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	access := &Access{Token: own, CA: certs["ca.pem"]}
	if _, err := InitURL(t.Context(), bare, URLOptions{Data: filepath.Join(t.TempDir(), "shared"), Access: access}); err != nil {
		t.Fatal(err)
	}
	var bound net.Addr
	s := openWith(t, Options{
		Location: bare, Access: access, Listen: &jetlog.Listen{Address: "127.0.0.1:0", Token: secretToken},
		Bound: func(addr net.Addr) { bound = addr },
	})
	defer shut(t, s)
	at := "nats://" + bound.String()
	refused(t, Options{Location: at, Access: &Access{Token: own}}, jetlog.ErrNotAllowed)
	client := openWith(t, Options{Location: at, Access: &Access{Token: secretToken}})
	defer shut(t, client)
	must(t, client, "run", begun("step-1"))
	if e, err := s.Log.At(t.Context(), last(t, s)); err != nil || e.Principal != "token" {
		t.Errorf("%s was appended by %q, %v", e.Kind, e.Principal, err)
	}
}
