package cmd_test

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/natstest"
	"github.com/ckptstore/ckptstore/internal/store"
)

// TestMessagesThatAreNoEvents: on a server where others may publish, junk in the log stops
// no command. It is a finding until an owner has recorded it.
func TestMessagesThatAreNoEvents(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	url, stop, err := natstest.Start(filepath.Join(dir, "log"), natstest.Open)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	exits := func(code int, says string, command ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), command[0], command[1:]...)
		cmd.Dir = dir
		cmd.Env = append(cmd.Environ(), "CKPTSTORE_STORE="+url)
		said, _ := cmd.CombinedOutput() // the exit code is checked instead
		if got := cmd.ProcessState.ExitCode(); got != code || !strings.Contains(string(said), says) {
			t.Errorf("%q: exit code %d, want %d and %q:\n%s", command, got, code, says, said)
		}
	}
	train := func(run string) []string {
		return []string{"trainer", "run", "-q", "--name", run, "--", "trainer", "demo-worker", "--steps=4", "--save-every=2"}
	}
	exits(0, "", "ckptstore", "init", "--data", filepath.Join(dir, "shared"))
	exits(0, "", train("good")...)
	exits(0, "0 findings", "ckptstore", "verify", "--log")

	c := natstest.Connect(t, url)
	c.Publish("ckpt.good.main.s.checkpoint.committed", nil, []byte("junk \x1b[31m"))
	c.Publish("ckpt.junk.main.n0.foo.bar", nil, nil)
	c.Publish("ckpt.everything", map[string][]string{"x": {"y"}}, []byte("{}"))
	exits(6, `on "ckpt.junk.main.n0.foo.bar" is not an event`, "ckptstore", "verify", "--log")
	exits(6, "3 findings", "ckptstore", "verify", "--log")
	exits(0, "step-4.a1", "ckptstore", "ls", "good")
	exits(0, "", train("good")...)
	exits(0, "", train("another")...)
	exits(0, "(recorded by event ", "ckptstore", "verify", "--log")
	exits(0, "0 findings", "ckptstore", "verify")
	exits(6, "3 findings", "ckptstore", "verify", "--log", "--strict")
	exits(0, `"subject":"ckpt.everything"`, "ckptstore", "events", "--type", "log.void")
	exits(0, `"sequence":`, "ckptstore", "events", "--type", "log.voided")

	newer := events.Encode(events.Event{
		ID: store.NewID(), Kind: "checkpoint.teleported", Version: 1, Source: "trainer/newer", Time: time.Now(),
		Scope: events.Scope{Run: "good", Trial: "main", Actor: events.Server}, Data: []byte("{}"),
	})
	c.Publish(newer.Subject, newer.Header, newer.Data)
	exits(64, "written by a newer version: upgrade this program", train("good")...)
	exits(1, "upgrade this program", "ckptstore", "show", "good")
	exits(1, "upgrade this program", "ckptstore", "pin", "good@step-4")
	exits(0, "step-4.a1", "ckptstore", "ls", "another")
	exits(1, "another", "ckptstore", "ls")
	exits(0, "", train("another")...)
	exits(0, "were not checked", "ckptstore", "verify", "--log")
}
