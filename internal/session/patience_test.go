package session

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
	"time"
)

// patienceEnv makes the test below run in another process, which is stopped.
const patienceEnv = "CKPTSTORE_TEST_PATIENCE"

// TestStoppedProcess checks that a deadline does not pass while the process is
// stopped, and passes once it has run for that long.
func TestStoppedProcess(t *testing.T) {
	const limit = 3 * time.Second
	if os.Getenv(patienceEnv) != "" {
		s := Store{words: newLastWords(t.Context(), nil)}
		ctx, cancel := s.answering(t.Context(), limit)
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
