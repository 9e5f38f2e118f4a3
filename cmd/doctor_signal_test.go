package cmd_test

import (
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"
)

// A doctor that gets a signal during its probes leaves no files.
func TestDoctorInterrupted(t *testing.T) {
	t.Parallel()
	for range 3 {
		dir := t.TempDir()
		cmd := exec.CommandContext(t.Context(), "trainer", "doctor", "--store", dir+"/store")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			_ = cmd.Wait() // the state has more than the error
		}()
		deadline := time.After(time.Minute)
		tick := time.NewTicker(time.Millisecond)
		defer tick.Stop()
		told := false
	wait:
		for {
			select {
			case <-ended:
				break wait
			case <-tick.C:
				if made, err := os.ReadDir(dir); !told && err == nil && len(made) > 0 {
					told = true
					if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
						t.Log(err) // it has ended just now
					}
				}
			case <-deadline:
				t.Fatal("the doctor does not end")
			}
		}
		// If the signal comes after the last probe, it exits with 0.
		if code := cmd.ProcessState.ExitCode(); code != 0 && code != 128+int(syscall.SIGTERM) {
			t.Errorf("exit code %d", code)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
			t.Errorf("%v is left, %v", left, err)
		}
	}
}
