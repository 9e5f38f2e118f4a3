package cmd_test

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestScripts runs testdata/script: one file per subject, in the language of package
// testscript, with the commands below.
func TestScripts(t *testing.T) { testscript.Run(t, scripts(filepath.Join("testdata", "script"))) }

// scripts returns the parameters of the scripts in a directory.
func scripts(dir string) testscript.Params {
	return testscript.Params{
		Dir: dir,
		Setup: func(e *testscript.Env) error {
			// A socket's path must be short, and $WORK may be long.
			short, err := os.MkdirTemp("/tmp", "ck")
			e.Defer(func() { _ = os.RemoveAll(short) })
			e.Setenv("XDG_RUNTIME_DIR", short)
			e.Setenv("XDG_STATE_HOME", filepath.Join(e.WorkDir, ".state"))
			e.Setenv(raceEnv, os.Getenv(raceEnv))
			if err != nil {
				return err
			}
			endpoint, err := freeEndpoint(context.Background())
			e.Setenv("ENDPOINT", endpoint) // where the nodes of a job can meet
			if err != nil {
				return err
			}
			// A checkpoint that PyTorch has written.
			torch, err := filepath.Abs(filepath.Join("..", "internal", "format", "dcp", "testdata", "torch-2.14", "single_nested"))
			e.Setenv("DCP", torch)
			return err
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exit":  exitCommand,
			"owned": func(ts *testscript.TestScript, _ bool, args []string) { ownerOf(ts, ts.MkAbs(args[0])) },
			"pause": pauseCommand,
		},
	}
}

// freeEndpoint returns an address of this machine at which no process listens.
func freeEndpoint(ctx context.Context) (string, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}

// exitCommand is `exit CODE COMMAND...`: it runs a command and checks its exit code.
// stdout and stderr then match its output.
func exitCommand(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exit CODE COMMAND...")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	got := 0
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		got = exit.ExitCode()
	} else {
		ts.Check(err)
	}
	if got != want {
		ts.Fatalf("%s: exit code %d, want %d", strings.Join(args[1:], " "), got, want)
	}
}

// pauseCommand is `pause STORE CODE COMMAND...`: it stops the owner of a store with
// SIGSTOP, runs the rest as exitCommand does, and resumes the owner.
func pauseCommand(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 3 {
		ts.Fatalf("usage: pause STORE CODE COMMAND...")
	}
	pid := ownerOf(ts, ts.MkAbs(args[0]))
	ts.Check(syscall.Kill(pid, syscall.SIGSTOP))
	defer func() { ts.Check(syscall.Kill(pid, syscall.SIGCONT)) }()
	exitCommand(ts, false, args[1:])
}

// ownerOf waits until a store has an owner and returns its process.
func ownerOf(ts *testscript.TestScript, dir string) int {
	deadline := time.After(20 * time.Second)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		if data, err := os.ReadFile(filepath.Join(dir, "owner.json")); err == nil {
			_, after, ok := strings.Cut(string(data), `"pid": `)
			digits, _, more := strings.Cut(after, ",")
			if pid, err := strconv.Atoi(digits); ok && more && err == nil {
				return pid
			}
		}
		select {
		case <-tick.C:
		case <-deadline:
			ts.Fatalf("%s has no owner", dir)
		}
	}
}
