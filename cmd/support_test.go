package cmd_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/tensor"
)

// killSettle is how long a killed job may take to be gone, on a slow machine.
const killSettle = 20 * time.Second

// marked lists the processes that have the run and the other texts in their environment.
func marked(t *testing.T, run, also string) (pids []int) {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err != nil {
			continue // gone, or of another user
		}
		if bytes.Contains(env, []byte("CKPTSTORE_RUN="+run+"\x00")) && bytes.Contains(env, []byte(also)) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// waitGone waits until no process of the run is left.
func waitGone(t *testing.T, run string) {
	t.Helper()
	deadline := time.After(killSettle)
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		pids := marked(t, run, "")
		if len(pids) == 0 {
			return
		}
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("processes of %s that are left %v after it was killed: %v", run, killSettle, pids)
		}
	}
}

// diedOf returns the signal that ended a command, or 0.
func diedOf(cmd *exec.Cmd) syscall.Signal {
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return ws.Signal()
	}
	return 0
}

// watched collects output, and closes seen when a text appears in it.
type watched struct {
	mu   sync.Mutex
	all  bytes.Buffer
	text string
	seen chan struct{} // closed when the text has appeared
	once sync.Once
}

// Write implements io.Writer.
func (w *watched) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all.Write(p)
	if bytes.Contains(w.all.Bytes(), []byte(w.text)) {
		w.once.Do(func() { close(w.seen) })
	}
	return len(p), nil
}

// String returns everything written so far.
func (w *watched) String() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.all.String()
}

type buffers [][]byte

func (b buffers) Want(i int) []byte { return b[i] }

// contents verifies a checkpoint and returns the digest of each of its tensors and values.
func contents(ctx context.Context, t *testing.T, s *store.Store, c projections.Checkpoint) map[string]checkpoint.Digest {
	t.Helper()
	fail := func(err error) {
		if err != nil {
			t.Fatalf("%s@%s: %v", c.Run, c.ID, err)
		}
	}
	digest, err := checkpoint.ParseDigest(c.Manifest)
	fail(err)
	report, err := s.Data.Verify(ctx, store.RefOf(c), digest, nil)
	fail(err)
	for _, f := range report.Findings {
		t.Errorf("%s@%s: %v", c.Run, c.ID, f)
	}
	r := s.Data.Reader(store.RefOf(c))
	m, err := r.ReadMetadata(ctx) // by its receipt: that is there too
	fail(err)
	fail(r.SetUp(ctx, m, true))
	var wants []checkpoint.Want
	for _, x := range m.Layout.Tensors {
		wants = append(wants, checkpoint.Want{Shard: tensor.Shard{FQN: x.FQN, DType: x.DType, Global: x.Shape, Box: x.Shape.Full()}})
	}
	for _, v := range m.Layout.Values {
		wants = append(wants, checkpoint.Want{Value: true, Shard: tensor.Shard{FQN: v.FQN}, Rank: v.Rank})
	}
	loader := planner.NewLoader(m.Layout)
	reads, err := loader.Load(wants)
	fail(err)
	data := make(buffers, len(wants))
	for i, w := range wants {
		data[i] = make([]byte, loader.Size(w))
	}
	_, err = r.ReadData(ctx, wants, reads, data)
	fail(err)
	out := map[string]checkpoint.Digest{}
	for i, w := range wants {
		out[strings.Join([]string{w.Shard.FQN, fmt.Sprint(w.Rank)}, "#")] = checkpoint.Sum(data[i])
	}
	return out
}

func filesIn(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		files[e.Name()] = string(data)
	}
	return files
}
