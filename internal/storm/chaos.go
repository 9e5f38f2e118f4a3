package main

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/internal/storm/check"
)

// kill kills processes with SIGKILL.
func (s *storm) kill(ctx context.Context, random *rand.Rand) {
	for pause(ctx, between(random, 100*time.Millisecond, 2500*time.Millisecond)) {
		kind := oneOf(random, map[string]int{trainers: 6, workers: 6, owners: 5, guards: 3, agents: 2, servers: 1})
		if p, ok := s.victim(random, kind); ok && s.send(p, kind, syscall.SIGKILL) {
			s.count(s.figures.Kills, kind)
		}
	}
}

// stop suspends processes and continues them later.
func (s *storm) stop(ctx context.Context, random *rand.Rand) {
	var stopped sync.WaitGroup
	defer stopped.Wait()
	for pause(ctx, between(random, time.Second, 5*time.Second)) {
		kind := oneOf(random, map[string]int{trainers: 4, workers: 3, owners: 4, guards: 1, agents: 2, servers: 1})
		span := between(random, time.Second, longestStop)
		p, ok := s.victim(random, kind)
		if !ok || !s.send(p, kind, syscall.SIGSTOP) {
			continue
		}
		s.count(s.figures.Stops, kind)
		stopped.Go(func() {
			pause(ctx, span)
			s.send(p, kind, syscall.SIGCONT)
		})
	}
}

// ask asks jobs to save and end. It signals the trainer alone, or every process of the
// job, as some schedulers do.
func (s *storm) ask(ctx context.Context, random *rand.Rand) {
	for pause(ctx, between(random, 1500*time.Millisecond, 6*time.Second)) {
		signal := syscall.SIGTERM
		if random.IntN(2) == 0 {
			signal = syscall.SIGUSR1
		}
		all := random.IntN(2) == 0
		p, ok := s.victim(random, trainers)
		if !ok {
			continue
		}
		if !all {
			if s.send(p, trainers, signal) {
				s.count(s.figures.Asked, trainers)
			}
			continue
		}
		s.count(s.figures.Asked, "every process")
		for _, of := range s.processes() {
			if of.run == p.run && (of.kind == trainers || of.kind == workers) {
				s.send(of, of.kind, signal)
			}
		}
	}
}

// wasAsked reports whether every process of a run's job was signalled since then.
func (s *storm) wasAsked(run string, since time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range s.hits {
		if h.run == run && h.kind == trainers && h.at.After(since) && (h.signal == syscall.SIGTERM || h.signal == syscall.SIGUSR1) {
			return true
		}
	}
	return false
}

// disturb runs commands in parallel with the jobs.
func (s *storm) disturb(ctx context.Context, random *rand.Rand) {
	for n := 0; pause(ctx, between(random, 200*time.Millisecond, 3*time.Second)); n++ {
		switch what := oneOf(random, map[string]int{"gc": 5, "verify": 3, "ls": 5, "views": 1, "backup": 2}); what {
		case "gc":
			policy := fmt.Sprintf("last=%d,every=%dsteps", 4+random.IntN(40), 20+random.IntN(100))
			s.alongside(ctx, what, "gc", "--policy", policy, "--apply", "--json")
		case "verify":
			how := []string{"verify", "--quick", "--json"}
			if random.IntN(2) == 0 {
				how = []string{"verify", "--json"}
			}
			s.alongside(ctx, what, how...)
		case "ls":
			s.alongside(ctx, what, "ls", "--all", "--json")
		case "views":
			s.alongside(ctx, what, "views", "verify", "--json")
		case "backup":
			s.backUp(ctx, n)
		}
	}
}

// serve owns the store, or stands by, for a while.
func (s *storm) serve(ctx context.Context, random *rand.Rand) {
	for pause(ctx, between(random, time.Second, 6*time.Second)) {
		within, cancel := context.WithTimeout(ctx, between(random, time.Second, 12*time.Second))
		cmd := s.ckptstore(within, "serve")
		cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
		cmd.WaitDelay = time.Minute
		s.count(s.figures.Commands, "serve")
		out, err := cmd.CombinedOutput()
		ended := within.Err() != nil
		cancel()
		s.judgeCommand("serve", cmd.ProcessState, ended, out, err)
	}
}

// alongside runs one command in parallel with the jobs, and reports whether it succeeded.
func (s *storm) alongside(ctx context.Context, what string, args ...string) bool {
	// The limit is for a command that hangs: an owner may be stopped, and the disk
	// slow.
	within, cancel := context.WithTimeout(context.WithoutCancel(ctx), 3*time.Minute)
	defer cancel()
	cmd := s.ckptstore(within, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	s.count(s.figures.Commands, what)
	began := time.Now()
	err := cmd.Run()
	s.log("%s: %v after %s", strings.Join(args, " "), err, time.Since(began))
	if within.Err() != nil {
		s.find("ckptstore %s has not ended within 3 minutes", strings.Join(args, " "))
		return false
	}
	s.judgeCommand(what, cmd.ProcessState, false, append(stderr.Bytes(), stdout.Bytes()...), err)
	return err == nil
}

// refusals are the exit codes of a command whose owner was killed or stopped: the
// command did nothing, and can be run again.
var refusals = map[int]bool{1: true, 11: true}

// judgeCommand finds commands that ended in an impossible way: with damage or without a
// store.
func (s *storm) judgeCommand(what string, state *os.ProcessState, asked bool, out []byte, err error) {
	if err == nil || state == nil {
		return
	}
	status, _ := state.Sys().(syscall.WaitStatus)
	switch code := status.ExitStatus(); {
	case code == 0, asked && code == 130: // the error of the context that ended it
	case status.Signaled() && (status.Signal() == syscall.SIGKILL || status.Signal() == syscall.SIGTERM):
		if !asked && !s.wasSent(state.Pid(), s.began, syscall.SIGKILL, syscall.SIGTERM) {
			s.find("ckptstore %s, process %d, ended with %s, which the storm did not send", what, state.Pid(), status.Signal())
		}
	case refusals[code]:
		s.count(s.figures.Refused, fmt.Sprint(what, ": ", code))
		s.log("ckptstore %s ended with %d: %.600s", what, code, out)
	default:
		s.find("ckptstore %s ended with %d: %.3000s", what, code, out)
	}
}

// backup is a copy of the store, with the acknowledgements from before it began.
type backup struct {
	dir   string
	sizes map[string]int64
}

// backUp makes a copy of the live store.
func (s *storm) backUp(ctx context.Context, n int) {
	if !s.canBackUp() {
		return
	}
	sizes, err := check.Sizes(s.acks)
	if err != nil {
		s.find("backup: %v", err)
		return
	}
	dir := filepath.Join(s.dir, fmt.Sprint("backup-", n))
	if !s.alongside(ctx, "backup", "backup", dir) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	// Only the newest backup is kept: a copy may take as much room as the store.
	for _, old := range s.backups {
		_ = os.RemoveAll(old.dir)
	}
	s.backups = append(s.backups, backup{dir, sizes})
}

// canBackUp reports whether the program has the backup command.
func (s *storm) canBackUp() bool {
	s.verbs.Do(func() {
		help, err := s.ckptstore(context.Background(), "--help").Output()
		s.canBackup = err == nil && bytes.Contains(help, []byte("\n  backup "))
		if !s.canBackup {
			fmt.Fprintln(os.Stderr, "storm: no backups: ckptstore has no command backup")
		}
	})
	return s.canBackup
}
