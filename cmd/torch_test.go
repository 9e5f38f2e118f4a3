//go:build torch

package cmd_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/object/s3test"
)

// torchEnv names a python3 that has PyTorch: go test -tags torch,testbed ./cmd -run OnTwoMachines.
const torchEnv = "TORCH_PYTHON"

// TestResumeFromBucket kills a training whose checkpoints are in a bucket, and compares it with
// a training without kills: python/tests/torch/prove_resume.py.
func TestResumeFromBucket(t *testing.T) {
	python := os.Getenv(torchEnv)
	if python == "" {
		t.Fatalf("%s names no python3 with PyTorch", torchEnv)
	}
	server := s3test.Start(t, s3test.Options{})
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, python, filepath.Join(root, "python/tests/torch/prove_resume.py"), "--ways", "save", "url", "--kills", "2", "--bin", bin,
		"--data", "s3://"+server.Bucket+"/proof?endpoint="+server.Endpoint)
	// The Python may have directories of its own.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "XDG_") || strings.HasPrefix(v, "TMPDIR=") })
	cmd.Env = append(append(cmd.Env, bucketEnv(server)...), "PYTHONPATH="+strings.Join([]string{filepath.Join(root, "python/src"), os.Getenv("PYTHONPATH")}, ":"))
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // it removes its files
	cmd.WaitDelay = 20 * time.Second
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
}
