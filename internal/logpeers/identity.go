package logpeers

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/ckptstore/ckptstore/internal/claim"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// copyID is copy.json in the directory of a copy. It names the log and the copy. Without it,
// the copy of another store, or a second one of another peer, would join and vote.
type copyID struct {
	Log   string `json:"log"` // digest of the secret, which each log has its own of
	Index int    `json:"index"`
	// Generation counts the copies of this index that were lost before.
	Generation int `json:"generation,omitempty"`
}

const copyName = "copy.json"

// ErrCopyLost reports that the directory of a copy is empty, and the store has a log.
var ErrCopyLost = problem.New(problem.Damage, "a copy of the log is gone")

// ErrForeignCopy reports that the directory of a copy has something else.
var ErrForeignCopy = problem.New(problem.Foreign, "not this copy of the log")

func lostCopy(dir string) error {
	return fmt.Errorf("%w: %s has none: start this node's trainer where the copy is; the other two copies serve the log without it. If it is gone for good, make it again between two jobs: `ckptstore log-copies --replace K`. Do not put a backup of it there: a backup votes without the events that the copy has acknowledged since", ErrCopyLost, dir)
}

// hasCopy reports whether a directory has the files of a copy.
func hasCopy(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, "jetstream"))
	return !errors.Is(err, fs.ErrNotExist)
}

// identify checks that a directory has the copy, and makes an empty one its directory
// unless the log has formed. Its caller has locked the directory.
func (c copyID) identify(dir string, formed bool) error {
	path := filepath.Join(dir, copyName)
	text, err := os.ReadFile(path)
	if err == nil {
		var is copyID
		if err := json.Unmarshal(text, &is); err != nil {
			return fmt.Errorf("%w: read %s: %w: start this node's trainer without this directory; the other two copies serve the log", ErrForeignCopy, path, err)
		}
		switch {
		case is.Log != c.Log:
			return fmt.Errorf("%w: %s has a copy of another store's log: give each store its own --log-replica-dir", ErrForeignCopy, dir)
		case is.Index != c.Index:
			return fmt.Errorf("%w: %s has copy %d of this log, and this node has copy %d: give each node the directory of its own copy", ErrForeignCopy, dir, is.Index, c.Index)
		case is.Generation != c.Generation:
			return fmt.Errorf("%w: %s has copy %d of this log as it was before it was replaced: the copy that serves the log now is in the store; leave --log-replica-dir out, and remove this directory", ErrForeignCopy, dir, is.Index)
		case formed && !hasCopy(dir):
			return lostCopy(dir)
		}
		return nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if formed && !hasCopy(dir) {
		return lostCopy(dir)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if name := e.Name(); name != claim.Name && name != claim.BeatName && !strings.HasPrefix(name, durable.TempPrefix) {
			return fmt.Errorf("%w: %s has %q and no %s: choose an empty or a new directory for the copy", ErrForeignCopy, dir, name, copyName)
		}
	}
	if text, err = json.Marshal(c); err != nil {
		return err
	}
	return errors.Join(durable.Write(path, append(text, '\n')), durable.SyncDir(filepath.Dir(dir)))
}

// The states of a copy, by the files in the store's directory.
const (
	CopyHere    = "here"    // in the store's directory
	CopyFilling = "filling" // made again by [Replace], which did not end, and no job has filled it further
	CopyAway    = "away"    // on the disk of its node, or gone
)

// CopyState is what the directory of a store shows of a copy.
type CopyState struct {
	Copy     int    `json:"copy"`
	State    string `json:"state"`
	Replaced int    `json:"replaced"` // how often, because it was lost
	Dir      string `json:"dir"`      // where it lies, or would
}

// States returns the states of all copies of the log of a store. It asks no process.
func States(store string) (all []CopyState, err error) {
	g, err := readGenerations(store)
	if err != nil {
		return nil, err
	}
	for k := range Copies {
		c := CopyState{Copy: k, State: CopyAway, Replaced: g[k], Dir: CopyDir(store, k)}
		if hasCopy(c.Dir) {
			c.State = CopyHere
			if isFilling(c.Dir) {
				c.State = CopyFilling
			}
		}
		all = append(all, c)
	}
	return all, nil
}
