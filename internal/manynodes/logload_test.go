//go:build testbed || outlive

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
)

// loadVerb makes the test binary a load on a log: it appends facts and takes decisions until the
// file loadOver exists, then reads the whole log and compares it with what was acknowledged.
const loadVerb = "log-load"

// Files of a load, in its directory on the host.
const (
	loadOver  = "load-over"
	loadFound = "load-found"
)

// loadEvents is how many events the log has before the faults: more than one block of the server.
const loadEvents = 20_500

// loadConfig is the argument of loadVerb.
type loadConfig struct {
	URL string
	Dir string // of the load's files
}

// logVerdict is what a load has found.
type logVerdict struct {
	Events    uint64  // in the log, of the job too
	Acked     int     // events that the load has acknowledged
	Conflicts int     // refused decisions
	Lost      int     // acknowledged events that are missing or at another sequence
	Twice     int     // events that are stored twice
	Unseen    int     // decisions that were accepted and had not seen the one before
	At        []int64 // times of the acknowledgements, by CLOCK_MONOTONIC, in order of arrival
}

type load struct {
	log *jetlog.Log

	mu        sync.Mutex
	at        []int64
	seqs      map[string]uint64 // of acknowledged events, by their IDs
	after     map[string]uint64 // what a decision had seen of its lane
	conflicts int
}

// loadPace is the pause between two calls of one goroutine.
const loadPace = 10 * time.Millisecond

var loadLane = events.Aggregate{Run: "load", Trial: "main"}

func loadLog(ctx context.Context, args []string) (err error) {
	var c loadConfig
	if err := json.Unmarshal([]byte(args[0]), &c); err != nil {
		return err
	}
	l := &load{seqs: map[string]uint64{}, after: map[string]uint64{}}
	if l.log, err = jetlog.Connect(ctx, jetlog.Options{URL: c.URL, Timeout: time.Second}); err != nil {
		return err
	}
	defer l.log.Close()
	if _, _, err := l.log.Open(ctx); err != nil {
		return err
	}
	for len(l.seqs) < loadEvents {
		if err := l.append(ctx, 250); err != nil {
			return err
		}
	}
	fmt.Println("loaded", len(l.seqs))
	over := func() bool {
		_, err := os.Stat(filepath.Join(c.Dir, loadOver))
		return err == nil
	}
	failed := make(chan error, 4)
	for who := range cap(failed) {
		call := l.decide
		if who%2 == 1 {
			call = func(ctx context.Context) error { return l.append(ctx, who) }
		}
		go func() {
			for !over() {
				if err := call(ctx); err != nil {
					failed <- err
					return
				}
				time.Sleep(loadPace) //nolint:forbidigo // the rate of a load, not a wait
			}
			failed <- nil
		}()
	}
	for range cap(failed) {
		err = errors.Join(err, <-failed)
	}
	if err != nil {
		return err
	}
	v, err := l.judge(ctx)
	if err != nil {
		return err
	}
	text, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(c.Dir, loadFound), text, 0o600)
}

func loadStamp() events.Stamp {
	return events.Stamp{ID: uuid.NewString(), Source: "load", Time: time.Now()}
}

// loadWait bounds a call: longer than a log may be without a leader.
const loadWait = 2 * time.Minute

func (l *load) append(ctx context.Context, n int) error {
	facts := make([]events.Fact, n)
	for i := range facts {
		var err error
		facts[i], err = events.NewFact(loadStamp(), events.Scope{Run: loadLane.Run, Trial: loadLane.Trial, Actor: events.Rank(0)},
			events.Metrics{Attempt: 1, Iteration: i, Step: int64(i), Metrics: map[string]any{"loss": 0.5}})
		if err != nil {
			return err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, loadWait)
	defer cancel()
	seqs, err := l.log.Append(ctx, facts...)
	if err != nil {
		return fmt.Errorf("append %d facts: %w", n, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.at = append(l.at, monotonic())
	for i, f := range facts {
		l.seqs[f.ID] = seqs[i]
	}
	return nil
}

// decide takes a decision in competition with others.
func (l *load) decide(ctx context.Context) error {
	d, err := events.NewDecision(loadStamp(), loadLane, events.CheckpointBegun{Attempt: 1, Checkpoint: uuid.NewString(), Name: "load", WorldSize: 1, Participants: []int{0}})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, loadWait)
	defer cancel()
	for {
		end, err := l.log.LaneEnd(ctx, loadLane)
		if err != nil {
			return fmt.Errorf("end of the lane: %w", err)
		}
		seq, err := l.log.Decide(ctx, d, end)
		l.mu.Lock()
		switch {
		case errors.Is(err, jetlog.ErrConflict):
			l.conflicts++
		case err == nil:
			l.at = append(l.at, monotonic())
			l.seqs[d.ID], l.after[d.ID] = seq, end
		}
		l.mu.Unlock()
		if !errors.Is(err, jetlog.ErrConflict) {
			return err
		}
	}
}

// judge compares the log with the acknowledgements. Nothing is appended meanwhile by this load.
func (l *load) judge(ctx context.Context) (v logVerdict, err error) {
	if v.Events, err = l.log.Last(ctx); err != nil {
		return v, err
	}
	v.Acked, v.Conflicts, v.At = len(l.seqs), l.conflicts, l.at
	stored := map[string]uint64{}
	lane := uint64(0)
	for e, err := range l.log.Read(ctx, 1, v.Events) {
		if err != nil {
			return v, err
		}
		if stored[e.ID] != 0 {
			v.Twice++
		}
		stored[e.ID] = e.Sequence
		if loadLane.Owns(e.Event) {
			if after, ok := l.after[e.ID]; !ok || after != lane {
				v.Unseen++
			}
			lane = e.Sequence
		}
	}
	for id, seq := range l.seqs {
		if stored[id] != seq {
			v.Lost++
		}
	}
	return v, nil
}
