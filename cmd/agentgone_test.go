package cmd_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/agent"
)

// TestAgentOfARemovedStore: an agent whose directory was removed ends by itself, and
// does not touch a new store in its place.
func TestAgentOfARemovedStore(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "ckpts")
	store := "--store=" + dir
	began := func() (c agent.Card) {
		decode(t, output(t, 0, "ckptstore", "agent", "start", "--json", "--idle=0", store), &c)
		t.Cleanup(func() { _ = syscall.Kill(c.PID, syscall.SIGKILL) })
		return c
	}
	for name, replace := range map[string]func() error{
		"removed": func() error {
			if err := os.RemoveAll(dir); err == nil {
				return nil
			}
			return os.RemoveAll(dir) // again: the agent may have written meanwhile
		},
		"another in its place": func() error {
			if err := os.Rename(dir, dir+".old"); err != nil {
				return err
			}
			return os.Mkdir(dir, 0o700)
		},
	} {
		c := began()
		if err := replace(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for end := time.Now().Add(time.Minute); syscall.Kill(c.PID, 0) == nil; <-time.After(20 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s: agent %d lives on", name, c.PID)
			}
		}
		if left, err := os.ReadDir(dir); err == nil && len(left) > 0 {
			t.Errorf("%s: the agent left %v", name, left)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
	// A new agent for the same path works.
	began()
	output(t, 0, "ckptstore", "agent", "stop", "--now", "--wait=2m", store)
}
