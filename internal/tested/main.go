// Command tested runs `go test` and prints what it prints without -v. It also records, for
// each test, whether it ran or why it was skipped:
//
//	go run ./internal/tested --record FILE [--retry] [FLAGS AND PACKAGES OF go test]
//
// FILE gets a line for each test that passed or was skipped, with tabs between its parts:
//
//	pass  PACKAGE  TEST
//	skip  PACKAGE  TEST  REASON
//
// The exit code is that of `go test`.
//
// With --retry, failed tests get a second try, one package after another. If a package ran to its end, these are
// its top-level tests that failed. If a panic or a timeout cut it short, they are its tests that did not pass: those
// that failed, did not end or never began. If no failed test is known, as after a failed build, the whole package is
// tested again. The exit code is then that of the second try. It is 1 if a test that failed at first does not pass,
// because it is skipped or missing.
//
// The second try hides nothing. The output of the first one stays, followed by a line
// `== FAILED at first: PACKAGE TEST…`. FILE gets a line for each test that failed at first and passed then. TEST is
// empty for a package that failed without a failed test:
//
//	unsteady  PACKAGE  TEST
//
// There is no second try after a data race. There is none either if `go test` was interrupted, or did not report on
// all packages.
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
		return 2, errors.New("usage: tested --record FILE [--retry] [ARGUMENTS OF go test]")
	}
	file, err := os.OpenFile(args[1], os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return 1, err
	}
	args = args[2:]
	again := len(args) > 0 && args[0] == "--retry"
	if again {
		args = args[1:]
	}
	code, f, err := try(ctx, args, stdout, stderr, file)
	if again && code == 1 && err == nil && ctx.Err() == nil {
		code, err = retry(ctx, parse(args), f, stderr)
	}
	err = errors.Join(err, file.Close())
	if err != nil {
		code = max(code, 1)
	}
	return code, err
}

// try runs `go test`. It returns its exit code and what became of the tests.
func try(ctx context.Context, args []string, stdout, stderr, record io.Writer) (int, *filter, error) {
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-json"}, args...)...)
	cmd.Stderr = stderr
	// The go command ends its tests when it is interrupted.
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 20 * time.Second
	f := &filter{stdout: stdout, record: record, running: map[string]*tests{}}
	events, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return 1, f, err
	}
	err = f.read(events)
	if err != nil {
		_, _ = io.Copy(io.Discard, events) // the go command ends when all is read
	}
	ended := cmd.Wait()
	var exit *exec.ExitError
	switch {
	case errors.As(ended, &exit) && exit.ExitCode() > 0:
		return exit.ExitCode(), f, err
	case ended != nil || err != nil:
		return 1, f, errors.Join(ended, err)
	}
	return 0, f, nil
}
