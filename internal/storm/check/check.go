// Package check judges a store after a kill storm. It trusts the store only for its
// listings, and imports no package of the store. It reads the safetensors files itself,
// computes their expected content with package content, and reads the journals that the
// workers wrote of their acknowledgements.
//
//	journal     one rank's file: its saves, acknowledgements and resumes
//	listing     ckptstore ls --all --json, and ls --offline --json
//	decisions   ckptstore events --type checkpoint.* --json
//	bits        every file of every listed checkpoint, and every export of it
package check

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"sync"
)

// Options configure a check.
type Options struct {
	Bin      string // directory of the program ckptstore
	Store    string
	Journals string           // directory
	Sizes    map[string]int64 // of each journal: only lines before it count; nil counts all
	Env      []string
	Scratch  string // directory for exports; "" compares only the files
	// Settled states that every job has ended successfully: then no save is open.
	Settled bool
	// Number of checkpoints compared in parallel; default 2.
	Beside int
}

// Result counts the comparisons and lists the findings.
type Result struct {
	Acknowledged  int   `json:"acknowledged"` // checkpoints whose commit at least one rank received
	Acks          int   `json:"acks"`         // by all ranks
	Listed        int   `json:"listed"`       // checkpoints, each compared bit by bit
	Deleted       int   `json:"deleted"`      // acknowledged, and deleted by a decision since
	Lost          int   `json:"lost"`         // acknowledged, and neither listed nor deleted
	Torn          int   `json:"torn"`         // listed, and different from what was saved
	Resumes       int   `json:"resumes"`      // each compared bit by bit by the rank itself
	AbortedSaves  int   `json:"aborted_saves"`
	BytesRead     int64 `json:"bytes_read"`     // of safetensors files
	BytesExported int64 `json:"bytes_exported"` // and of exports
	Exports       int   `json:"exports"`
	Events        int   `json:"checkpoint_events"`

	Findings []string `json:"findings"`
}

// checker is one check.
type checker struct {
	Options
	journals *journals
	listed   map[string]checkpoint
	history  map[string]*history

	mu sync.Mutex
	Result
}

func (c *checker) find(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.Findings = append(c.Findings, fmt.Sprintf(format, args...))
}

// Run checks a store. Its error means that the store could not be judged.
func Run(ctx context.Context, o Options) (Result, error) {
	if o.Beside == 0 {
		o.Beside = 2
	}
	c := &checker{Options: o, Result: Result{Findings: []string{}}}
	var err error
	if c.journals, err = readJournals(o.Journals, o.Sizes); err != nil {
		return c.Result, err
	}
	if err := c.list(ctx); err != nil {
		return c.Result, err
	}
	if err := c.decisions(ctx); err != nil {
		return c.Result, err
	}
	c.checkJournals()
	c.checkAcknowledged()
	c.checkListed()
	if err := c.compare(ctx); err != nil {
		return c.Result, err
	}
	slices.Sort(c.Findings)
	return c.Result, nil
}

// checkJournals finds ranks that resumed something they had not saved, or went back.
func (c *checker) checkJournals() {
	for name, lines := range c.journals.byRank {
		newest := int64(-1)
		for _, l := range lines {
			switch l.Kind {
			case Ack:
				newest = max(newest, l.Step)
			case Aborted:
				c.AbortedSaves++
			case Fresh:
				if newest >= 0 {
					c.find("%s: attempt %d begins from nothing, although step %d was acknowledged before", name, l.Attempt, newest)
				}
			case Resume:
				c.Resumes++
				if l.Step < newest {
					c.find("%s: attempt %d resumes step %d, although step %d was acknowledged before", name, l.Attempt, l.Step, newest)
				}
				if len(l.Wrong) > 0 {
					c.find("%s: attempt %d resumed %s with wrong bytes of %v", name, l.Attempt, l.Checkpoint, l.Wrong)
				}
			}
		}
	}
}

// checkAcknowledged finds checkpoints that a rank saw committed and the store does not
// have.
func (c *checker) checkAcknowledged() {
	for id, ack := range c.journals.acked {
		c.Acknowledged++
		c.Acks += ack.ranks
		h := c.history[id]
		if h == nil || h.committed == 0 {
			c.Lost++
			c.find("%s was acknowledged to rank %d of %s, and its commit is not in the log", id, ack.Rank, ack.Run)
			continue
		}
		if h.deleted > 0 {
			c.Deleted++
			continue
		}
		if _, ok := c.listed[id]; !ok {
			c.Lost++
			c.find("%s was acknowledged to rank %d of %s, and is neither listed nor deleted", id, ack.Rank, ack.Run)
		}
	}
}

// checkListed finds checkpoints that are listed and were never saved.
func (c *checker) checkListed() {
	for id, l := range c.listed {
		h := c.history[id]
		if h == nil || h.begun == 0 || h.committed == 0 {
			c.find("%s is listed, and the log has no begin or no commit of it", id)
		}
		for rank := range l.World {
			if !c.journals.saving[saved{l.Run, rank, l.Attempt, l.Step}] {
				c.find("%s is listed, and rank %d never saved step %d in attempt %d", id, rank, l.Step, l.Attempt)
			}
		}
	}
}

// compare reads every listed checkpoint.
func (c *checker) compare(ctx context.Context) error {
	work := make(chan checkpoint)
	var wg sync.WaitGroup
	errs := make([]error, c.Beside)
	for i := range c.Beside {
		wg.Go(func() {
			for l := range work {
				if errs[i] == nil {
					errs[i] = c.one(ctx, l, filepath.Join(c.Scratch, fmt.Sprint("export-", i)))
				}
			}
		})
	}
	for _, id := range slices.Sorted(maps.Keys(c.listed)) {
		work <- c.listed[id]
	}
	close(work)
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// one compares one checkpoint: its files, and its export.
func (c *checker) one(ctx context.Context, l checkpoint, scratch string) error {
	n, wrong := compareFiles(filepath.Join(c.Store, "data", l.Run, l.Trial, l.ID), l)
	var exported int64
	if c.Scratch != "" {
		var more []string
		var err error
		if exported, more, err = c.export(ctx, l, scratch); err != nil {
			return err
		}
		wrong = append(wrong, more...)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.Listed++
	c.BytesRead += n
	if exported > 0 {
		c.BytesExported += exported
		c.Exports++
	}
	if len(wrong) > 0 {
		c.Torn++
	}
	for _, w := range wrong {
		c.Findings = append(c.Findings, fmt.Sprintf("%s: %s", l.ref(), w))
	}
	return nil
}
