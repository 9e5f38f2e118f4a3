package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Kinds of processes that a storm signals.
const (
	trainers = "trainer"
	workers  = "worker"
	guards   = "guard"
	agents   = "agent"
	servers  = "serve"
	owners   = "owner" // whichever process owns the store
)

// envMark marks every process of a storm in its environment.
const envMark = "CKPTSTORE_STORM"

// process is one process of this storm.
type process struct {
	pid  int
	kind string
	run  string // of a worker or its trainer; may be empty
}

// processes lists all processes of this storm except itself, by their mark.
func (s *storm) processes() (found []process) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	mark := []byte(envMark + "=" + s.mark + "\x00")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		env, err := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
		if err != nil || !bytes.Contains(env, mark) {
			continue // gone, another user's, or a zombie
		}
		line, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
		if err != nil || len(line) == 0 {
			continue
		}
		args := strings.Split(strings.TrimSuffix(string(line), "\x00"), "\x00")
		found = append(found, process{pid, kindOf(args), runOf(args, env)})
	}
	return found
}

func kindOf(args []string) string {
	name := filepath.Base(args[0])
	verb := ""
	if len(args) > 1 {
		verb = args[1]
	}
	switch {
	case name == "trainer" && verb == "guard":
		return guards
	case name == "trainer" && verb == "run":
		return trainers
	case verb == "worker", len(args) > 2 && filepath.Base(args[2]) == pythonWorker, filepath.Base(verb) == pythonWorker:
		return workers
	case name == "ckptstore" && verb == "serve":
		return servers
	case name == "ckptstore" && verb == "agent" && (len(args) < 3 || args[2] != "start"):
		return agents
	}
	return name + " " + verb
}

// runOf returns the run of a worker from its environment, or of a trainer from its
// flag.
func runOf(args []string, env []byte) string {
	for _, a := range args {
		if name, ok := strings.CutPrefix(a, "--name="); ok {
			return name
		}
	}
	for entry := range bytes.SplitSeq(env, []byte{0}) {
		if name, ok := bytes.CutPrefix(entry, []byte("CKPTSTORE_RUN=")); ok {
			return string(name)
		}
	}
	return ""
}

// ownerNow returns the process that owns the store, if it is one of these.
func (s *storm) ownerNow(among []process) (process, bool) {
	var owner struct{ PID int }
	text, err := os.ReadFile(filepath.Join(s.store, "owner.json"))
	if err != nil || json.Unmarshal(text, &owner) != nil {
		return process{}, false
	}
	for _, p := range among {
		if p.pid == owner.PID {
			return p, true
		}
	}
	return process{}, false
}

// victim picks a process of a kind.
func (s *storm) victim(random *rand.Rand, kind string) (process, bool) {
	all := s.processes()
	if kind == owners {
		return s.ownerNow(all)
	}
	var of []process
	for _, p := range all {
		if p.kind == kind {
			of = append(of, p)
		}
	}
	if len(of) == 0 {
		return process{}, false
	}
	return of[random.IntN(len(of))], true
}

// hit is a signal that a storm has sent.
type hit struct {
	pid    int
	run    string
	kind   string
	signal syscall.Signal
	at     time.Time
}

// send sends a signal to a process and records it, because it explains how the process
// ends.
func (s *storm) send(p process, kind string, signal syscall.Signal) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	// Recorded first: the process may end before send returns.
	s.hits = append(s.hits, hit{p.pid, p.run, p.kind, signal, time.Now()})
	if err := syscall.Kill(p.pid, signal); err != nil {
		s.hits = s.hits[:len(s.hits)-1]
		return false
	}
	s.log("%s to the %s, process %d %s", signal, kind, p.pid, p.run)
	return true
}

// wasSent reports whether one of the signals was sent to a process since then.
func (s *storm) wasSent(pid int, since time.Time, signals ...syscall.Signal) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range s.hits {
		if h.pid != pid || h.at.Before(since) {
			continue
		}
		for _, signal := range signals {
			if h.signal == signal {
				return true
			}
		}
	}
	return false
}

// log writes a line to the storm's own log; s.mu need not be held.
func (s *storm) log(format string, args ...any) {
	_, _ = fmt.Fprintf(s.diary, "%8.3f %s\n", time.Since(s.began).Seconds(), fmt.Sprintf(format, args...))
}
