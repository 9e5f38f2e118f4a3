package check

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
)

// Kinds of a journal's lines.
const (
	Fresh   = "fresh"   // an attempt begins from nothing
	Resume  = "resume"  // an attempt begins from a checkpoint, which was compared
	Saving  = "saving"  // the rank is about to save
	Ack     = "ack"     // the rank received the commit of the checkpoint
	Aborted = "aborted" // the rank received the abort of the checkpoint
)

// Line is one line of a journal. It is durable before the rank continues.
type Line struct {
	Kind       string   `json:"kind"`
	Run        string   `json:"run"`
	Rank       int      `json:"rank"`
	World      int      `json:"world"`
	Attempt    int      `json:"attempt"`
	Checkpoint string   `json:"checkpoint,omitempty"`
	Step       int64    `json:"step,omitempty"`
	Reason     string   `json:"reason,omitempty"`
	Wrong      []string `json:"wrong,omitempty"` // of a resume: tensors with other bytes
}

// JournalName returns the name of one rank's file.
func JournalName(run string, rank int) string { return fmt.Sprintf("%s.%d.jsonl", run, rank) }

// saved names one rank's part of a save.
type saved struct {
	run           string
	rank, attempt int
	step          int64
}

// acked is the first acknowledgement of a checkpoint.
type acked struct {
	Line
	ranks int
}

type journals struct {
	byRank map[string][]Line
	acked  map[string]*acked // by run and ID: see [key]
	saving map[saved]bool
}

// key names a checkpoint in a store.
func key(run, id string) string { return run + "@" + id }

// readJournals reads the journals of a directory. Of the lines after a journal's size
// only the saves count: a copy of a live store may have them.
func readJournals(dir string, sizes map[string]int64) (*journals, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.jsonl"))
	if err != nil {
		return nil, err
	}
	j := &journals{byRank: map[string][]Line{}, acked: map[string]*acked{}, saving: map[saved]bool{}}
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		name := filepath.Base(path)
		counts := int64(len(data))
		if sizes != nil {
			counts = sizes[name]
		}
		whole, at := bytes.LastIndexByte(data, '\n')+1, int64(0) // a rank was killed within the rest
		for text := range bytes.Lines(data[:whole]) {
			var l Line
			at += int64(len(text))
			if len(bytes.TrimSpace(text)) == 0 || json.Unmarshal(text, &l) != nil {
				continue // a partial line whose writer was killed; the next is complete
			}
			if at <= counts || l.Kind == Saving {
				j.add(name, l)
			}
		}
	}
	return j, nil
}

func (j *journals) add(name string, l Line) {
	j.byRank[name] = append(j.byRank[name], l)
	switch l.Kind {
	case Saving:
		j.saving[saved{l.Run, l.Rank, l.Attempt, l.Step}] = true
	case Ack:
		a := j.acked[key(l.Run, l.Checkpoint)]
		if a == nil {
			a = &acked{Line: l}
			j.acked[key(l.Run, l.Checkpoint)] = a
		}
		a.ranks++
	}
}

// Sizes returns the current sizes of the journals, which mark what is acknowledged by
// now.
func Sizes(dir string) (map[string]int64, error) {
	paths, err := filepath.Glob(filepath.Join(dir, "*.jsonl"))
	if err != nil {
		return nil, err
	}
	sizes := map[string]int64{}
	for _, path := range paths {
		info, err := os.Stat(path)
		if err != nil {
			return nil, err
		}
		sizes[filepath.Base(path)] = info.Size()
	}
	return sizes, nil
}
