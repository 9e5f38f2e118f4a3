package jetlog

import (
	"context"
	"errors"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
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
		t.Errorf("it is reported to end in %s", left)
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

	// It was renewed since: a caller that thinks the holder dead is wrong.
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
		t.Error("the lost lease is reported to last")
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
	expires(t, other, "job")
	if time.Now().Before(lease.Until()) {
		t.Error("it is reported as expired before its holder's end")
	}
	if _, err = other.Lease(t.Context(), "job", []byte("b"), long); !errors.As(err, &held) || !held.Expired() {
		t.Fatalf("after the end: %v", err)
	}
	// Its holder comes back: a takeover of the state found earlier comes too late.
	if err := lease.Renew(t.Context()); err != nil {
		t.Fatalf("renew after the end: %v", err)
	}
	_, err = other.TakeOver(t.Context(), held, []byte("b"), long)
	if !errors.As(err, &held) {
		t.Fatalf("take over after the holder came back: %v", err)
	}
	expires(t, other, "job")
	taken, err := other.TakeOver(t.Context(), held, []byte("b"), long)
	if err != nil {
		t.Fatal(err)
	}
	if err := lease.Renew(t.Context()); !errors.Is(err, ErrLeaseLost) || !lease.Until().IsZero() {
		t.Fatalf("renew after it was taken: %v", err)
	}
	if err := errors.Join(lease.Release(t.Context()), taken.Renew(t.Context())); err != nil {
		t.Fatal(err)
	}
}

// expires waits until a lease has expired by the server's clock.
func expires(t *testing.T, l *Log, name string) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		held, err := l.LeaseHolder(t.Context(), name)
		if err != nil || held == nil || time.Now().After(deadline) {
			t.Fatalf("lease %q: %v, %v", name, held, err)
		}
		if held.Expired() {
			return
		}
		<-time.After(time.Until(held.Until))
	}
}

// A lease whose entry or bucket is gone is taken again, unless another holder came
// first.
func TestLeaseGone(t *testing.T) {
	t.Parallel()
	l, s := newLog(t)
	other := reopen(t, s)
	for _, c := range []struct {
		name string
		lose func() error
	}{
		{"entry", func() error {
			kv, err := l.leases(t.Context())
			return errors.Join(err, kv.Delete(t.Context(), bucketKey("job")))
		}},
		{"bucket", func() error { return l.js.DeleteStream(t.Context(), leaseStream) }},
	} {
		lease, err := l.Lease(t.Context(), "job", []byte("a"), long)
		if err != nil {
			t.Fatal(err)
		}
		if err := c.lose(); err != nil {
			t.Fatal(err)
		}
		if err := lease.Renew(t.Context()); err != nil {
			t.Fatalf("%s: renew: %v", c.name, err)
		}
		if _, err := other.Lease(t.Context(), "job", []byte("b"), long); !errors.Is(err, ErrLeaseHeld) {
			t.Fatalf("%s: after it was taken again: %v", c.name, err)
		}
		if err := c.lose(); err != nil {
			t.Fatal(err)
		}
		taken, err := other.Lease(t.Context(), "job", []byte("b"), long)
		if err != nil {
			t.Fatal(err)
		}
		if err := lease.Renew(t.Context()); !errors.Is(err, ErrLeaseLost) {
			t.Fatalf("%s: renew after another holder came first: %v", c.name, err)
		}
		if err := errors.Join(lease.Release(t.Context()), taken.Release(t.Context())); err != nil {
			t.Fatal(err)
		}
	}
}

// A renewal that the log's server does not answer is no loss, however long that takes;
// an unanswered release is repeated.
func TestLeaseOutlivesItsServer(t *testing.T) {
	t.Parallel()
	p := startProcess(t)
	l := connectTo(t, Options{URL: p.url, Timeout: 500 * time.Millisecond})
	if err := l.Create(t.Context(), created(t, "store-1")); err != nil {
		t.Fatal(err)
	}
	lease, err := l.Lease(t.Context(), "job", []byte("a"), 100*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	stop := func() {
		if err := p.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		// Until all of its threads have stopped, one of them may still answer.
		var err error = syscall.EINTR
		for errors.Is(err, syscall.EINTR) {
			err = unix.Waitid(unix.P_PID, p.cmd.Process.Pid, nil, unix.WSTOPPED, nil)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	again := func() {
		if err := p.cmd.Process.Signal(syscall.SIGCONT); err != nil {
			t.Fatal(err)
		}
	}
	tries := func(what func(context.Context) error) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := what(ctx); err == nil || errors.Is(err, ErrLeaseLost) {
			t.Fatalf("while the server is stopped: %v", err)
		}
	}
	stop()
	tries(lease.Renew) // for ten terms
	again()
	if err := lease.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	p.kill()
	tries(lease.Renew)
	p.start()
	if err := lease.Renew(t.Context()); err != nil {
		t.Fatal(err)
	}
	stop()
	tries(lease.Release)
	again()
	if err := lease.Renew(t.Context()); !errors.Is(err, ErrLeaseLost) {
		t.Fatalf("renew after a release that was not answered: %v", err)
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Fatal(err)
	}
	if held, err := l.LeaseHolder(t.Context(), "job"); held != nil || err != nil {
		t.Fatalf("after its release: %v, %v", held, err)
	}
}

// Many callers want the same free lease: one gets it, each time.
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
	t.Parallel()
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

// LeaseHolder returns the holder of a lease and takes nothing.
func TestLeaseHolder(t *testing.T) {
	l, s := newLog(t)
	other := reopen(t, s)
	const name = "run.1/job *>"
	if held, err := other.LeaseHolder(t.Context(), name); held != nil || err != nil {
		t.Fatalf("before it has a holder: %v, %v", held, err)
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
	if _, err := l.Lease(t.Context(), name, []byte("b"), 100*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	expires(t, other, name)
}
