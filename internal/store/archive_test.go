package store

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/archive"
	"github.com/ckptstore/ckptstore/internal/query"
)

// often cuts a log so often that a test observes it.
var often = cutting{events: 40, bytes: 1 << 40, limits: archive.Limits{Messages: 16, Bytes: 1 << 20}, every: 5 * time.Millisecond}

func openCutting(t *testing.T, dir string, c cutting) *Store {
	t.Helper()
	s, err := Open(t.Context(), Options{Location: dir, cutting: &c, Logger: slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shut(t, s) })
	return s
}

// wholeLog returns all events of a log.
func wholeLog(t *testing.T, l *jetlog.Log) (all []events.Recorded) {
	t.Helper()
	last, err := l.Last(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for e, err := range l.Read(t.Context(), 1, last) {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, e)
	}
	return all
}

func sameEvents(t *testing.T, got, want []events.Recorded) {
	t.Helper()
	same := func(a, b events.Recorded) bool {
		return a.Sequence == b.Sequence && a.ID == b.ID && a.Kind == b.Kind && a.Scope == b.Scope && string(a.Data) == string(b.Data) && a.Stored.Equal(b.Stored) && a.Time.Equal(b.Time)
	}
	if !slices.EqualFunc(got, want, same) {
		t.Fatalf("the log has %d events, want %d, or they differ", len(got), len(want))
	}
}

func sealedOf(t *testing.T, l *jetlog.Log) uint64 {
	t.Helper()
	link, err := l.Sealed(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return link.Last
}

// cut cuts the log of a store that no process has open.
func cut(t *testing.T, dir string) {
	t.Helper()
	if err := cutAlone(t.Context(), dir, nil); err != nil {
		t.Fatal(err)
	}
}

func cutAlone(ctx context.Context, dir string, step func(string)) (err error) {
	s, err := closedStore(dir, Options{Location: dir, Logger: slog.New(slog.DiscardHandler), cutting: &often})
	if err != nil {
		return err
	}
	lock, err := tryLock(dir)
	if err == nil && lock == nil {
		err = ErrLocked
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unlock(lock)) }()
	if err := settleCut(dir, step); err != nil {
		return err
	}
	return cutTail(ctx, s, dir, step)
}

// TestCutWhileOwned: an owner cuts its log while it appends to and follows it, as another
// process does too. Neither notices the cuts.
func TestCutWhileOwned(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := openCutting(t, dir, often)
	other := openCutting(t, dir, often)
	must(t, s, "idle", begun("step-1"))
	head, err := s.Log.LaneEnd(t.Context(), events.Aggregate{Run: "idle", Trial: trialName})
	if err != nil {
		t.Fatal(err)
	}
	follow, stop := context.WithCancel(t.Context())
	followed := make(chan []events.Recorded)
	go func() {
		var all []events.Recorded
		for e, err := range other.Log.Read(follow, 1, 0) {
			if err != nil {
				break
			}
			if all = append(all, e); e.Kind == (events.CheckpointAborted{}).Kind() {
				break
			}
		}
		followed <- all
	}()
	want := []string{}
	give := time.Now().Add(limit)
	for i := 0; sealedOf(t, s.Log) < 200; i++ {
		if time.Now().After(give) {
			t.Fatalf("%d events are sealed after %s", sealedOf(t, s.Log), limit)
		}
		var facts []events.Fact
		for k := range 7 {
			f, err := metrics(fmt.Sprintf("f%d-%d", i, k), "busy", 7*i+k+1)
			if err != nil {
				t.Fatal(err)
			}
			facts = append(facts, f)
			want = append(want, f.ID)
		}
		<-time.After(time.Millisecond) // segments of 16 events are sealed slowly
		log := []*jetlog.Log{s.Log, other.Log}[i%2]
		if _, err := log.Append(t.Context(), facts...); err != nil {
			t.Fatal(err)
		}
	}
	// The lane has been idle since before the archive.
	d, err := events.NewDecision(Stamp("test"), events.Aggregate{Run: "idle", Trial: trialName}, &events.CheckpointAborted{Attempt: 1, Checkpoint: "step-1.a1", Reason: "test"})
	if err != nil {
		t.Fatal(err)
	}
	for _, after := range []uint64{0, head - 1, head + 1, 150} {
		_, err := other.Log.Decide(t.Context(), d, after)
		var conflict *jetlog.ConflictError
		if !errors.As(err, &conflict) || conflict.Actual != head {
			t.Fatalf("after %d: %v, want a conflict with %d", after, err, head)
		}
	}
	seq, err := other.Log.Decide(t.Context(), d, head)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := s.Log.Decide(t.Context(), d, head); err != nil || again != seq {
		t.Fatalf("the same decision again: %d, %v, want %d", again, err, seq)
	}
	stopAfter := time.AfterFunc(limit, stop)
	defer stopAfter.Stop()
	all := wholeLog(t, s.Log)
	sameEvents(t, <-followed, all[:seq])
	stop()
	var got []string
	for _, e := range all {
		if e.Scope.Run == "busy" {
			got = append(got, e.ID)
		}
	}
	if !slices.Equal(got, want) {
		t.Fatalf("%d facts were acknowledged, %d are in the log", len(want), len(got))
	}
	out, err := s.VerifyLog(t.Context(), nil)
	if err != nil || len(out.Findings) > 0 || out.Events < seq {
		t.Fatalf("%+v, %v", out, err)
	}
	views, err := s.VerifyViews(t.Context())
	if err != nil || !views.Equal {
		t.Fatalf("%+v, %v", views, err)
	}
}

// TestCutAtEachState kills a process in each state of a cut: the next owner has the same
// log and the same views, and cuts the log again.
func TestCutAtEachState(t *testing.T) {
	t.Parallel()
	for _, state := range []string{"sealed", "made", "moved", "cut", "tidied"} {
		t.Run(state, func(t *testing.T) {
			t.Parallel()
			dir := made(t)
			s := open(t, dir)
			must(t, s, "run", begun("step-1"))
			for i := range 50 {
				f, err := metrics(NewID(), "run", i+1)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := s.Log.Append(t.Context(), f); err != nil {
					t.Fatal(err)
				}
			}
			want, rows := wholeLog(t, s.Log), digest(t, s)
			lane, err := s.Log.LaneEnd(t.Context(), events.Aggregate{Run: "run", Trial: trialName})
			if err != nil {
				t.Fatal(err)
			}
			shut(t, s)
			for round := range 2 {
				p := start(t, "cut", "CKPTSTORE_TEST_DIR="+dir, "CKPTSTORE_TEST_STATE="+state)
				<-p.read
				err := p.cmd.Wait()
				if ws, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || ws.Signal() != syscall.SIGKILL {
					t.Fatalf("round %d: it was not killed: %v", round, err)
				}
				s := open(t, dir)
				sameEvents(t, wholeLog(t, s.Log), want)
				if got := digest(t, s); got != rows {
					t.Fatalf("round %d: the rows differ", round)
				}
				if exists(filepath.Join(dir, "log", nextDir)) {
					t.Fatalf("round %d: %s is left over", round, nextDir)
				}
				if end, err := s.Log.LaneEnd(t.Context(), events.Aggregate{Run: "run", Trial: trialName}); err != nil || end != lane {
					t.Fatalf("round %d: the lane ends at %d, %v, want %d", round, end, err, lane)
				}
				must(t, s, "other", begun("step-1"))
				want = wholeLog(t, s.Log)
				out, err := s.VerifyLog(t.Context(), nil)
				if err != nil || len(out.Findings) > 0 {
					t.Fatalf("round %d: %+v, %v", round, out, err)
				}
				shut(t, s)
				cut(t, dir)
				cut(t, dir) // of an empty stream
				s = open(t, dir)
				sameEvents(t, wholeLog(t, s.Log), want)
				if sealed := sealedOf(t, s.Log); sealed != uint64(len(want)) {
					t.Fatalf("round %d: %d of %d events are sealed", round, sealed, len(want))
				}
				must(t, s, "other", begun("step-2"))
				want, rows = wholeLog(t, s.Log), digest(t, s)
				lane, err = s.Log.LaneEnd(t.Context(), events.Aggregate{Run: "run", Trial: trialName})
				if err != nil {
					t.Fatal(err)
				}
				shut(t, s)
			}
		})
	}
}

// cutAndDie cuts a log and kills itself in the given state.
func cutAndDie(ctx context.Context) error {
	return cutAlone(ctx, os.Getenv("CKPTSTORE_TEST_DIR"), func(state string) {
		if state == os.Getenv("CKPTSTORE_TEST_STATE") {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	})
}

// TestDamagedArchive: any damage to the archive's files is found, and a store whose archive
// lacks a file does not open.
func TestDamagedArchive(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	must(t, s, "run", begun("step-1"))
	for i := range 50 {
		f, err := metrics(NewID(), "run", i+1)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Log.Append(t.Context(), f); err != nil {
			t.Fatal(err)
		}
	}
	rows := digest(t, s)
	shut(t, s)
	cut(t, dir)
	segments, err := filepath.Glob(filepath.Join(archiveDir(dir), "*.seg"))
	if err != nil || len(segments) != 4 {
		t.Fatalf("%d segments, %v", len(segments), err)
	}
	good := read(t, segments[1])
	s = open(t, dir)
	for at := 0; at < len(good); at += 37 {
		bad := []byte(good)
		bad[at] ^= 0x10
		write(t, segments[1], string(bad))
		// The open files are those from before the damage.
		shut(t, s)
		if s, err = Open(t.Context(), Options{Location: dir}); err != nil {
			// The open checks events in that segment.
			wrong(t, err, ErrDamaged, segments[1])
			write(t, segments[1], good)
			s = open(t, dir)
			continue
		}
		t.Cleanup(func() { shut(t, s) })
		out, err := s.VerifyLog(t.Context(), nil)
		if err != nil || len(out.Findings) == 0 {
			t.Fatalf("byte %d of %d is flipped: %d findings, %v", at, len(good), len(out.Findings), err)
		}
		write(t, segments[1], good)
		if out, err = s.VerifyLog(t.Context(), nil); err != nil || len(out.Findings) > 0 {
			t.Fatalf("byte %d is right again: %+v, %v", at, out, err)
		}
	}
	if got := digest(t, s); got != rows {
		t.Error("the rows differ")
	}
	shut(t, s)
	if err := os.Remove(segments[1]); err != nil {
		t.Fatal(err)
	}
	refused(t, Options{Location: dir}, ErrDamaged, "event 17", archiveDir(dir))
	write(t, segments[1], good)
	// Nor does another store's archive open.
	write(t, segments[3], "")
	refused(t, Options{Location: dir}, ErrDamaged, segments[3])
}

// TestPortOutlivesCuts: an owner that cuts its log keeps the port that it chose.
func TestPortOutlivesCuts(t *testing.T) {
	t.Parallel()
	c := often
	bound := make(chan net.Addr, 100)
	dir := made(t)
	s, err := Open(t.Context(), Options{Location: dir, cutting: &c, Listen: &jetlog.Listen{Address: "127.0.0.1:0"}, Bound: func(a net.Addr) { bound <- a }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shut(t, s) })
	first := <-bound
	client := open(t, "nats://"+first.String())
	give := time.Now().Add(limit)
	for i := 0; ; i++ {
		f, err := metrics(NewID(), "run", i+1)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := client.Log.Append(t.Context(), f); err != nil {
			t.Fatal(err)
		}
		if i%10 == 0 && sealedOf(t, client.Log) > 0 {
			break
		}
		if time.Now().After(give) {
			t.Fatalf("the log is not cut within %s", limit)
		}
	}
	if again := <-bound; again.String() != first.String() {
		t.Errorf("after a cut it listens on %s, want %s", again, first)
	}
}

// TestServedArchive: a client over TCP reads the archive of the served directory.
func TestServedArchive(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	must(t, s, "run", begun("step-1"), begun("step-2"))
	want := wholeLog(t, s.Log)
	shut(t, s)
	cut(t, dir)
	_, addr := listening(t, dir, &jetlog.Listen{Address: "127.0.0.1:0"})
	client := open(t, "nats://"+addr)
	sameEvents(t, wholeLog(t, client.Log), want)
	got, err := query.Ask(t.Context(), client.Views(), query.Runs, query.Params{})
	if err != nil || len(got) != 1 {
		t.Fatalf("%v, %v", got, err)
	}
}
