package cmd_test

import (
	"bufio"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ckptstore/ckptstore/internal/natstest"
)

// TestServeOfAServer: clients without the credentials of a NATS server train and list
// through a `serve` that has them.
func TestServeOfAServer(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	bare, stop, err := natstest.Start(filepath.Join(dir, "log"), `accounts { ckpt { jetstream: enabled, users: [ { user: own, password: secret } ] } }`)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	url := strings.Replace(bare, "nats://", "nats://own:secret@", 1)
	exits := func(code int, says, location string, command ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), command[0], command[1:]...)
		cmd.Dir = dir
		cmd.Env = append(cmd.Environ(), "CKPTSTORE_STORE="+location, "XDG_RUNTIME_DIR="+dir)
		said, _ := cmd.CombinedOutput() // the exit code is checked instead
		if got := cmd.ProcessState.ExitCode(); got != code || !strings.Contains(string(said), says) {
			t.Errorf("%q: exit code %d, want %d and %q:\n%s", command, got, code, says, said)
		}
	}
	exits(0, "", url, "ckptstore", "init", "--data", filepath.Join(dir, "shared"))
	exits(2, "--listen HOST:PORT", url, "ckptstore", "serve")
	exits(12, "", bare, "ckptstore", "ls")

	serve := exec.CommandContext(t.Context(), "ckptstore", "serve", "--listen=127.0.0.1:0")
	serve.Env = append(serve.Environ(), "CKPTSTORE_STORE="+url, "XDG_RUNTIME_DIR="+dir)
	serve.Dir = dir
	words, err := serve.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := serve.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(words)
	front := ""
	for lines.Scan() && !strings.HasPrefix(lines.Text(), "serving store ") {
		if at, ok := strings.CutPrefix(lines.Text(), "listening on "); ok {
			front = at
		}
	}
	if strings.Contains(lines.Text(), "secret") || front == "" {
		t.Errorf("serve prints %q, and listens on %q", lines.Text(), front)
	}
	exits(0, "", front, "trainer", "run", "-q", "--name=bert", "--", "trainer", "demo-worker", "--steps=4", "--save-every=2")
	exits(0, "step-4.a1", front, "ckptstore", "ls", "bert")
	exits(0, `"ckptactor":"token"`, front, "ckptstore", "events", "--json")
	exits(0, "0 findings", front, "ckptstore", "verify", "--log")
	exits(12, "serve it with --client-delete", front, "ckptstore", "gc", "--policy=last=1", "--apply")
	exits(0, "step-2.a1", url, "ckptstore", "gc", "--policy=last=1", "--apply")
	if err := serve.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	for lines.Scan() { // until it ends
		t.Log(lines.Text())
	}
	if err := serve.Wait(); err != nil {
		t.Error(err)
	}
}
