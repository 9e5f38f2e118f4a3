package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// trainedRun is a run whose trainers die and are restarted.
type trainedRun struct {
	name   string
	world  int
	python bool
}

// liveOn starts a run's trainer again and again until ctx ends; then it asks the
// trainer to end.
func (s *storm) liveOn(ctx context.Context, r *trainedRun, random *rand.Rand) {
	for ctx.Err() == nil {
		more := 0 // most lives end by force
		if random.IntN(4) == 0 {
			more = 5 + random.IntN(60)
		}
		s.live(ctx, r, more)
		pause(ctx, between(random, 0, time.Second))
	}
}

// trainer returns the command of a run's trainer.
func (s *storm) trainer(r *trainedRun, more int) *exec.Cmd {
	args := []string{
		"run", "--store", s.store, "--name=" + r.name, fmt.Sprint("--nproc=", r.world), "--max-restarts=-1", "--max-infra-restarts=-1",
		"--grace=3s", "--preempt-grace=60s", "--wait=" + waitForOwner, "--",
	}
	if r.python {
		args = append(args, s.python, "-u", filepath.Join(s.dir, pythonWorker), s.acks, "4", fmt.Sprint(more))
	} else {
		args = append(args, s.self(), "worker", "--acks", s.acks, "--every", "4", "--more", fmt.Sprint(more))
	}
	return s.command(context.Background(), filepath.Join(s.bin, "trainer"), args...)
}

func (s *storm) self() string {
	self, err := os.Executable()
	if err != nil {
		return os.Args[0]
	}
	return self
}

// output returns the file for the output of a run's programs.
func (s *storm) output(name string) *os.File {
	f, err := os.OpenFile(filepath.Join(s.dir, "logs", name+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		s.find("log of %s: %v", name, err)
		return nil
	}
	return f
}

// live is one life of a trainer. When ctx ends it asks the trainer to end.
func (s *storm) live(ctx context.Context, r *trainedRun, more int) {
	cmd := s.trainer(r, more)
	out := s.output(r.name)
	defer func() { _ = out.Close() }()
	cmd.Stdout, cmd.Stderr = out, out
	began := time.Now()
	if err := cmd.Start(); err != nil {
		s.find("start the trainer of %s: %v", r.name, err)
		return
	}
	_, _ = fmt.Fprintf(out, "--- %.3f: process %d, %d more steps\n", time.Since(s.began).Seconds(), cmd.Process.Pid, more)
	s.mu.Lock()
	s.figures.Lives++
	s.mu.Unlock()
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	var err error
	select {
	case err = <-ended:
	case <-ctx.Done():
		s.send(process{cmd.Process.Pid, trainers, r.name}, trainers, syscall.SIGTERM)
		select {
		case err = <-ended:
		case <-time.After(endLimit):
			s.find("the trainer of %s, process %d, is still alive %s after it was asked to end", r.name, cmd.Process.Pid, endLimit)
			_ = cmd.Process.Kill()
			err = <-ended
		}
	}
	s.ended(r, cmd, more, began, err)
}

// ended compares how a trainer ended with the storm's actions on it.
func (s *storm) ended(r *trainedRun, cmd *exec.Cmd, more int, began time.Time, err error) {
	pid := cmd.Process.Pid
	status, _ := cmd.ProcessState.Sys().(syscall.WaitStatus)
	name := fmt.Sprint(status.ExitStatus())
	if status.Signaled() {
		name = status.Signal().String()
	}
	s.log("the trainer of %s, process %d, ended: %s after %s", r.name, pid, name, time.Since(began))
	s.count(s.figures.Exits, name)
	asked := s.wasSent(pid, began, syscall.SIGTERM, syscall.SIGUSR1) || s.wasAsked(r.name, began)
	explained := false
	switch {
	case status.Signaled():
		// A trainer dies of SIGTERM and SIGUSR1 only while it is starting.
		explained = s.wasSent(pid, began, status.Signal())
	case status.ExitStatus() == 0:
		explained = more > 0
	case status.ExitStatus() == 75, status.ExitStatus() == 128+int(syscall.SIGTERM), status.ExitStatus() == 128+int(syscall.SIGUSR1):
		explained = asked
	}
	if !explained {
		s.mu.Lock()
		s.figures.Unexplained++
		s.mu.Unlock()
		s.find("the trainer of %s, process %d, ended with %s (%v), which no action of the storm explains: see logs/%s.log", r.name, pid, name, err, r.name)
	}
}

// joinOn lets groups of processes join an agent, one after the other.
func (s *storm) joinOn(ctx context.Context, run string, world int, random *rand.Rand) {
	out := s.output(run)
	defer func() { _ = out.Close() }()
	for n := 0; ctx.Err() == nil; n++ {
		more := 0
		if random.IntN(3) == 0 {
			more = 5 + random.IntN(60)
		}
		s.session(ctx, run, world, n, more, out)
		pause(ctx, between(random, 0, time.Second))
	}
}

// session is one group that joins. A killed agent tells its ranks nothing: a rank that
// loses the agent ends, and then the others end too.
func (s *storm) session(ctx context.Context, run string, world, n, more int, out *os.File) (well bool) {
	s.mu.Lock()
	s.figures.Sessions++
	s.mu.Unlock()
	_, _ = fmt.Fprintf(out, "--- %.3f: session %d, %d more steps\n", time.Since(s.began).Seconds(), n, more)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var ranks sync.WaitGroup
	var failed atomic.Bool
	for rank := range world {
		cmd := s.command(ctx, s.self(), "worker", "--acks", s.acks, "--every", "4", "--more", fmt.Sprint(more),
			"--agent", filepath.Join(s.bin, "ckptstore"), "--store", s.store, "--run", run,
			"--key", fmt.Sprint(s.mark, "-", n), "--rank", fmt.Sprint(rank), "--world", fmt.Sprint(world))
		cmd.Stdout, cmd.Stderr = out, out
		cmd.Env = append(cmd.Env, "CKPTSTORE_RUN="+run)
		ranks.Go(func() {
			err := cmd.Run()
			s.log("rank %d of session %d ended: %v", rank, n, err)
			if err != nil {
				failed.Store(true)
				cancel() // as a launcher does
			}
		})
	}
	ranks.Wait()
	return !failed.Load()
}

// calm runs every run one last time, undisturbed. Each resumes, saves and ends
// successfully, and the storm's leftovers in shared memory disappear.
func (s *storm) calm(ctx context.Context) {
	s.proceed()
	s.log("calm: every run runs again")
	var wg sync.WaitGroup
	ctx, cancel := context.WithTimeout(ctx, calmLimit)
	defer cancel()
	for _, r := range s.runs {
		wg.Go(func() { s.live(ctx, r, 9) })
	}
	wg.Go(func() {
		out := s.output("joined")
		defer func() { _ = out.Close() }()
		for n := 1; ctx.Err() == nil && !s.session(ctx, "joined", 2, -n, 9, out); n++ {
			// The agent may still finish the staged data of the group before.
			pause(ctx, time.Second)
		}
	})
	wg.Wait()
	if ctx.Err() != nil {
		s.find("the runs did not end successfully within %s after the storm", calmLimit)
	}
	stopCtx, stop := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer stop()
	if out, err := s.command(stopCtx, filepath.Join(s.bin, "ckptstore"), "agent", "stop", "--store", s.store).CombinedOutput(); err != nil {
		s.log("agent stop: %v: %s", err, out) // it may have ended by itself
	}
	deadline := time.Now().Add(goneLimit)
	for {
		left := s.processes()
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			s.figures.Left = len(left)
			s.find("%d processes remain %s after the last job has ended: %v", len(left), goneLimit, left)
			return
		}
		pause(context.WithoutCancel(ctx), 50*time.Millisecond)
	}
}
