// Package cmd_test runs the built commands as their users do: by scripts, by
// their JSON, and by killing them.
package cmd_test

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/ckptstore/ckptstore/internal/testbed"
)

// bin is the directory of the built commands, which is first in PATH.
var bin string

// builtEnv is the directory of the commands, for a test that runs in another process.
const builtEnv = "CKPTSTORE_TEST_BUILT"

func TestMain(m *testing.M) {
	testbed.Main()
	if url := os.Getenv(forgeEnv); url != "" {
		if err := forge(url); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if text := os.Getenv(tunedEnv); text != "" {
		var w tunedWorker
		err := json.Unmarshal([]byte(text), &w)
		if err == nil {
			err = w.train(context.Background())
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if os.Getenv(savedEnv) != "" {
		if err := saveOnce(context.Background()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if dir := os.Getenv(abortEnv); dir != "" {
		if err := abortSave(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if signal.Ignored(syscall.SIGHUP) {
		// Under nohup. A process that catches a signal gives its children the default.
		signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP)
	}
	// These tests wait for processes and disks more than they compute. A number on
	// the command line takes precedence.
	if err := flag.Set("test.parallel", "4"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if bin = os.Getenv(builtEnv); bin != "" {
		os.Exit(m.Run())
	}
	code, err := build(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "build the commands:", err)
		code = 1
	}
	os.Exit(code)
}

// raceEnv holds the options of the race detector, which scripts need too.
const raceEnv = "GORACE"

// endAtOnce adds the option without which every process with the race detector
// sleeps for a second before it ends. That was most of the time of these tests:
// 10 ms of work in each `ckptstore ls`, and 1 s of sleep.
func endAtOnce(options string) string { return "atexit_sleep_ms=0 " + options }

func build(m *testing.M) (int, error) {
	dir, err := os.MkdirTemp("", "ckptstore-cmd-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	// The commands' runtime directory, which is removed at the end. Its path is short
	// enough for sockets.
	run, err := os.MkdirTemp("/tmp", "ck")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(run) }()
	if err := os.Setenv("XDG_RUNTIME_DIR", run); err != nil {
		return 0, err
	}
	// The user's own state directory stays free of their jobs.
	if err := os.Setenv("XDG_STATE_HOME", filepath.Join(dir, "state")); err != nil {
		return 0, err
	}
	if err := os.Setenv(raceEnv, endAtOnce(os.Getenv(raceEnv))); err != nil {
		return 0, err
	}
	bin = filepath.Join(dir, "bin")
	// Without debugging information the commands link in half the time.
	args := append([]string{"build", "-ldflags=-w", "-o", bin + "/"}, raceFlags...)
	out, err := exec.Command("go", append(args, "./ckptstore", "./trainer")...).CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("%w\n%s", err, out)
	}
	if err := os.Setenv("PATH", bin+string(filepath.ListSeparator)+os.Getenv("PATH")); err != nil {
		return 0, err
	}
	return m.Run(), nil
}
