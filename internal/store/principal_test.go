package store

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/front"
)

// TestActorIsTheServersWord: the owner records who sent an event, whatever the sender claims.
func TestActorIsTheServersWord(t *testing.T) {
	t.Parallel()
	certs := certificates(t)
	byName := func(t *testing.T, access Access, clients Access) (*Store, string) {
		t.Helper()
		listen, err := access.Listen("127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		owner, addr := listening(t, made(t), listen)
		scheme := "nats"
		if listen.TLS != nil {
			scheme = "tls"
		}
		remote := openWith(t, Options{Location: scheme + "://" + addr, Access: &clients})
		t.Cleanup(func() { shut(t, remote) })
		must(t, remote, "run", begun("step-1"))
		return owner, addr
	}
	principal := func(t *testing.T, s *Store, id string) string {
		t.Helper()
		for e, err := range s.Log.Read(t.Context(), 1, last(t, s)) {
			if err != nil {
				t.Fatal(err)
			}
			if e.ID == id || id == "" && e.Kind == (events.CheckpointBegun{}).Kind() {
				text, err := json.Marshal(e)
				if err != nil || e.Principal != "" != strings.Contains(string(text), `"ckptactor":"`+e.Principal+`"`) {
					t.Errorf("%s, %v", text, err)
				}
				return e.Principal
			}
		}
		t.Fatalf("event %q is not in the log", id)
		return ""
	}
	t.Run("token", func(t *testing.T) {
		owner, addr := byName(t, Access{Token: secretToken}, Access{Token: secretToken})
		if got := principal(t, owner, ""); got != "token" {
			t.Errorf("a client with the token is %q", got)
		}
		f, err := metrics("claimed", "run", 1)
		if err != nil {
			t.Fatal(err)
		}
		nc, err := nats.Connect("nats://"+addr, nats.Token(secretToken), nats.Name("admin"))
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		if m, err := nc.RequestMsg(forged(t, f.Event, events.HeaderActor, "admin"), limit); err != nil || strings.Contains(string(m.Data), "error") {
			t.Fatal(m, err)
		}
		if got := principal(t, owner, "claimed"); got != "token" {
			t.Errorf("a client that claims to be admin is %q", got)
		}
		say(t, owner, "run", events.Metrics{Attempt: 1, Iteration: 2})
		if e, err := owner.Log.At(t.Context(), last(t, owner)); err != nil || e.Principal != "" {
			t.Errorf("the owner's event has principal %q, %v", e.Principal, err)
		}
	})
	t.Run("certificate", func(t *testing.T) {
		owner, _ := byName(t, Access{Cert: certs["server.pem"], Key: certs["server.key"], CA: certs["ca.pem"], Token: secretToken},
			Access{CA: certs["ca.pem"], Cert: certs["server.pem"], Key: certs["server.key"], Token: secretToken})
		if got := principal(t, owner, ""); got != "cert:test server" {
			t.Errorf("a client with a certificate is %q", got)
		}
	})
	t.Run("certificate of no user", func(t *testing.T) {
		p := &people{of: map[[sha256.Size]byte]front.Client{}, gone: map[[sha256.Size]byte]error{}}
		p.set(secretToken, front.Client{Name: "rosa", Grant: front.Grant{Runs: []string{}}})
		listen, err := Access{Cert: certs["server.pem"], Key: certs["server.key"], CA: certs["ca.pem"], Clients: p}.Listen("127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		_, addr := listening(t, made(t), listen)
		by := func(token string) error {
			s, err := Open(t.Context(), Options{Location: "tls://" + addr, Access: &Access{CA: certs["ca.pem"], Cert: certs["server.pem"], Key: certs["server.key"], Token: token}})
			if err == nil {
				shut(t, s)
			}
			return err
		}
		if err := by(secretToken); err != nil {
			t.Errorf("a user with a certificate: %v", err)
		}
		p.revoke(secretToken, front.ErrRevoked)
		for name, token := range map[string]string{"no token": "", "a revoked token": secretToken, "an unknown token": strings.Repeat("x", 32)} {
			if err := by(token); err == nil {
				t.Errorf("a certificate and %s: %v", name, err)
			}
		}
	})
	t.Run("socket", func(t *testing.T) {
		dir := made(t)
		owner := open(t, dir)
		p := start(t, "actor")
		p.do(request{Do: "open", Location: dir})
		p.do(request{Do: "append", Run: "run", Name: "fact", Count: 1})
		if e, err := owner.Log.At(t.Context(), last(t, owner)); err != nil || e.Principal != fmt.Sprintf("uid:%d", os.Geteuid()) {
			t.Errorf("a process of this user is %q, %v", e.Principal, err)
		}
	})
}

// TestUserOfAnotherServer: a decision that an HTTP server has made for a user is the user's, although
// another process owns the store. The owner takes that from its own user's processes only, and
// takes only users of tokens.
func TestUserOfAnotherServer(t *testing.T) {
	t.Parallel()
	listen, err := Access{Token: secretToken}.Listen("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	owner, addr := listening(t, made(t), listen)
	must(t, owner, "run", begun("step-1"), events.CheckpointCommitted{Attempt: 1, Checkpoint: "step-1.a1", Manifest: "m"})
	client := open(t, owner.Location)
	if client.owned() != nil {
		t.Fatal("two processes own the store")
	}
	remote := openWith(t, Options{Location: "nats://" + addr, Access: &Access{Token: secretToken}})
	t.Cleanup(func() { shut(t, remote) })
	own := front.OfUser(uint32(os.Geteuid())).Name //nolint:gosec // of this process
	for _, c := range []struct {
		by         *Store
		name, want string
	}{
		{client, "user:olaf", "user:olaf"},
		{client, "", own},
		{client, "admin", own},
		{client, "uid:0", own},
		{client, "cert:olaf", own},
		{client, "user:", own},
		{client, "user:o laf", own},
		{client, "user:" + strings.Repeat("x", 65), own},
		{remote, "user:olaf", "token"},
		{owner, "user:olaf", "user:olaf"},
	} {
		ctx := WithTerms(t.Context(), Terms{By: "api/test", Principal: c.name})
		if _, err := c.by.Pin(ctx, "run@step-1", c.name+" of "+c.by.Location); err != nil {
			t.Fatal(err)
		}
		e, err := owner.Log.At(t.Context(), last(t, owner))
		if err != nil || e.Kind != (events.CheckpointPinned{}).Kind() || e.Principal != c.want {
			t.Errorf("%q by %s: %s is of %q, %v, want %q", c.name, c.by.Location, e.Kind, e.Principal, err, c.want)
		}
	}
}
