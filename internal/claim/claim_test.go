package claim

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// of writes the claim of another machine.
func of(t *testing.T, dir, host string) Owner {
	t.Helper()
	o := Owner{Host: host, Boot: "another boot", PID: 7, Started: time.Unix(1, 0).UTC()}
	text, err := json.Marshal(o)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, Name), text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	return o
}

// A live owner of another machine keeps the directory, although this process has its lock.
func TestLiveOwnerElsewhere(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	want := of(t, dir, "elsewhere")
	ctx, stop := context.WithCancel(t.Context())
	beats := make(chan struct{})
	go func() { // as the other machine does
		defer close(beats)
		for n := 0; ctx.Err() == nil; n++ {
			_ = os.WriteFile(filepath.Join(dir, BeatName), []byte{byte(n)}, 0o600)
			<-time.After(time.Millisecond)
		}
	}()
	_, err := take(t.Context(), dir, slog.New(slog.DiscardHandler))
	stop()
	<-beats
	var held *HeldError
	if !errors.As(err, &held) || held.Owner != want {
		t.Errorf("error %v, want that %+v holds it", err, want)
	}
}

// The claim of this machine's own dead process, whose lock this one has got, is replaced at
// once; so is none that a live process put there meanwhile.
func TestDeadOwnerHere(t *testing.T) {
	t.Parallel()
	dir, log := t.TempDir(), slog.New(slog.DiscardHandler)
	first, err := take(t.Context(), dir, log)
	if err != nil {
		t.Fatal(err)
	}
	second, err := take(t.Context(), dir, log) // its lock proves that the first is gone
	if err != nil {
		t.Fatal(err)
	}
	if err := first.Release(); err != nil {
		t.Error(err)
	}
	if _, owner, err := read(dir); err != nil || owner != second.owner {
		t.Errorf("claim of %+v, %v, want the second's", owner, err)
	}
	if err := second.bury([]byte("another text"), Owner{}); !errors.As(err, new(*HeldError)) {
		t.Errorf("error %v of the burial of a live claim", err)
	}
	if _, owner, err := read(dir); err != nil || owner != second.owner {
		t.Errorf("claim of %+v, %v after the burial of another text, want the second's", owner, err)
	}
	if err := second.Release(); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("files %v are left, %v", left, err)
	}
}

// An owner whose directory was taken by another machine learns it.
func TestTakenAway(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	c, err := take(t.Context(), dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	of(t, dir, "elsewhere")
	select {
	case <-c.Lost():
	case <-time.After(time.Minute):
		t.Error("the loss is not noticed")
	}
	if err := c.Release(); err != nil {
		t.Error(err)
	}
	if _, owner, err := read(dir); err != nil || owner.Host != "elsewhere" {
		t.Errorf("claim of %+v, %v, want that of the other machine", owner, err)
	}
}

// A machine finds the trace of another one in a directory that they share, with its lock,
// and tells a copy of the directory from it.
func TestProbe(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	trace, err := Leave(dir)
	if err != nil {
		t.Fatal(err)
	}
	if s, err := Look(t.Context(), dir, trace.Name, trace.Text); err != nil || !s.Locks {
		t.Errorf("found %+v, %v", s, err)
	}
	soon, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := Look(soon, t.TempDir(), trace.Name, trace.Text); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v in another directory", err)
	}
	if _, err := Look(t.Context(), dir, trace.Name, "other"); err == nil {
		t.Error("other bytes are taken for the trace")
	}
	if _, err := Look(t.Context(), dir, "../"+trace.Name, trace.Text); err == nil {
		t.Error("a path is taken for a name")
	}
	if err := trace.Remove(); err != nil {
		t.Error(err)
	}
}
