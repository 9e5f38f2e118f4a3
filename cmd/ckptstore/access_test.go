package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/api"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/problem/system"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// TestRolesOfClients tries every request of a client of the log as every role. The owner refuses
// the others.
func TestRolesOfClients(t *testing.T) {
	short, err := os.MkdirTemp("/tmp", "ck") //nolint:usetesting // sockets need a short path
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(short) }()
	t.Setenv("XDG_RUNTIME_DIR", short)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	dir, file := filepath.Join(t.TempDir(), "store"), filepath.Join(t.TempDir(), "users")
	if _, err := store.Init(ctx, dir, ""); err != nil {
		t.Fatal(err)
	}
	tokens := map[api.Role]string{}
	for _, role := range api.Roles {
		if tokens[role], _, err = api.IssueToken(ctx, file, api.Issue{Name: "a-" + role.String(), Role: role}); err != nil {
			t.Fatal(err)
		}
	}
	known, err := api.OpenUsers(file, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	bound := make(chan net.Addr, 1)
	owner, err := store.Open(ctx, store.Options{
		Location: dir, Listen: &jetlog.Listen{Address: "127.0.0.1:0", Clients: &clients{users: known}}, Bound: func(a net.Addr) { bound <- a },
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := owner.Close(); err != nil {
			t.Error(err)
		}
	}()
	url := "nats://" + (<-bound).String()
	lease, err := owner.Log.Lease(ctx, jetlog.RunLease("held"), []byte("owner"), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := lease.Release(ctx); err != nil {
			t.Error(err)
		}
	}()
	decide := func(s *store.Store, run string, body events.Body) error {
		agg := events.Aggregate{Run: run, Trial: projections.DefaultTrial}
		if body.Kind().Family() == "audit" {
			agg = events.Aggregate{}
		}
		d, err := events.NewDecision(store.Stamp("test"), agg, body)
		if err != nil {
			return err
		}
		end, err := s.Log.LaneEnd(ctx, agg)
		if err == nil {
			_, err = s.Log.Decide(ctx, d, end)
		}
		return err
	}
	var (
		all      = api.Roles
		cursors  = []api.Role{api.Reader, api.Operator, api.Admin}
		deciding = []api.Role{api.Operator, api.Admin}
	)
	operations := []struct {
		what string
		may  []api.Role
		do   func(s *store.Store, role string) error
	}{
		{"read the log", all, func(s *store.Store, _ string) error {
			for _, err := range s.Log.Read(ctx, 1, 1) {
				return err
			}
			return errors.New("no event")
		}},
		{"ask who it is", all, func(s *store.Store, role string) error {
			who, err := s.Log.Whoami(ctx)
			if err == nil && (who.Role != role || who.Principal != "user:a-"+role) {
				err = fmt.Errorf("it is %+v", who)
			}
			return err
		}},
		{"read leases", cursors, func(s *store.Store, _ string) error {
			held, err := s.Log.LeaseHolder(ctx, jetlog.RunLease("held"))
			if err == nil && held == nil {
				err = errors.New("no holder")
			}
			return err
		}},
		{"read cursors", cursors, func(s *store.Store, _ string) error {
			_, err := s.Log.ListCursors(ctx)
			return err
		}},
		{"move a cursor", cursors, func(s *store.Store, role string) error {
			c, err := s.Log.Cursor(ctx, "c-"+role)
			if err == nil {
				err = c.Move(ctx, 1)
			}
			return err
		}},
		{"append a fact", deciding, func(s *store.Store, role string) error {
			f, err := events.NewFact(store.Stamp("test"), events.Scope{Run: role, Trial: "main", Actor: events.Node(0)}, &events.Metrics{Attempt: 1, Iteration: 1})
			if err == nil {
				_, err = s.Log.Append(ctx, f)
			}
			return err
		}},
		{"decide", deciding, func(s *store.Store, role string) error { return decide(s, role, &events.TrialCreated{}) }},
		{"stop", deciding, func(s *store.Store, role string) error {
			return decide(s, role, &events.TrialStopRequested{Reason: "x"})
		}},
		{"take the lease of a run", deciding, func(s *store.Store, role string) error {
			l, err := s.Log.Lease(ctx, jetlog.RunLease(role), []byte("x"), time.Second)
			if err == nil {
				err = l.Release(ctx)
			}
			return err
		}},
		{"record who has access", []api.Role{api.Admin}, func(s *store.Store, role string) error {
			_, err := s.RecordAccess(ctx, &events.AccessGranted{User: "friend", Role: role, Hash: "0123456789abcdef"})
			return err
		}},
		{"record a revocation", []api.Role{api.Admin}, func(s *store.Store, _ string) error {
			_, err := s.RecordAccess(ctx, &events.AccessRevoked{User: "friend", Hashes: []string{"0123456789abcdef"}})
			return err
		}},
		{"record access to a run", nil, func(s *store.Store, role string) error {
			return decide(s, role, &events.AccessGranted{User: "friend", Role: role, Hash: "0123456789abcdef"})
		}},
		{"delete a checkpoint", nil, func(s *store.Store, _ string) error {
			return decide(s, "other", &events.CheckpointDeleted{Checkpoint: "step-1.a1"})
		}},
		{"seal the evidence", nil, func(s *store.Store, _ string) error { return decide(s, "", &events.AuditSealed{Size: 1}) }},
	}
	for _, role := range api.Roles {
		s, err := store.Open(ctx, store.Options{Location: url, Access: &store.Access{Token: tokens[role]}})
		if err != nil {
			t.Fatalf("as %s: %v", role, err)
		}
		for _, o := range operations {
			err := o.do(s, role.String())
			// An admin may record who has access, so the owner refuses it the form of the event alone.
			kind, got := problem.Denied, system.KindOf(err)
			if o.what == "record access to a run" && role == api.Admin {
				kind = problem.Internal
			}
			if may := slices.Contains(o.may, role); (err == nil) != may || !may && got != kind {
				t.Errorf("%s as %s: %v, of kind %v", o.what, role, err, got)
			}
		}
		if err := s.Close(); err != nil {
			t.Errorf("as %s: %v", role, err)
		}
	}
	last, err := owner.Log.Last(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for e, err := range owner.Log.Read(ctx, 2, last) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Principal != "user:a-operator" && e.Principal != "user:a-admin" || e.Kind.Family() == "access" && e.Principal != "user:a-admin" {
			t.Errorf("event %d, %s, is of %q", e.Sequence, e.Kind, e.Principal)
		}
	}
}
