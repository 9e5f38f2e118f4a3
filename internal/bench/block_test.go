package bench

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

// TestSlowest checks that the slowest rank of each save counts, that the first two
// saves do not, and that the result is the median.
func TestSlowest(t *testing.T) {
	var said strings.Builder
	for step := range benchSaves {
		fmt.Fprintf(&said, "[0] {\"step\":%d,\"save\":%d,\"copy\":%d}\n", step, 1000*(10-step), 1)
		fmt.Fprintf(&said, "[1] {\"step\":%d,\"save\":%d,\"copy\":%d}\n", step, 1, 100*step)
	}
	got, err := slowest(said.String(), 2)
	if want := (blocked{6 * time.Microsecond, 400 * time.Nanosecond}); err != nil || got != want {
		t.Errorf("%v, want %v: %v", got, want, err)
	}
	for name, bad := range map[string]string{
		"a save is missing": strings.SplitN(said.String(), "\n", 2)[1], "another line": "hello\n" + said.String(),
		"another step": strings.Replace(said.String(), `"step":6`, `"step":7`, 1),
	} {
		if _, err := slowest(bad, 2); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
