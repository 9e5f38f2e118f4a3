package ledger

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"sync"

	"github.com/ckptstore/ckptstore/internal/audit"
)

// salts are the keys of the runs. A key is durable before the first entry of its run is
// hashed. Without it, the tree cannot be computed from the log again.
type salts struct {
	store string
	disk  *disk // of the owner, which adds keys

	mu      sync.Mutex
	loaded  bool // the file was read
	keys    map[string][]byte
	fresh   map[string][]byte        // made, and not known to be durable
	salters map[string]*audit.Salter // of runs whose events came last, at most saltersMost
}

// saltersMost bounds the memory of salters, of half a kilobyte each. The events of one
// run follow each other.
const saltersMost = 256

type saltLine struct {
	Run string `json:"run"` // as subjects have it
	Key []byte `json:"key"`
}

// newSalts returns the salts of a store. The file has a line for each run, so it is not read before
// the first of them is needed: most requests for tiles need none.
func newSalts(store string) *salts {
	return &salts{store: store, keys: map[string][]byte{}, fresh: map[string][]byte{}, salters: map[string]*audit.Salter{}}
}

// open reads the file, unless it was read.
func (s *salts) open() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.need()
}

// need is open for a caller that holds the lock.
func (s *salts) need() error {
	if s.loaded {
		return nil
	}
	return s.load()
}

// load reads the file again. A line that is cut off was never used: the owner lost power
// or room while it wrote the line, and wrote the key again on a line of its own. A line
// that is damaged otherwise is missed by [salts.of].
func (s *salts) load() error {
	text, err := read(s.store, saltsName)
	if errors.Is(err, fs.ErrNotExist) {
		s.loaded = true
		return nil
	}
	if err != nil {
		return err
	}
	s.loaded = true
	clear(s.salters)
	for line := range bytes.Lines(text[:bytes.LastIndexByte(text, '\n')+1]) {
		var l saltLine
		if json.Unmarshal(line, &l) == nil && len(l.Key) == sha256.Size {
			s.keys[l.Run] = l.Key
		}
	}
	return nil
}

// covers returns [ErrDamaged] unless each of the runs has a key.
func (s *salts) covers(rows []audit.Row) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.need(); err != nil {
		return err
	}
	for _, r := range rows {
		if s.keys[r.Run] == nil {
			return missingSalts(r.Run)
		}
	}
	return nil
}

func missingSalts(run string) error {
	return fmt.Errorf("%w: no salts of run %q in %s of the audit: restore the file from a backup", ErrDamaged, run, saltsName)
}

// of returns the salt of an event. Where the run has no key, it makes one if add is set.
func (s *salts) of(subject string, sequence uint64, add bool) (salt audit.Salt, err error) {
	run, _ := audit.Trial(subject)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.need(); err != nil {
		return salt, err
	}
	if salter := s.salters[run]; salter != nil {
		return salter.Of(sequence), nil
	}
	key := s.keys[run]
	if key == nil && !add {
		if err := s.load(); err != nil {
			return salt, err
		}
		key = s.keys[run] // the owner may have added it
	}
	if key == nil && !add {
		return salt, missingSalts(run)
	}
	if key == nil {
		// A retry writes the same key: the failed write may be durable.
		if key = s.fresh[run]; key == nil {
			key = make([]byte, sha256.Size)
			_, _ = rand.Read(key) // never fails
			s.fresh[run] = key
		}
		line, err := json.Marshal(saltLine{Run: run, Key: key})
		if err == nil {
			err = s.disk.append(stepSalted, saltsName, line)
		}
		if err != nil {
			return salt, fmt.Errorf("add a run to the audit: %w", err)
		}
		s.keys[run] = key
		delete(s.fresh, run)
	}
	salter, err := audit.NewSalter(key)
	if err != nil {
		return salt, err
	}
	if len(s.salters) >= saltersMost {
		clear(s.salters)
	}
	s.salters[run] = salter
	return salter.Of(sequence), nil
}
