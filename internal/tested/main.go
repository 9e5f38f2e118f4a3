// Command tested runs `go test` and prints what it prints without -v. It also records, for
// each test, whether it ran or why it was skipped:
//
//	go run ./internal/tested --record FILE [FLAGS AND PACKAGES OF go test]
//
// FILE gets a line for each test that passed or was skipped, with tabs between its parts:
//
//	pass  PACKAGE  TEST
//	skip  PACKAGE  TEST  REASON
//
// The exit code is that of `go test`.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	code, err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "tested:", err)
	}
	os.Exit(code)
}

// run runs the tests, and returns their exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) (int, error) {
	if len(args) < 2 || args[0] != "--record" {
		return 2, errors.New("usage: tested --record FILE [ARGUMENTS OF go test]")
	}
	file, err := os.OpenFile(args[1], os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return 1, err
	}
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-json"}, args[2:]...)...)
	cmd.Stderr = stderr
	// The go command ends its tests when it is interrupted.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 20 * time.Second
	events, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return 1, errors.Join(err, file.Close())
	}
	err = filter(events, stdout, file)
	if err != nil {
		_, _ = io.Copy(io.Discard, events) // the go command ends when all is read
	}
	ended := cmd.Wait()
	err = errors.Join(err, file.Close())
	var exit *exec.ExitError
	switch {
	case errors.As(ended, &exit) && exit.ExitCode() > 0:
		return exit.ExitCode(), err
	case ended != nil || err != nil:
		return 1, errors.Join(ended, err)
	}
	return 0, nil
}
