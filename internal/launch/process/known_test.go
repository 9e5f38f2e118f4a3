package process

import (
	"os/exec"
	"testing"
)

// A hunt's knowledge of a process outlives it, and is not applied to another
// process that has its number later.
func TestKnown(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", "exec sleep 1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	p, err := readEntry(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	h := NewHunt("no job")
	h.Add(p)
	known := h.Known()
	if len(known) != 1 || known[0].PID() != cmd.Process.Pid || known[0].Replaced() {
		t.Errorf("known %+v", known)
	}
	other := p
	other.start--
	if !other.Replaced() {
		t.Error("an earlier process of the same number is not replaced")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	if len(h.Known()) != 1 || h.Known()[0].Replaced() {
		t.Errorf("after its end: %+v", h.Known())
	}
	h.Forget()
	if len(h.Known()) != 0 {
		t.Errorf("forgotten, and known: %+v", h.Known())
	}
}
