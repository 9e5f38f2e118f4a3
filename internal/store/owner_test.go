package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/query"
	"golang.org/x/sync/errgroup"
)

// TestQuestionCutOff: a query whose owner dies is asked again, of the same or the next owner.
func TestQuestionCutOff(t *testing.T) {
	t.Parallel()
	dir := made(t)
	owner, s := open(t, dir), open(t, dir)
	want := digest(t, owner)
	good := read(t, filepath.Join(dir, cardName))
	c, err := readCard(dir)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(os.Getenv("XDG_RUNTIME_DIR"), "cut"))
	if err != nil {
		t.Fatal(err)
	}
	c.API = l.Addr().String()
	text, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, cardName), string(text))
	var g errgroup.Group
	g.Go(func() error {
		got, err := query.Ask(t.Context(), s.Views(), query.Digest, query.Params{})
		if err != nil || got != want {
			return fmt.Errorf("digest %s, want %s, error %w", got, want, err)
		}
		return nil
	})
	conn, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, cardName), good)
	if err := errors.Join(conn.Close(), l.Close()); err != nil {
		t.Fatal(err)
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	// Without an owner, the query ends with the patience.
	s.opts.Patience = 100 * time.Millisecond
	write(t, filepath.Join(dir, cardName), string(text))
	_, err = query.Ask(t.Context(), s.Views(), query.Digest, query.Params{})
	wrong(t, err, query.ErrUnreachable)
	write(t, filepath.Join(dir, cardName), good)
}

// TestHungOwner stops an owner, which then holds the lock and does not answer.
func TestHungOwner(t *testing.T) {
	t.Parallel()
	dir := made(t)
	owner := actors(t, dir, 1)[0]
	owner.do(request{Do: "append", Run: "run", Name: "before", Count: 1})
	owner.signal(syscall.SIGSTOP)
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	const patience = 300 * time.Millisecond
	begin := time.Now()
	refused(t, Options{Location: dir, Patience: patience}, ErrLocked, fmt.Sprintf("process %d on %s", owner.pid(), host), "--offline", dir)
	if took := time.Since(begin); took < patience || took > patience+5*time.Second {
		t.Errorf("it took %s", took)
	}
	owner.signal(syscall.SIGCONT)
	onceEach(t, open(t, dir), owner.acknowledged())
	owner.end()
}

// TestDeafOwner: sockets that exist but do not speak NATS are no owner.
func TestDeafOwner(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]func(net.Conn){
		"hangs up": func(c net.Conn) { _ = c.Close() },
		"speaks another language": func(c net.Conn) {
			fmt.Fprint(c, "220 smtp\r\n")
			_ = c.Close()
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := made(t)
			lock, err := tryLock(dir)
			if err != nil || lock == nil {
				t.Fatal(lock, err)
			}
			defer lock.Close()
			l, err := net.Listen("unix", filepath.Join(os.Getenv("XDG_RUNTIME_DIR"), "deaf"+name[:1]))
			if err != nil {
				t.Fatal(err)
			}
			var served errgroup.Group
			served.Go(func() error {
				for {
					c, err := l.Accept()
					if err != nil {
						return nil
					}
					answer(c)
				}
			})
			text, err := json.Marshal(card{Host: "far", PID: 4711, Log: l.Addr().String()})
			if err != nil {
				t.Fatal(err)
			}
			write(t, filepath.Join(dir, cardName), string(text))
			refused(t, Options{Location: dir, Patience: 200 * time.Millisecond}, ErrLocked, "process 4711 on far")
			if err := l.Close(); err != nil {
				t.Error(err)
			}
			_ = served.Wait()
		})
	}
}

// TestCards: without an owner, owner.json is ignored; with an owner, it is the only record of the
// owner's address.
func TestCards(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"garbage": "\x00garbage", "empty": "", "not an object": "[]",
		"stale": `{"host":"far","pid":4711,"log":"/nowhere/o.log","api":"/nowhere/o.api"}`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := made(t)
			path := filepath.Join(dir, cardName)
			write(t, path, text)
			s := open(t, dir)
			if c, err := readCard(dir); err != nil || c.PID != os.Getpid() {
				t.Errorf("owner.json names %d, %v", c.PID, err)
			}
			must(t, open(t, dir), "run", begun("step-1"))
			shut(t, s)
		})
	}
	t.Run("damaged while it is owned", func(t *testing.T) {
		t.Parallel()
		dir := made(t)
		s := open(t, dir)
		write(t, filepath.Join(dir, cardName), "garbage")
		refused(t, Options{Location: dir, Patience: 2 * time.Second}, ErrLocked, "another process", cardName)
		shut(t, s)
		must(t, open(t, dir), "run", begun("step-1"))
	})
	// Between the lock and the new owner.json, the old file would name a process that is dead, or
	// by now another process.
	t.Run("of a dead owner while the next one starts", func(t *testing.T) {
		t.Parallel()
		dir := made(t)
		write(t, filepath.Join(dir, cardName), `{"host":"far","pid":4711}`)
		remove(t, dir, "log")
		refused(t, Options{Location: dir}, ErrDamaged)
		if _, err := os.Stat(filepath.Join(dir, cardName)); err == nil {
			t.Error("it names the dead owner")
		}
	})
}
