package jetlog

import (
	"errors"
	"sync"
	"testing"
	"time"
)

const long = time.Hour

func TestLease(t *testing.T) {
	l, s := newLog(t)
	other := reopen(t, s)
	const name = "run.1/job *>" // not a legal key
	lease, err := l.Lease(t.Context(), name, []byte("a"), long)
	if err != nil {
		t.Fatal(err)
	}
	if string(lease.Holder()) != "a" || time.Until(lease.Until()) < long-time.Minute {
		t.Errorf("lease of %s until %s", lease.Holder(), lease.Until())
	}
	_, err = other.Lease(t.Context(), name, []byte("b"), long)
	var held *LeaseHeldError
	if !errors.Is(err, ErrLeaseHeld) || !errors.As(err, &held) || string(held.Holder) != "a" {
		t.Fatalf("a second holder: %v", err)
	}
	if left := time.Until(held.Until); left > long || left < long-time.Minute {
		t.Errorf("it is said to end in %s", left)
	}
	if _, err := other.Lease(t.Context(), "another", []byte("b"), long); err != nil {
		t.Fatalf("another name: %v", err)
	}
	for range 3 {
		before := lease.Until()
		if err := lease.Renew(t.Context()); err != nil {
			t.Fatal(err)
		}
		if !lease.Until().After(before) {
			t.Error("renewing did not make it longer")
		}
	}

	// Renewed since: whoever thinks the holder dead is wrong.
	if _, err := other.TakeOver(t.Context(), held, []byte("b"), long); !errors.As(err, &held) {
		t.Fatalf("take over after a renewal: %v", err)
	}
	taken, err := other.TakeOver(t.Context(), held, []byte("b"), long)
	if err != nil {
		t.Fatal(err)
	}
	if err := lease.Renew(t.Context()); !errors.Is(err, ErrLeaseLost) {
		t.Fatalf("renew after it was taken over: %v", err)
	}
	if !lease.Until().IsZero() {
		t.Error("the lost lease is said to last")
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := taken.Renew(t.Context()); err != nil {
		t.Fatalf("renew after the old holder released: %v", err)
	}

	if err := taken.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := taken.Renew(t.Context()); !errors.Is(err, ErrLeaseLost) {
		t.Fatalf("renew after release: %v", err)
	}
	if _, err := l.Lease(t.Context(), name, []byte("a"), long); err != nil {
		t.Fatalf("after release: %v", err)
	}
}

func TestLeaseExpires(t *testing.T) {
	l, s := newLog(t)
	other := reopen(t, s)
	lease, err := l.Lease(t.Context(), "job", []byte("a"), 100*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	_, err = other.Lease(t.Context(), "job", []byte("b"), long)
	var held *LeaseHeldError
	if !errors.As(err, &held) {
		t.Fatalf("before the end: %v", err)
	}
	for errors.As(err, &held) {
		<-time.After(time.Until(held.Until))
		_, err = other.Lease(t.Context(), "job", []byte("b"), long)
	}
	if err != nil {
		t.Fatal(err)
	}
	if time.Now().Before(lease.Until()) {
		t.Error("it was given away before its holder's end")
	}
	if err := lease.Renew(t.Context()); !errors.Is(err, ErrLeaseLost) {
		t.Fatalf("renew after the end: %v", err)
	}
}

// Many who want the same free lease: one gets it, each time.
func TestLeaseContention(t *testing.T) {
	l, s := newLog(t)
	logs := []*Log{l, reopen(t, s), reopen(t, s)}
	for range 5 {
		var mu sync.Mutex
		var got []*Lease
		var wg sync.WaitGroup
		for i := range 9 {
			wg.Go(func() {
				lease, err := logs[i%3].Lease(t.Context(), "job", []byte{byte('a' + i)}, long)
				mu.Lock()
				defer mu.Unlock()
				switch {
				case err == nil:
					got = append(got, lease)
				case !errors.Is(err, ErrLeaseHeld):
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if len(got) != 1 {
			t.Fatalf("%d have the lease", len(got))
		}
		if err := got[0].Release(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// Lost acknowledgements of acquiring, renewing and releasing do no harm.
func TestLeaseLostAcknowledgement(t *testing.T) {
	_, s := newLog(t)
	d := &lossy{s: s}
	l := connectTo(t, Options{Dial: d.dial})
	if _, _, err := l.Open(t.Context()); err != nil {
		t.Fatal(err)
	}
	d.loseNext("$KV.")
	lease, err := l.Lease(t.Context(), "job", []byte("a"), long)
	if err != nil {
		t.Fatal(err)
	}
	d.loseNext("$KV.")
	if err := lease.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	d.loseNext("$KV.")
	if err := lease.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if d.lost() != 3 {
		t.Fatalf("%d acknowledgements were lost, want 3", d.lost())
	}
	if _, err := reopen(t, s).Lease(t.Context(), "job", []byte("b"), long); err != nil {
		t.Fatal(err)
	}
}

// Who asks learns who holds a lease, and takes nothing.
func TestLeaseHolder(t *testing.T) {
	l, s := newLog(t)
	other := reopen(t, s)
	const name = "run.1/job *>"
	if held, err := other.LeaseHolder(t.Context(), name); held != nil || err != nil {
		t.Fatalf("before anybody has it: %v, %v", held, err)
	}
	lease, err := l.Lease(t.Context(), name, []byte("a"), long)
	if err != nil {
		t.Fatal(err)
	}
	held, err := other.LeaseHolder(t.Context(), name)
	if err != nil || held == nil || string(held.Holder) != "a" || time.Until(held.Until) < long-time.Minute {
		t.Fatalf("while it is held: %v, %v", held, err)
	}
	if err := errors.Join(lease.Renew(t.Context()), lease.Release(t.Context())); err != nil {
		t.Fatal(err)
	}
	if held, err := other.LeaseHolder(t.Context(), name); held != nil || err != nil {
		t.Fatalf("after its release: %v, %v", held, err)
	}
	brief, err := l.Lease(t.Context(), name, []byte("b"), 100*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	// By the server's clock it may end a little later than its holder knows.
	deadline := time.Now().Add(time.Minute)
	for held := (&LeaseHeldError{Until: brief.Until()}); held != nil; {
		<-time.After(time.Until(held.Until))
		if held, err = other.LeaseHolder(t.Context(), name); err != nil || time.Now().After(deadline) {
			t.Fatalf("after its end: %v, %v", held, err)
		}
	}
}
