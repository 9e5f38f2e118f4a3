package backstop_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/backstop"
)

const stuckEnv = "CKPTSTORE_TEST_STUCK"

// A stuck program exits with its code and prints the reason; a program that ends
// in time is left alone.
func TestBackstop(t *testing.T) {
	switch os.Getenv(stuckEnv) {
	case "for ever":
		ctx, cancel := context.WithCancelCause(t.Context())
		backstop.AfterDone(ctx, 50*time.Millisecond, os.Stderr, "test", 7)
		cancel(errors.New("by the test"))
		select {}
	case "not at all":
		ctx, cancel := context.WithCancel(t.Context())
		stop := backstop.AfterDone(ctx, time.Hour, os.Stderr, "test", 7)
		cancel()
		stop()
		return
	}
	for how, want := range map[string]int{"for ever": 7, "not at all": 0} {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestBackstop$", "-test.timeout=1m")
		cmd.Env = append(os.Environ(), stuckEnv+"="+how)
		out, err := cmd.CombinedOutput()
		if got := cmd.ProcessState.ExitCode(); got != want {
			t.Errorf("stuck %s: exit code %d, want %d: %v\n%s", how, got, want, err, out)
		}
		if want != 0 && !strings.Contains(string(out), "told to end (by the test), and did not end within 50ms") {
			t.Errorf("stuck %s: output %s", how, out)
		}
	}
}
