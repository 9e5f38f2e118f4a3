//go:build testbed || outlive

package cmd_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/url"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/natstest"
	"github.com/ckptstore/ckptstore/internal/object/s3test"
	"github.com/ckptstore/ckptstore/internal/testbed"
)

// apart are two machines that train, and a third one with the servers of the log and of the
// bucket. They share no directory.
type apart struct {
	*machines
	servers *testbed.Node
	jobs    []*trainerOf
}

// trainerOf is a trainer on a machine.
type trainerOf struct {
	*testbed.Cmd
	output lockedBuffer
	ended  chan struct{}
}

// lockedBuffer is a buffer that is read while a process writes to it.
type lockedBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

// Write implements io.Writer.
func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}

func newApart(t *testing.T) *apart {
	t.Helper()
	bucket := s3test.Start(t, s3test.Options{})
	log, stop, err := natstest.Start(filepath.Join(t.TempDir(), "log"), `authorization { token: of-this-test }`)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	bed, err := testbed.New(testbed.Options{Seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := bed.Close(); err != nil {
			t.Error(err)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	t.Cleanup(cancel)
	a := &apart{machines: &machines{t: t, ctx: ctx, bed: bed}}
	start := func(name string, env ...string) *testbed.Node {
		node, err := bed.Start(ctx, testbed.Config{Name: name, Env: env})
		if err != nil {
			t.Fatal(err)
		}
		return node
	}
	a.servers = start("servers")
	env := append(bucketEnv(bucket), "CKPTSTORE_STORE=nats://"+a.serve(log), "CKPTSTORE_STORE_TOKEN=of-this-test",
		"DATA=s3://"+bucket.Bucket+"/apart?path-style=1&endpoint=http://"+a.serve(bucket.Endpoint))
	for i := range 2 {
		a.nodes = append(a.nodes, start(fmt.Sprint("machine", i), env...))
	}
	return a
}

// serve has the servers' machine pass connections on to a server on loopback, and returns its
// address.
func (a *apart) serve(server string) (address string) {
	a.t.Helper()
	to, err := url.Parse(server)
	if err != nil {
		a.t.Fatal(err)
	}
	l, err := a.servers.Listen(a.ctx, "tcp", fmt.Sprintf("%v:0", a.servers.Addr()))
	if err != nil {
		a.t.Fatal(err)
	}
	a.t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return // the end of the test
			}
			go func() {
				defer func() { _ = from.Close() }()
				on, err := net.Dial("tcp", to.Host)
				if err != nil {
					return
				}
				defer func() { _ = on.Close() }()
				go func() {
					_, _ = io.Copy(on, from)
					_ = on.(*net.TCPConn).CloseWrite()
				}()
				_, _ = io.Copy(from, on)
			}()
		}
	}()
	return l.Addr().String()
}

// train starts the trainer of a machine.
func (a *apart) train(machine int) *trainerOf {
	a.t.Helper()
	j := &trainerOf{ended: make(chan struct{})}
	j.Cmd = a.nodes[machine].Command(context.WithoutCancel(a.ctx), filepath.Join(bin, "trainer"), "run", "--name", "apart", "--nnodes", "2", "--nproc", "2",
		"--node-rank", fmt.Sprint(machine), "--rdzv-endpoint", fmt.Sprintf("%v:29400", a.nodes[0].Addr()), "--node-timeout", "3s", "--grace", "2s",
		"--log-dir", "/run/logs", "--", "sh", "-c", `echo this is rank $RANK; exec "$0" demo-worker --steps 1000000 --save-every 20`, filepath.Join(bin, "trainer"))
	j.Stdout, j.Stderr = &j.output, &j.output
	if err := j.Start(); err != nil {
		a.t.Fatal(err)
	}
	go func() {
		_ = j.Wait() // its state has the exit code
		close(j.ended)
	}()
	a.t.Cleanup(func() {
		if a.t.Failed() {
			a.t.Logf("trainer of machine %d:\n%s", machine, j.output.String())
		}
	})
	a.jobs = append(a.jobs, j)
	return j
}

// kill kills a trainer's process alone.
func (a *apart) kill(j *trainerOf) {
	a.t.Helper()
	if err := unix.Kill(j.Process.Pid, unix.SIGKILL); err != nil {
		a.t.Fatal(err)
	}
	<-j.ended
}

// ckptstore runs a command on the first machine.
func (a *apart) ckptstore(args ...string) []byte {
	a.t.Helper()
	return a.ckptstoreOn(0, args...)
}

// ckptstoreOn runs a command on a machine.
func (a *apart) ckptstoreOn(machine int, args ...string) []byte {
	a.t.Helper()
	cmd := a.nodes[machine].Command(a.ctx, filepath.Join(bin, "ckptstore"), args...)
	var out, problems bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problems
	if err := cmd.Run(); err != nil {
		a.t.Fatalf("ckptstore %q: %v\n%s%s", args, err, out.Bytes(), problems.Bytes())
	}
	return out.Bytes()
}

// saved waits until an attempt after another one has committed a checkpoint, and returns the
// attempt.
func (a *apart) saved(after int) (attempt int) {
	a.t.Helper()
	for {
		var list struct {
			Checkpoints []struct {
				Attempt int `json:"attempt"`
				World   int `json:"world_size"`
			} `json:"checkpoints"`
		}
		if err := json.Unmarshal(a.ckptstore("ls", "--json"), &list); err != nil {
			a.t.Fatal(err)
		}
		for _, c := range list.Checkpoints {
			if c.World != 4 {
				a.t.Fatalf("a checkpoint of %d ranks, want 4", c.World)
			}
			if c.Attempt > after {
				return c.Attempt
			}
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-a.ctx.Done():
			a.t.Fatalf("no checkpoint after attempt %d: %v", after, context.Cause(a.ctx))
		}
	}
}

// loaded fails the test unless the ranks of an attempt have loaded, on both machines together,
// what the ranks of an earlier attempt had in memory when they saved it. It returns the loads.
func (a *apart) loaded(attempt int) (all []load) {
	a.t.Helper()
	saved, restored := map[int64]string{}, 0 // states by steps, and reports of loads
	for line := range bytes.Lines(a.ckptstore("events", "apart", "-o", "jsonl")) {
		var e struct {
			Type string          `json:"type"`
			Data json.RawMessage `json:"data"`
		}
		if err := json.Unmarshal(line, &e); err != nil {
			a.t.Fatal(err)
		}
		var l load
		var r report
		switch e.Type {
		case "ckpt.restore.completed.v1":
			if err := json.Unmarshal(e.Data, &l); err != nil {
				a.t.Fatal(err)
			}
			if l.Attempt == attempt {
				all = append(all, l)
			}
		case "ckpt.report.metrics.v1":
			if err := json.Unmarshal(e.Data, &r); err != nil {
				a.t.Fatal(err)
			}
			if r.Metrics.State != "" && r.Attempt < attempt {
				saved[r.Step] = r.Metrics.State
			}
			if r.Metrics.Restored == "" || r.Attempt != attempt {
				continue
			}
			restored++
			var step int64
			if _, err := fmt.Sscanf(r.Metrics.From, "step-%d.", &step); err != nil || r.Metrics.Restored != saved[step] {
				a.t.Errorf("attempt %d has restored %s as %s, want %q (%v)", attempt, r.Metrics.From, r.Metrics.Restored, saved[step], err)
			}
		}
	}
	if len(all) == 0 || restored == 0 {
		a.t.Errorf("attempt %d has loaded %d times, and reported it %d times", attempt, len(all), restored)
	}
	return all
}

// load is a load of all ranks, in the log.
type load struct {
	Attempt int   `json:"attempt"`
	Bytes   int64 `json:"bytes"`
	Slots   int64 `json:"slots"` // of them
}

// report is a report of the demo's worker: digests of all ranks' tensors together.
type report struct {
	Attempt int   `json:"attempt"`
	Step    int64 `json:"step"`
	Metrics struct {
		State    string `json:"state_sha256"`
		Restored string `json:"restored_sha256"`
		From     string `json:"restored_from"`
	} `json:"metrics"`
}

// Two machines train together with their log on a server and their checkpoints in a bucket, and
// share no directory. The job outlives the end of a trainer, of a machine and of the coordinating
// trainer, and both machines load what both have saved.
func TestMachinesWithoutSharedDirectory(t *testing.T) {
	a := newApart(t)
	if out, err := a.nodes[0].Command(a.ctx, "sh", "-c", filepath.Join(bin, "ckptstore")+` init --data "$DATA"`).CombinedOutput(); err != nil {
		t.Fatalf("init: %v\n%s", err, out)
	}
	first, second := a.train(0), a.train(1)
	attempt := a.saved(0)

	a.kill(second) // its guard ends its ranks
	second = a.train(1)
	attempt = a.saved(attempt)
	a.loaded(attempt)

	if err := a.nodes[1].PowerOff(); err != nil {
		t.Fatal(err)
	}
	<-second.ended
	if err := a.nodes[1].PowerOn(a.ctx); err != nil {
		t.Fatal(err)
	}
	second = a.train(1)
	attempt = a.saved(attempt)
	for _, l := range a.loaded(attempt) {
		if l.Slots >= l.Bytes {
			t.Errorf("%d of %d bytes come from memory, and the memory of a machine is lost", l.Slots, l.Bytes)
		}
	}

	a.kill(first) // it coordinates
	first = a.train(0)
	attempt = a.saved(attempt)
	a.loaded(attempt)

	a.ckptstore("preempt", "apart", "--wait")
	for i, j := range []*trainerOf{first, second} {
		<-j.ended
		if code := j.ProcessState.ExitCode(); code != 75 {
			t.Errorf("the trainer of machine %d ends with %d, want 75", i, code)
		}
	}
	for machine, ranks := range []string{"01", "23"} {
		out := string(a.ckptstoreOn(machine, "logs", "apart"))
		for rank := range 4 {
			if got, want := strings.Contains(out, fmt.Sprint("this is rank ", rank)), strings.Contains(ranks, fmt.Sprint(rank)); got != want {
				t.Errorf("output of rank %d on machine %d: %v, want %v:\n%s", rank, machine, got, want, out)
			}
		}
	}
	if out := string(a.ckptstore("verify")); !strings.Contains(out, " 0 findings") {
		t.Error(out)
	}
}
