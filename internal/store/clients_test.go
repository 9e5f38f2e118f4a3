package store

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/front"
)

// people are clients with tokens of their own.
type people struct {
	mu   sync.Mutex
	of   map[[sha256.Size]byte]front.Client
	gone map[[sha256.Size]byte]error // why a token is no longer known
}

// Of implements [front.Clients].
func (p *people) Of(digest [sha256.Size]byte) (front.Client, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c, ok := p.of[digest]; ok {
		return c, nil
	}
	if err := p.gone[digest]; err != nil {
		return front.Client{}, err
	}
	return front.Client{}, front.ErrUnknown
}

func (p *people) set(token string, c front.Client) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.of[sha256.Sum256([]byte(token))] = c
}

func (p *people) revoke(token string, why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	digest := sha256.Sum256([]byte(token))
	delete(p.of, digest)
	p.gone[digest] = why
}

// TestClientsWithTokens: one person with two tokens has one name in events, whatever a
// client sends; a reader appends nothing. A revoked token ends the live session, and admits
// no other; so does a change of rights, after which the client has the new ones.
func TestClientsWithTokens(t *testing.T) {
	t.Parallel()
	token := func(n string) string { return strings.Repeat(n, 32) }
	p := &people{of: map[[sha256.Size]byte]front.Client{}, gone: map[[sha256.Size]byte]error{}}
	ada, rosa := front.Client{Name: "ada"}, front.Client{Name: "rosa", Grant: front.Grant{Runs: []string{}}}
	p.set(token("a1"), ada)
	p.set(token("a2"), ada)
	p.set(token("b1"), rosa)
	owner, addr := listening(t, made(t), &jetlog.Listen{Address: "127.0.0.1:0", Clients: p})
	url := "nats://" + addr
	by := func(id string) string {
		t.Helper()
		for e, err := range owner.Log.Read(t.Context(), 1, last(t, owner)) {
			if err != nil {
				t.Fatal(err)
			}
			if e.ID == id {
				return e.Principal
			}
		}
		t.Fatalf("event %s is not in the log", id)
		return ""
	}
	connect := func(token string) (*nats.Conn, chan struct{}, error) {
		closed := make(chan struct{})
		nc, err := nats.Connect(url, nats.Token(token), nats.NoReconnect(), nats.ClosedHandler(func(*nats.Conn) { close(closed) }))
		if err == nil {
			t.Cleanup(nc.Close)
		}
		return nc, closed, err
	}
	send := func(nc *nats.Conn, id string) (string, error) {
		f, err := metrics(id, "run", 1)
		if err != nil {
			t.Fatal(err)
		}
		m, err := nc.RequestMsg(forged(t, f.Event, events.HeaderActor, "admin"), limit)
		if err != nil {
			return "", err
		}
		return string(m.Data), nil
	}
	for n, id := range map[string]string{"a1": "first", "a2": "second"} {
		nc, _, err := connect(token(n))
		if err != nil {
			t.Fatal(err)
		}
		if answer, err := send(nc, id); err != nil || strings.Contains(answer, "error") {
			t.Fatalf("%s, %v", answer, err)
		}
		if got := by(id); got != "user:ada" {
			t.Errorf("the owner of token %s is %q", n, got)
		}
	}
	if _, _, err := connect(token("c1")); !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("an unknown token: %v", err)
	}
	if _, _, err := connect(""); !errors.Is(err, nats.ErrAuthorization) {
		t.Errorf("no token: %v", err)
	}
	reader := openWith(t, Options{Location: url, Access: &Access{Token: token("b1")}})
	if n, err := reader.Log.Last(t.Context()); err != nil || n < 3 {
		t.Errorf("a reader sees %d events, %v", n, err)
	}
	shut(t, reader)
	nc, closed, err := connect(token("b1"))
	if err != nil {
		t.Fatal(err)
	}
	if answer, err := send(nc, "third"); err != nil || !strings.Contains(answer, "lets this client read, and not append") {
		t.Errorf("a reader: %s, %v", answer, err)
	}
	ends := func(closed chan struct{}) {
		t.Helper()
		select {
		case <-closed:
		case <-time.After(limit):
			t.Fatal("the session was not ended")
		}
	}
	p.set(token("b1"), front.Client{Name: "rosa"})
	ends(closed)
	if nc, closed, err = connect(token("b1")); err != nil {
		t.Fatal(err)
	}
	if answer, err := send(nc, "third"); err != nil || strings.Contains(answer, "error") || by("third") != "user:rosa" {
		t.Errorf("with more rights: %s, %v", answer, err)
	}
	p.revoke(token("b1"), front.ErrRevoked)
	ends(closed)
	if _, err := send(nc, "fourth"); err == nil {
		t.Error("a revoked client appended")
	}
	if _, _, err := connect(token("b1")); err == nil || !strings.Contains(strings.ToLower(err.Error()), nats.AUTHENTICATION_REVOKED_ERR) {
		t.Errorf("a revoked token: %v", err)
	}
}

// TestSubscriptionOfRevokedToken: a client that follows the log ends with the reason when its
// token is revoked or expires.
func TestSubscriptionOfRevokedToken(t *testing.T) {
	t.Parallel()
	for what, end := range map[string]struct {
		why  error
		want string
	}{"revoked": {front.ErrRevoked, "the token was revoked"}, "expired": {front.ErrExpired, "the token has expired"}} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			token := strings.Repeat("d4", 32)
			rosa := front.Client{Name: "rosa", Role: "reader", Token: "laptop", Hash: "0123456789abcdef", Grant: front.Grant{Runs: []string{}, LogAlone: true}}
			p := &people{of: map[[sha256.Size]byte]front.Client{}, gone: map[[sha256.Size]byte]error{}}
			p.set(token, rosa)
			owner, addr := listening(t, made(t), &jetlog.Listen{Address: "127.0.0.1:0", Clients: p})
			reader := openWith(t, Options{Location: "nats://" + addr, Access: &Access{Token: token}, Reader: true})
			if who, err := reader.Log.Whoami(t.Context()); err != nil || who.Principal != "user:rosa" || who.Role != "reader" || who.Token != "laptop" || who.Append || !who.LogAlone {
				t.Errorf("whoami: %+v, %v", who, err)
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			newest := last(t, owner)
			var ended error
			for e, err := range reader.Log.Read(ctx, 1, 0) {
				if ended = err; err != nil {
					break
				}
				if e.Sequence == newest {
					p.revoke(token, end.why)
				}
			}
			if !errors.Is(ended, jetlog.ErrNotAllowed) || !strings.Contains(fmt.Sprint(ended), end.want) {
				t.Errorf("the subscription ended with %v", ended)
			}
			if _, err := reader.Log.Last(ctx); !errors.Is(err, jetlog.ErrNotAllowed) {
				t.Errorf("the next request: %v", err)
			}
			if _, err := Whoami(ctx, "nats://"+addr); !errors.Is(err, jetlog.ErrNotAllowed) {
				t.Errorf("without a token: %v", err)
			}
			if _, err := dialURL(ctx, "nats://"+addr, &Access{Token: token}, jetlog.Options{}); !errors.Is(err, jetlog.ErrNotAllowed) || !strings.Contains(fmt.Sprint(err), end.want) {
				t.Errorf("a new connection: %v", err)
			}
			if err := reader.Close(); !errors.Is(err, jetlog.ErrNotAllowed) {
				t.Errorf("closed with %v: the views follow the log as well", err)
			}
		})
	}
}
