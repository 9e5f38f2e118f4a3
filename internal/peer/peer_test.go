package peer_test

import (
	"errors"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/peer"
)

const patience = 60 * time.Second

func sleeper(t *testing.T) *exec.Cmd {
	t.Helper()
	c := exec.Command("sleep", "600")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	return c
}

func TestWatchTellsOfTheEnd(t *testing.T) {
	c := sleeper(t)
	gone := make(chan struct{})
	stop, err := peer.Watch(c.Process.Pid, func() { close(gone) })
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-gone:
		t.Fatal("reported as gone while it runs")
	default:
	}
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-gone:
	case <-time.After(patience):
		t.Fatal("the end was not reported")
	}
	stop()
}

func TestWatchThatIsStoppedTellsNothing(t *testing.T) {
	c := sleeper(t)
	stop, err := peer.Watch(c.Process.Pid, func() { t.Error("told") })
	if err != nil {
		t.Fatal(err)
	}
	stop()
	if err := errors.Join(c.Process.Kill()); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait()
}

func TestWatchOfNobody(t *testing.T) {
	c := sleeper(t)
	if err := c.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = c.Wait()
	if _, err := peer.Watch(c.Process.Pid, func() {}); err == nil {
		t.Fatal("a process that has ended is watched")
	}
}

func TestOfIsTheProcessThatConnected(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{ConnContext: peer.Context, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		pid, err := peer.Of(r.Context())
		if err != nil {
			t.Error(err)
		}
		_, _ = w.Write([]byte(strconv.Itoa(pid)))
	})}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { _ = server.Close() })
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = c.Close() }()
	if _, err := c.Write([]byte("GET / HTTP/1.0\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 4096)
	var got []byte
	for {
		n, err := c.Read(buf)
		got = append(got, buf[:n]...)
		if err != nil {
			break
		}
	}
	want := strconv.Itoa(os.Getpid())
	if len(got) < len(want) || string(got[len(got)-len(want):]) != want {
		t.Fatalf("got %q, want it to end with %s", got, want)
	}
}

func TestHungUp(t *testing.T) {
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	there, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	here, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	ctx := peer.Context(t.Context(), here)
	if _, err := there.Write([]byte("unread")); err != nil || peer.HungUp(ctx) {
		t.Fatalf("error %v, hung up %t before the end", err, peer.HungUp(ctx))
	}
	if err := there.Close(); err != nil || !peer.HungUp(ctx) {
		t.Errorf("error %v, hung up %t after it", err, peer.HungUp(ctx))
	}
	if err := here.Close(); err != nil || !peer.HungUp(ctx) {
		t.Errorf("error %v, hung up %t when this end is closed", err, peer.HungUp(ctx))
	}
	if peer.HungUp(t.Context()) {
		t.Error("without a connection, hung up")
	}
}

func TestOfWithoutASocket(t *testing.T) {
	if _, err := peer.Of(t.Context()); !errors.Is(err, peer.ErrUnknown) {
		t.Fatalf("error %v, want ErrUnknown", err)
	}
}
