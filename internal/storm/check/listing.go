package check

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// commandLimit bounds each command of the store.
const commandLimit = 5 * time.Minute

// checkpoint is a checkpoint in the store's listing.
type checkpoint struct {
	Run     string `json:"run"`
	Trial   string `json:"trial"`
	ID      string `json:"id"`
	Step    int64  `json:"step"`
	Attempt int    `json:"attempt"`
	World   int    `json:"world_size"`
	State   string `json:"state"`
}

func (l checkpoint) ref() string { return key(l.Run, l.ID) }

// history is the log's decisions on a checkpoint: sequences, 0 for never.
type history struct {
	run                       string
	begun, committed, deleted uint64
}

// command runs ckptstore on the store, and returns its output.
func (c *checker) command(ctx context.Context, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, commandLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, filepath.Join(c.Bin, "ckptstore"), append([]string{"--store", c.Store, "--wait", "60s"}, args...)...)
	cmd.Env = c.Env
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return out, fmt.Errorf("ckptstore %s: %w: %.2000s", strings.Join(args, " "), err, stderr.Bytes())
	}
	return out, nil
}

// list gets the listing from the log and the listing from the receipts, and reports
// differences.
func (c *checker) list(ctx context.Context) error {
	c.listed = map[string]checkpoint{}
	all, err := c.ls(ctx, "--all")
	if err != nil {
		return err
	}
	for _, l := range all {
		switch l.State {
		case "committed":
			c.listed[l.ref()] = l
		case "aborted", "deleted":
		default:
			if c.Settled {
				c.find("%s is %s, and every job has ended", l.ref(), l.State)
			}
		}
	}
	offline, err := c.ls(ctx, "--offline")
	if err != nil {
		return err
	}
	receipts := map[string]bool{}
	for _, l := range offline {
		receipts[l.ref()] = true
		if _, ok := c.listed[l.ref()]; !ok {
			c.find("%s has a receipt, and is not listed", l.ref())
		}
	}
	for id := range c.listed {
		if !receipts[id] {
			c.find("%s is listed, and has no receipt", id)
		}
	}
	return nil
}

func (c *checker) ls(ctx context.Context, how string) ([]checkpoint, error) {
	out, err := c.command(ctx, "ls", how, "--json")
	if err != nil {
		return nil, err
	}
	var list struct{ Checkpoints []checkpoint }
	if err := json.Unmarshal(out, &list); err != nil {
		return nil, fmt.Errorf("ls: %w", err)
	}
	return list.Checkpoints, nil
}

// decisions reads the log's decisions on every checkpoint.
func (c *checker) decisions(ctx context.Context) error {
	out, err := c.command(ctx, "events", "--type", "checkpoint.*", "--json")
	if err != nil {
		return err
	}
	var all []event
	lines := bufio.NewScanner(bytes.NewReader(out))
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		e, err := parseEvent(lines.Bytes())
		if err != nil {
			return err
		}
		all = append(all, e)
	}
	c.replay(all)
	return lines.Err()
}

// replay finds sequences of events that no log may contain, and keeps the history of
// each checkpoint.
func (c *checker) replay(all []event) {
	c.history = map[string]*history{}
	c.Events = len(all)
	last, newest := uint64(0), map[string]*history{} // by run: the last commit
	for _, e := range all {
		if e.sequence <= last {
			c.find("events: sequence %d follows %d", e.sequence, last)
		}
		last = e.sequence
		id := key(e.run, e.checkpoint)
		h := c.history[id]
		if h == nil {
			h = &history{run: e.run}
			c.history[id] = h
		}
		switch e.verb {
		case "begun":
			h.begun = e.sequence
		case "committed":
			if h.committed > 0 {
				c.find("%s is committed twice, at %d and %d", id, h.committed, e.sequence)
			}
			h.committed, newest[e.run] = e.sequence, h
		case "deleted":
			if h.committed == 0 {
				c.find("%s is deleted, and was never committed", id)
			}
			if newest[e.run] == h {
				c.find("%s was deleted, and was the newest of %s", id, e.run)
			}
			h.deleted = e.sequence
		}
	}
}

type event struct {
	sequence              uint64
	run, checkpoint, verb string
}

// parseEvent reads one line of events --json: its subject is ckpt.RUN.TRIAL.s.checkpoint.VERB.
func parseEvent(line []byte) (e event, err error) {
	var got struct {
		Sequence json.Number
		Subject  string
		Data     struct{ Checkpoint string }
	}
	if err := json.Unmarshal(line, &got); err != nil {
		return e, fmt.Errorf("events: %.200q: %w", line, err)
	}
	parts := strings.Split(got.Subject, ".")
	sequence, err := got.Sequence.Int64()
	if err != nil || sequence < 1 || len(parts) != 6 || parts[4] != "checkpoint" || got.Data.Checkpoint == "" {
		return e, errors.Join(fmt.Errorf("events: %.200q: want a sequence, ckpt.RUN.TRIAL.s.checkpoint.VERB and a checkpoint", line), err)
	}
	return event{uint64(sequence), parts[1], got.Data.Checkpoint, parts[5]}, nil //nolint:gosec // above 0
}
