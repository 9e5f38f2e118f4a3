package logpeers

import (
	"os"
	"testing"
)

// An announcement is found, replaced by that of the next coordinator, and withdrawn only by
// its own.
func TestCoordinator(t *testing.T) {
	t.Parallel()
	store := t.TempDir()
	if err := os.MkdirAll(joinDir(store), 0o700); err != nil {
		t.Fatal(err)
	}
	read := func(want Coordinator) {
		t.Helper()
		if got, err := ReadCoordinator(store); err != nil || got != want {
			t.Errorf("coordinator %+v, %v, want %+v", got, err, want)
		}
	}
	read(Coordinator{})
	first, next := Coordinator{"job-1", 0, "10.0.0.1:29400"}, Coordinator{"job-2", 1, "10.0.0.2:29400"}
	for _, c := range []Coordinator{first, next} {
		if err := c.Announce(store); err != nil {
			t.Fatal(err)
		}
		read(c)
	}
	if err := first.Withdraw(store); err != nil {
		t.Fatal(err)
	}
	read(next)
	if err := next.Withdraw(store); err != nil {
		t.Fatal(err)
	}
	read(Coordinator{})
}

// The peers other than the coordinator's node follow it in the order of their indexes. A
// node without a copy never does.
func TestTurn(t *testing.T) {
	t.Parallel()
	for of, want := range map[int][]int{0: {-1, 0, 1, -1}, 1: {0, -1, 1, -1}, 2: {0, 1, -1, -1}, 3: {0, 1, 2, -1}} {
		for index, turn := range want {
			if got := (Coordinator{Index: of}).Turn(index); got != turn {
				t.Errorf("node %d is number %d to follow node %d, want %d", index, got, of, turn)
			}
		}
	}
}
