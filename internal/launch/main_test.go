package launch_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/store"
)

// The test binary is also its own guard, its own workers, and a trainer that
// can be killed: see act.
func TestMain(m *testing.M) {
	if len(os.Args) >= 3 && os.Args[1] == process.GuardCommand {
		if strings.HasPrefix(os.Args[2], slowGuard) { // as on a busy machine
			<-time.After(2 * time.Second)
		}
		os.Exit(status(process.RunGuard(context.Background(), os.Stdin, os.Stdout, os.Args[2], os.Args[3:]...)))
	}
	if len(os.Args) >= 3 && os.Args[1] == asCommand {
		os.Exit(status(act(os.Args[2], os.Args[3:])))
	}
	os.Exit(runTests(m))
}

func status(err error) int {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// slowGuard begins the names of jobs whose guards take a while to start.
const slowGuard = "slow-"

// home is the store that the tests share; each uses runs of its own name.
var home *store.Store

// memory is a directory for the tests' staging slots.
var memory string

func runTests(m *testing.M) int {
	// These tests wait for processes and time limits more than they compute. A
	// number on the command line takes precedence.
	if err := flag.Set("test.parallel", "6"); err != nil {
		return status(err)
	}
	// Tests set torchrun's variables themselves.
	if err := os.Unsetenv("OMP_NUM_THREADS"); err != nil {
		return status(err)
	}
	// With the race detector, a process would wait a second before it exits.
	if err := os.Setenv("GORACE", "atexit_sleep_ms=0"); err != nil {
		return status(err)
	}
	dir, err := os.MkdirTemp("", "wt")
	if err != nil {
		return status(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	if memory, err = os.MkdirTemp("/dev/shm", "wt"); err != nil {
		return status(err)
	}
	defer func() { _ = os.RemoveAll(memory) }()
	if err := os.Setenv("XDG_RUNTIME_DIR", dir); err != nil {
		return status(err)
	}
	code, err := runInStore(m, filepath.Join(dir, "store"))
	if err == nil && code == 0 {
		err = goleak.Find()
	}
	return code | status(err)
}

func runInStore(m *testing.M, dir string) (code int, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if _, err := store.Init(ctx, dir, ""); err != nil {
		return 0, err
	}
	if home, err = store.Open(ctx, store.Options{Location: dir}); err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, home.Close()) }()
	return m.Run(), nil
}
