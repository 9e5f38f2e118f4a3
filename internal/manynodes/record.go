package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// A rank's own record of its life is two files in a directory of the host, which no fault
// of a node's network or disk reaches:
//
//	NAME.json   one line with its identity, then one line for each step and event
//	NAME.pulse  the last time at which it ran, 8 bytes, rewritten each [pulseInterval]
//
// All times are CLOCK_MONOTONIC in nanoseconds, which the nodes and the host share.
const pulseInterval = 5 * time.Millisecond

// identity is what the environment of a rank states.
type identity struct {
	Host       string `json:"host"`
	PID        int    `json:"pid"` // in its node
	Start      int64  `json:"start"`
	Job        string `json:"job"`
	Attempt    int    `json:"attempt"`
	Rank       int    `json:"rank"`
	World      int    `json:"world"`
	Node       int    `json:"node"` // GROUP_RANK
	Restart    int    `json:"restart"`
	MasterAddr string `json:"master_addr"`
	MasterPort int    `json:"master_port"`
}

// line is one fact of a rank's life.
type line struct {
	At    int64  `json:"at"`
	What  string `json:"what"` // loaded, step, saved, aborted or end
	Step  int64  `json:"step,omitempty"`
	Loss  string `json:"loss,omitempty"` // its bits
	Saved string `json:"saved,omitempty"`
	Why   string `json:"why,omitempty"`
	// Took is the duration of a load, or of all steps, in seconds.
	Took float64 `json:"took,omitempty"`
	// Asked is when a load began, in seconds since the start of the process.
	Asked float64 `json:"asked,omitempty"`
}

// The kinds of lines.
const (
	whatLoaded  = "loaded"
	whatStep    = "step"
	whatSaved   = "saved"
	whatAborted = "aborted"
	whatEnd     = "end"
)

// life is a rank's record as the harness reads it.
type life struct {
	identity
	Lines []line
	Last  int64 // the last time at which it ran
}

// monotonic returns the time by CLOCK_MONOTONIC.
func monotonic() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &t); err != nil {
		panic(err) // the clock exists on every kernel
	}
	return t.Nano()
}

// recorder writes the record of this process.
type recorder struct {
	lines, pulse *os.File
	stop, done   chan struct{}
}

func newRecorder(dir string, id identity) (*recorder, error) {
	name := filepath.Join(dir, fmt.Sprintf("a%d-r%d-%s-%d", id.Attempt, id.Rank, id.Host, id.PID))
	pulse, err := os.Create(name + ".pulse")
	if err != nil {
		return nil, err
	}
	lines, err := os.Create(name + ".json")
	if err != nil {
		return nil, errors.Join(err, pulse.Close())
	}
	r := &recorder{lines: lines, pulse: pulse, stop: make(chan struct{}), done: make(chan struct{})}
	go r.beat()
	return r, r.put(id)
}

// beat rewrites the pulse until close.
func (r *recorder) beat() {
	defer close(r.done)
	tick := time.NewTicker(pulseInterval)
	defer tick.Stop()
	for {
		_, _ = r.pulse.WriteAt(binary.LittleEndian.AppendUint64(nil, uint64(monotonic())), 0) //nolint:gosec // a time is positive
		select {
		case <-tick.C:
		case <-r.stop:
			return
		}
	}
}

func (r *recorder) record(l line) error {
	l.At = monotonic()
	return r.put(l)
}

func (r *recorder) put(v any) error {
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = r.lines.Write(append(text, '\n'))
	return err
}

func (r *recorder) close() error {
	close(r.stop)
	<-r.done
	return errors.Join(r.lines.Close(), r.pulse.Close())
}

// readLives reads the records of a directory, of attempts after the given one. A line that
// is being written is left out, and so is a record without its first line.
func readLives(dir string, after int) (lives []life, err error) {
	names, err := filepath.Glob(filepath.Join(dir, "*.json"))
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		var attempt int
		if _, err := fmt.Sscanf(filepath.Base(name), "a%d-", &attempt); err == nil && attempt <= after {
			continue
		}
		text, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		var l life
		whole := bytes.SplitAfter(text, []byte("\n"))
		for i, t := range whole[:len(whole)-1] {
			var into any = &l.identity
			if i > 0 {
				l.Lines = append(l.Lines, line{})
				into = &l.Lines[i-1]
			}
			if err := json.Unmarshal(t, into); err != nil {
				return nil, fmt.Errorf("%s: line %d: %w", name, i+1, err)
			}
		}
		if l.Start == 0 {
			continue
		}
		l.Last = l.Start
		pulse, err := os.ReadFile(name[:len(name)-len("json")] + "pulse")
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		if len(pulse) == 8 {
			l.Last = max(l.Last, int64(binary.LittleEndian.Uint64(pulse))) //nolint:gosec // a time is small
		}
		for _, line := range l.Lines {
			l.Last = max(l.Last, line.At)
		}
		lives = append(lives, l)
	}
	return lives, nil
}

// step returns the last step that a life has trained, 0 for none.
func (l life) step() (step int64) {
	for _, line := range l.Lines {
		if line.What == whatStep {
			step = line.Step
		}
	}
	return step
}

// steps counts the steps that a life has trained.
func (l life) steps() (n int) {
	for _, line := range l.Lines {
		if line.What == whatStep {
			n++
		}
	}
	return n
}
