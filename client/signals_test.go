package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"
)

// heldEnv makes this program a worker that waits to be ended.
const heldEnv = "CKPTSTORE_TEST_HELD"

// heldLimit bounds the waits of [TestTermBeforeRelease].
const heldLimit = 30 * time.Second

func holdSignals() int {
	ctx, cancel := context.WithTimeout(context.Background(), 2*heldLimit)
	defer cancel()
	c, err := Connect(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer c.Close()
	<-ctx.Done()
	return 0
}

// A trainer sends SIGTERM to a worker before it reads the worker's hold_signals,
// and then releases the signals. The worker sees both at once, and ends.
func TestTermBeforeRelease(t *testing.T) {
	t.Parallel()
	for round := range 40 { // the worker sees either one first, at random
		t.Run(fmt.Sprint(round), termBeforeRelease)
	}
}

func termBeforeRelease(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), heldLimit)
	defer cancel()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), heldEnv+"=1", EnvSocket+"="+socket, EnvToken+"=secret")
	cmd.Stderr = os.Stderr
	started, holds := make(chan struct{}), make(chan struct{})
	releases, released := make(chan struct{}), make(chan struct{})
	signal := func(sig syscall.Signal) {
		<-started
		if err := cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
			t.Error(err)
		}
	}
	mux := http.NewServeMux()
	answer := func(w http.ResponseWriter, body string) { _, _ = io.WriteString(w, body) }
	mux.HandleFunc("/v1/hello", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, `{"protocol":3,"run":"r","attempt":1,"world_size":1}`)
	})
	mux.HandleFunc("/v1/hold_signals", func(w http.ResponseWriter, r *http.Request) {
		close(holds)
		select {
		case <-releases:
		case <-r.Context().Done():
		}
		answer(w, `{}`)
		_ = http.NewResponseController(w).Flush() // fails if the worker is dead, which is fine
		close(released)
	})
	var once sync.Once
	mux.HandleFunc("/v1/signaled", func(w http.ResponseWriter, _ *http.Request) {
		reply := `{"end":true}`
		once.Do(func() { // SIGUSR1: until it is answered, the worker reads neither
			reply = `{}`
			signal(syscall.SIGTERM)
			close(releases)
			<-released
		})
		answer(w, reply)
	})
	mux.HandleFunc("/v1/release_signals", func(w http.ResponseWriter, _ *http.Request) { answer(w, `{}`) })
	defer answers(t, l, mux)()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	close(started)
	select {
	case <-holds:
		signal(syscall.SIGUSR1)
	case <-ctx.Done():
		t.Error("the worker does not hold its signals")
	}
	err = cmd.Wait()
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || status.Signal() != syscall.SIGTERM {
		t.Errorf("the worker ended by %v, want SIGTERM", err)
	}
}

// A client that leaves signals to its program holds none back.
func TestOwnSignals(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/v1/hello", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"protocol":3,"run":"r","attempt":1,"world_size":1}`)
	})
	defer answers(t, l, mux)()
	t.Setenv(EnvSocket, socket)
	t.Setenv(EnvToken, "secret")
	ctx, cancel := context.WithTimeout(t.Context(), heldLimit)
	defer cancel()
	for _, own := range []bool{true, false} {
		var options []Option
		if own {
			options = append(options, WithOwnSignals())
		}
		c, err := Connect(ctx, options...)
		if err != nil {
			t.Fatal(err)
		}
		if c.HoldsSignals() == own {
			t.Errorf("with own signals %t, the client holds them: %t", own, c.HoldsSignals())
		}
		c.Close()
	}
}

// answers serves requests until the returned function is called.
func answers(t *testing.T, l net.Listener, h http.Handler) (end func()) {
	server := &http.Server{Handler: h}
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	return func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
		if err := <-served; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	}
}
