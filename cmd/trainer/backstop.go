package main

import (
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/backstop"
	"github.com/ckptstore/ckptstore/internal/launch"
)

// windUp is what a job may take to say that it ended and to close the store,
// after its workers have ended and its staged saves were finished.
const windUp = 30 * time.Second

// endTimes are how long the program may take to end once it is told to. After
// that it exits: a disk or a log that does not answer must not keep a node. The
// guard of a job kills the workers, and the next job finds out what was staged.
// What runs no job has all the time it takes: a guard ends with its trainer.
type endTimes struct {
	stderr  io.Writer
	preempt time.Duration // from the first SIGTERM or SIGUSR1 to a job
	stop    time.Duration // from any other signal
	disarm  func() bool
}

func (e *endTimes) defaults() {
	e.stderr, e.disarm = os.Stderr, func() bool { return false }
}

// ofJob takes the times that a job may need.
func (s *stopSignals) ofJob(cfg launch.Config) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ends.stop = cfg.Grace + cfg.DrainTimeout + windUp
	s.ends.preempt = s.ends.stop + cfg.PreemptGrace
}

// arm begins the time to end. s.mu is held.
func (e *endTimes) arm(sig unix.Signal, limit time.Duration) {
	if limit == 0 {
		return
	}
	e.disarm()
	e.disarm = backstop.After(limit, e.stderr, "trainer", fmt.Sprint("told to stop by ", unix.SignalName(sig)), 128+int(sig))
}
