package jetlog

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/front"
)

// granting returns a log that clients reach with the token, and the owner's own
// connection to it.
func granting(t *testing.T, grant front.Grant) (owner *Log, client func() *Log) {
	t.Helper()
	s, err := StartServer(t.Context(), ServerOptions{
		Dir: t.TempDir(), Listen: &Listen{Address: "127.0.0.1:0", Token: token, Grant: grant}, Bounds: front.Limits{Comeback: 1},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Shutdown)
	owner = connectTo(t, s.OwnerOptions())
	if err := owner.Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatal(err)
	}
	if err := owner.CreateBuckets(t.Context()); err != nil {
		t.Fatal(err)
	}
	addr, err := s.Listen(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return owner, func() *Log {
		l := connectTo(t, Options{URL: "nats://" + addr.String(), Token: token})
		if _, _, err := l.Open(t.Context()); err != nil {
			t.Fatal(err)
		}
		return l
	}
}

// denied fails unless err is a permanent refusal that contains why.
func denied(t *testing.T, what string, err error, why string) {
	t.Helper()
	if !errors.Is(err, ErrNotAllowed) || !strings.Contains(err.Error(), why) {
		t.Errorf("%s: %v, want a denial that contains %q", what, err, why)
	}
}

// TestForgedDecisions checks that while a trainer has the lease of its run, no other
// client can make the trainer's decisions. Any client may make requests to a run on
// behalf of users.
func TestForgedDecisions(t *testing.T) {
	t.Parallel()
	_, client := granting(t, front.Grant{})
	trainer, intruder := client(), client()
	if _, err := trainer.Lease(t.Context(), RunLease(trial.Run), []byte("{}"), time.Minute); err != nil {
		t.Fatal(err)
	}
	last, err := trainer.Decide(t.Context(), begun(t, "step-1"), 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, body := range []events.Body{
		events.CheckpointDeleted{Checkpoint: "step-1.a1", Reason: "forged"},
		events.CheckpointAborted{Checkpoint: "step-1.a1", Reason: "forged"},
		events.CheckpointCommitted{Checkpoint: "step-1.a1"},
		events.CheckpointSuperseded{Checkpoint: "step-1.a1", Reason: "forged"},
		events.GroupStarted{Attempt: 2, WorldSize: 1},
		events.TrialCompleted{},
	} {
		_, err := intruder.Decide(t.Context(), decision(t, trial, body), last)
		denied(t, string(body.Kind()), err, "another client has the lease")
	}
	_, err = intruder.Lease(t.Context(), RunLease(trial.Run), []byte("{}"), time.Minute)
	if held := (*LeaseHeldError)(nil); !errors.As(err, &held) {
		t.Errorf("the lease of a live trainer was taken: %v", err)
	}
	if last, err = intruder.Decide(t.Context(), decision(t, trial, events.CheckpointPinned{Checkpoint: "step-1.a1"}), last); err != nil {
		t.Errorf("a pin: %v", err)
	}
	if _, err := trainer.Decide(t.Context(), decision(t, trial, events.CheckpointDeleted{Checkpoint: "step-1.a1", Reason: "retention"}), last); err != nil {
		t.Errorf("the trainer deletes its own: %v", err)
	}
}

// TestDeletionsAreGranted checks that without the lease of the run a client deletes
// nothing, unless its door grants that.
func TestDeletionsAreGranted(t *testing.T) {
	t.Parallel()
	for _, grant := range []bool{false, true} {
		owner, client := granting(t, front.Grant{Delete: grant})
		last, err := owner.Decide(t.Context(), begun(t, "step-1"), 0)
		if err != nil {
			t.Fatal(err)
		}
		_, err = client().Decide(t.Context(), decision(t, trial, events.CheckpointDeleted{Checkpoint: "step-1.a1", Reason: "gc"}), last)
		if grant && err != nil {
			t.Errorf("granted: %v", err)
		} else if !grant {
			denied(t, "not granted", err, "--client-delete")
		}
	}
}

// TestLeaseOfDeadClient checks that the lease of a client that has ended may be taken
// before its term, as on one machine. The new holder then decides on the run.
func TestLeaseOfDeadClient(t *testing.T) {
	t.Parallel()
	_, client := granting(t, front.Grant{})
	first, second := client(), client()
	if _, err := first.Lease(t.Context(), RunLease(trial.Run), []byte("first"), time.Hour); err != nil {
		t.Fatal(err)
	}
	// A client waits while the lease is kept for another.
	take := func(patience time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		_, err := second.Lease(ctx, RunLease(trial.Run), []byte("second"), time.Hour)
		if held := (*LeaseHeldError)(nil); errors.As(err, &held) {
			_, err = second.TakeOver(ctx, held, []byte("second"), time.Hour)
		}
		return err
	}
	if err := take(300 * time.Millisecond); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("taken from a client that lives: %v", err)
	}
	first.Close()
	if err := take(20 * time.Second); err != nil {
		t.Fatalf("of a client that has ended: %v", err)
	}
	if _, err := second.Decide(t.Context(), begun(t, "step-1"), 0); err != nil {
		t.Error(err)
	}
}

// TestRunsOfClients checks that clients append only for the runs of their door, take no
// lease of other runs, and read all runs.
func TestRunsOfClients(t *testing.T) {
	t.Parallel()
	owner, client := granting(t, front.Grant{Runs: []string{"team-a-*"}})
	if _, err := owner.Append(t.Context(), factsOf(t, 2)...); err != nil {
		t.Fatal(err)
	}
	l := client()
	const why = "only for team-a-*"
	_, err := l.Append(t.Context(), fact(t, 1))
	denied(t, "a fact", err, why)
	_, err = l.Append(t.Context(), factsOf(t, 20)...)
	denied(t, "a batch", err, why)
	_, err = l.Decide(t.Context(), begun(t, "step-1"), 0)
	denied(t, "a decision", err, why)
	_, err = l.Lease(t.Context(), RunLease(trial.Run), nil, time.Minute)
	denied(t, "a lease", err, "does not let clients take the lease")

	mine := events.Aggregate{Run: "team-a-1", Trial: "t"}
	if _, err := l.Lease(t.Context(), RunLease(mine.Run), nil, time.Minute); err != nil {
		t.Error(err)
	}
	if _, err := l.Decide(t.Context(), decision(t, mine, events.TrialCompleted{}), 0); err != nil {
		t.Error(err)
	}
	if got := readAll(t, l, 1, 4); len(got) != 4 || got[3].Principal != "token" || got[2].Principal != "" {
		t.Errorf("it reads %+v", got)
	}
}

// TestBytesOfClients checks that the owner counts the appended bytes of all clients
// together.
func TestBytesOfClients(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 12} { // singly, and as a batch
		_, client := granting(t, front.Grant{Bytes: 16 << 10})
		refused := 0
		for i := range 60 {
			switch _, err := client().Append(t.Context(), factsOf(t, n)...); {
			case errors.Is(err, syscall.ENOSPC) && strings.Contains(err.Error(), "the 16384 bytes"):
				refused++
			case err != nil || refused > 0:
				t.Fatalf("append %d: %v", i, err)
			}
		}
		if refused == 0 || refused == 60 {
			t.Errorf("%d of 60 appends of %d were refused", refused, n)
		}
	}
}
