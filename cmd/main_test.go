// Package cmd_test runs the built commands as their users do: by scripts, by
// their JSON, and by killing them.
package cmd_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// bin is the directory of the built commands, which is first in PATH.
var bin string

func TestMain(m *testing.M) {
	code, err := build(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, "build the commands:", err)
		code = 1
	}
	os.Exit(code)
}

func build(m *testing.M) (int, error) {
	dir, err := os.MkdirTemp("", "ckptstore-cmd-")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	// What commands leave in their runtime directories goes with this one, whose
	// path is short enough for sockets.
	run, err := os.MkdirTemp("/tmp", "ck")
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(run) }()
	if err := os.Setenv("XDG_RUNTIME_DIR", run); err != nil {
		return 0, err
	}
	bin = filepath.Join(dir, "bin")
	args := append([]string{"build", "-o", bin + "/"}, raceFlags...)
	out, err := exec.Command("go", append(args, "./ckptstore", "./trainer")...).CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("%w\n%s", err, out)
	}
	if err := os.Setenv("PATH", bin+string(filepath.ListSeparator)+os.Getenv("PATH")); err != nil {
		return 0, err
	}
	return m.Run(), nil
}
