package store

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestOwnerInAnotherContainer: the error for an owner whose socket is not visible, because it
// has another /tmp, names the socket and the next step.
func TestOwnerInAnotherContainer(t *testing.T) {
	t.Parallel()
	dir := made(t)
	owner := actors(t, dir, 1)[0]
	owner.do(request{Do: "append", Run: "run", Name: "before", Count: 1})
	c, err := readCard(dir)
	if err != nil {
		t.Fatal(err)
	}
	hidden := filepath.Join(shortDir(t, ""), "hidden")
	if err := os.Rename(c.Log, hidden); err != nil {
		t.Fatal(err)
	}
	o := Options{Location: dir, Patience: 100 * time.Millisecond}
	refused(t, o, ErrLocked, fmt.Sprintf("process %d on", owner.pid()),
		"its socket "+c.Log+" is not visible here", "XDG_RUNTIME_DIR", "serve --listen", "--offline")
	if err := os.Rename(hidden, c.Log); err != nil {
		t.Fatal(err)
	}
	shut(t, open(t, dir))
	// A visible socket that does not answer: the error tells the user to wait.
	if err := os.Rename(c.Log, hidden); err != nil {
		t.Fatal(err)
	}
	write(t, c.Log, "")
	refused(t, o, ErrLocked, "its socket is "+c.Log+": wait for it or end that process")
	if err := os.Rename(hidden, c.Log); err != nil {
		t.Fatal(err)
	}
	owner.end()
}
