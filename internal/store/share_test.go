package store

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/query"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// actors are processes that have opened the store, one after the other.
func actors(t *testing.T, dir string, n int) []*process {
	t.Helper()
	all := make([]*process, n)
	for i := range all {
		all[i] = start(t, "actor")
		all[i].do(request{Do: "open", Location: dir})
	}
	return all
}

// TestConnect does everything through the owner that the owner can do itself.
func TestConnect(t *testing.T) {
	t.Parallel()
	dir := made(t)
	ps := actors(t, dir, 2)
	owner, other := ps[0], ps[1]
	if a, b := owner.do(request{Do: "owns"}), other.do(request{Do: "owns"}); a.Text != "true" || b.Text != "false" {
		t.Fatalf("the first owns: %s, the second: %s", a.Text, b.Text)
	}
	other.do(request{Do: "append", Run: "run", Name: "fact", Count: 10})
	other.do(request{Do: "begin", Run: "run", Name: "step-1"})
	owner.do(request{Do: "begin", Run: "run", Name: "step-2"})
	other.do(request{Do: "begin", Run: "run", Name: "step-3"})

	if a, b := owner.do(request{Do: "ids"}), other.do(request{Do: "ids"}); !bytes.Equal(a.Data, b.Data) {
		t.Errorf("the owner reads %s, the other %s", a.Data, b.Data)
	}
	for _, q := range []string{query.Runs.Name, query.Trial.Name, query.Checkpoints.Name, query.OpenCheckpoints.Name, query.Metrics.Name, query.Digest.Name} {
		r := request{Do: "ask", Name: q, Run: "run"}
		a, b := owner.do(r), other.do(r)
		if !bytes.Equal(a.Data, b.Data) || len(a.Data) < 4 {
			t.Errorf("%s: the owner returns %s, the other %s", q, a.Data, b.Data)
		}
	}
	c, err := readCard(dir)
	if err != nil || c.PID != owner.pid() {
		t.Errorf("owner.json names %d, %v", c.PID, err)
	}
	for _, path := range []string{c.Log, c.API} {
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("socket %s: %v, %v", path, info, err)
		}
	}

	// The owner ends in order while the other process appends.
	other.do(request{Do: "hammer", Run: "run", Name: "live"})
	progress(t, other)
	owner.end()
	owned(t, dir, other)
	progress(t, other)
	other.do(request{Do: "stop"})
	if got := other.do(request{Do: "owns"}); got.Text != "true" {
		t.Error("no process took the store over")
	}
	other.do(request{Do: "ask", Name: query.Digest.Name})
	other.end()
	if _, err := os.Stat(filepath.Join(dir, cardName)); err == nil {
		t.Error("owner.json stays without an owner")
	}
	onceEach(t, open(t, dir), other.acknowledged())
}

// progress waits until the process has another acknowledged event.
func progress(t *testing.T, p *process) {
	t.Helper()
	before := len(p.acknowledged())
	eventually(t, fmt.Sprintf("process %d appends", p.pid()), func() bool { return len(p.acknowledged()) > before })
}

// owned waits until one of ps is the owner and returns its index.
func owned(t *testing.T, dir string, ps ...*process) int {
	t.Helper()
	at := -1
	eventually(t, "one of the others owns the store", func() bool {
		c, err := readCard(dir)
		at = slices.IndexFunc(ps, func(p *process) bool { return err == nil && p.pid() == c.PID })
		return at >= 0
	})
	return at
}

// TestOwnersKilled kills one owner after the other while 20 processes append facts and two of them
// make decisions on a lane. Every second owner dies before the others have found it.
func TestOwnersKilled(t *testing.T) {
	t.Parallel()
	const trainers, kills = 20, 6
	dir := made(t)
	ps := make([]*process, trainers)
	for i := range ps {
		ps[i] = start(t, "actor")
		ps[i].tell(request{Do: "open", Location: dir})
	}
	for i, p := range ps {
		if r := p.hear("open"); r.Error != "" {
			t.Fatal(r.Error)
		}
		p.do(request{Do: "hammer", Run: fmt.Sprintf("run-%d", i/2), Name: fmt.Sprintf("p%d", i)})
	}
	var acked []string
	for len(ps) > trainers-kills {
		if len(ps)%2 == 0 {
			for _, p := range ps {
				progress(t, p)
			}
		}
		i := owned(t, dir, ps...)
		ps[i].kill()
		acked = append(acked, ps[i].acknowledged()...)
		ps = slices.Delete(ps, i, i+1)
	}
	for _, p := range ps {
		progress(t, p)
		p.do(request{Do: "stop"})
	}
	for _, p := range ps {
		p.do(request{Do: "ask", Name: query.Runs.Name})
		p.end()
		acked = append(acked, p.acknowledged()...)
	}
	decisions := 0
	for _, id := range acked {
		if strings.Contains(id, "-d") {
			decisions++
		}
	}
	if len(acked) < 100 || decisions < trainers {
		t.Errorf("only %d events, %d of them decisions", len(acked), decisions)
	}
	onceEach(t, open(t, dir), acked)
}

// TestQueriesDuringHandover queries a store whose owner dies.
func TestQueriesDuringHandover(t *testing.T) {
	t.Parallel()
	dir := made(t)
	owner := actors(t, dir, 1)[0]
	s := open(t, dir)
	if s.Owns() {
		t.Fatal("two owners")
	}
	must(t, s, "run", begun("step-1"))
	want := digest(t, s)
	var g errgroup.Group
	asked := make(chan struct{}, 1)
	stop := make(chan struct{})
	g.Go(func() error {
		for {
			got, err := query.Ask(t.Context(), s.Views(), query.Digest, query.Params{})
			if err != nil || got != want {
				return fmt.Errorf("digest %s, want %s, error %w", got, want, err)
			}
			select {
			case asked <- struct{}{}:
			case <-stop:
				return nil
			default:
			}
		}
	})
	<-asked
	owner.kill()
	eventually(t, "it owns the store", s.Owns)
	close(stop)
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}

// TestHandoverWhileOpening opens a store at the moment in which its owner goes.
func TestHandoverWhileOpening(t *testing.T) {
	t.Parallel()
	dir := made(t)
	s := open(t, dir)
	for i := range 15 {
		var next *Store
		var g errgroup.Group
		g.Go(func() (err error) {
			next, err = Open(t.Context(), Options{Location: dir})
			return err
		})
		g.Go(s.Close)
		if err := g.Wait(); err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
		s = next
		if _, err := decide(t.Context(), s, "run", begun(fmt.Sprintf("step-%d", i))); err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
	}
	shut(t, s)
}

// TestCopy: a copy of a store has its identity. Both may be open at once.
func TestCopy(t *testing.T) {
	t.Parallel()
	dir := made(t)
	copied := filepath.Join(t.TempDir(), "copy")
	if err := os.CopyFS(copied, os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	first, second := open(t, dir), open(t, copied)
	if !first.Owns() || !second.Owns() {
		t.Fatal("one directory's owner owns the other")
	}
	// Each can still be found.
	for _, location := range []string{dir, copied} {
		s := open(t, location)
		if s.Owns() {
			t.Error("a second owner")
		}
		must(t, s, "run", begun("step-1"))
		shut(t, s)
	}
}

// TestDeadSockets: what killed owners have left is removed.
func TestDeadSockets(t *testing.T) {
	t.Parallel()
	dir := made(t)
	for range 2 {
		actors(t, dir, 1)[0].kill()
	}
	s := open(t, dir)
	left, err := filepath.Glob(filepath.Join(s.Runtime, "o*"))
	if err != nil || len(left) != 2 {
		t.Errorf("sockets: %v, %v", left, err)
	}
	mine := fmt.Sprintf("o%d-", os.Getpid())
	for _, path := range left {
		if !strings.Contains(path, mine) {
			t.Errorf("%s is left", path)
		}
	}
}

// TestOneLog opens a directory on both sides of a lock: a log with two writing servers is lost.
func TestOneLog(t *testing.T) {
	t.Parallel()
	dir := made(t)
	ps := make([]*process, 4)
	for i := range ps {
		ps[i] = start(t, "actor")
		ps[i].tell(request{Do: "open", Location: dir})
	}
	owners := 0
	var acked []string
	for i, p := range ps {
		if r := p.hear("open"); r.Error != "" {
			t.Fatal(r.Error)
		}
		p.do(request{Do: "append", Run: "run", Name: fmt.Sprint("p", i), Count: 5})
		acked = append(acked, p.acknowledged()...)
	}
	for _, p := range ps {
		if p.do(request{Do: "owns"}).Text == "true" {
			owners++
		}
	}
	if owners != 1 {
		t.Errorf("%d owners", owners)
	}
	lock, err := os.Open(filepath.Join(dir, lockName))
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
		t.Error("the lock is free")
	}
	lock.Close()
	for _, p := range ps {
		p.end()
	}
	s := open(t, dir)
	must(t, s, "run", events.TrialCreated{})
	onceEach(t, s, acked)
}
