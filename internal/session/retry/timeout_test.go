package retry

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// patienceEnv makes the test below run in another process, which is stopped.
const patienceEnv = "CKPTSTORE_TEST_PATIENCE"

// TestStoppedProcess checks that a deadline does not pass while the process is
// stopped, and passes once it has run for that long.
func TestStoppedProcess(t *testing.T) {
	const limit = 3 * time.Second
	if os.Getenv(patienceEnv) != "" {
		ctx, cancel := New(t.Context(), Options{}).Timeout(t.Context(), limit)
		defer cancel()
		<-time.After(limit / 30) // by now it measures
		fmt.Println("waiting")
		if _, err := bufio.NewReader(os.Stdin).ReadString('\n'); err != nil {
			t.Fatal(err)
		}
		select {
		case <-ctx.Done():
			t.Fatal("the deadline has passed while this process was stopped")
		case <-time.After(limit / 30):
		}
		<-ctx.Done()
		if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
			t.Error(ctx.Err())
		}
		return
	}
	t.Parallel()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), exe, "-test.run=^TestStoppedProcess$")
	cmd.Env = append(os.Environ(), patienceEnv+"=1")
	cmd.Stderr = os.Stderr
	in, err1 := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err := errors.Join(err1, err2, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(out)
	if line, err := lines.ReadString('\n'); err != nil || line != "waiting\n" {
		t.Fatal(line, err)
	}
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	<-time.After(limit + time.Second)
	if _, err := in.Write([]byte("\n")); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	_, err = lines.WriteTo(&said)
	if err := errors.Join(err, cmd.Wait()); err != nil {
		t.Errorf("%v: %s", err, said.String())
	}
}

// A deadline is extended while the log does not answer, and only then.
func TestTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &away{until: time.Now().Add(time.Hour)}
		c := patient(t.Context())
		began := time.Now()
		ends := func(limit, want time.Duration) {
			t.Helper()
			ctx, cancel := c.Timeout(t.Context(), limit)
			defer cancel()
			child, stop := context.WithCancel(ctx)
			defer stop()
			<-child.Done()
			if !errors.Is(ctx.Err(), context.DeadlineExceeded) || !errors.Is(child.Err(), context.DeadlineExceeded) {
				t.Errorf("it ended with %v, %v", ctx.Err(), child.Err())
			}
			if d := time.Since(began); d < want || d > want+lastPause {
				t.Errorf("it ended after %v, want %v", d, want)
			}
		}
		ends(time.Minute, time.Minute)
		said := make(chan error, 1)
		go func() {
			said <- c.UntilAnswered(t.Context(), a.call)
		}()
		ends(2*time.Minute, time.Hour+2*time.Minute)
		if err := <-said; err != nil {
			t.Fatal(err)
		}
		ends(time.Minute, time.Hour+3*time.Minute)

		ctx, cancel := c.Timeout(t.Context(), time.Minute)
		cancel()
		if !errors.Is(ctx.Err(), context.Canceled) {
			t.Errorf("it was cancelled with %v", ctx.Err())
		}
		parent, end := context.WithCancel(t.Context())
		ctx, cancel = c.Timeout(parent, time.Minute)
		defer cancel()
		end()
		<-ctx.Done()
		if !errors.Is(ctx.Err(), context.Canceled) {
			t.Errorf("it ended with its parent by %v", ctx.Err())
		}
	})
}
