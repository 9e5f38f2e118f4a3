package ledger

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/beneath"
)

// salts are the keys of the runs. A key is durable before the first entry of its run is
// hashed. Without it, the tree cannot be computed from the log again.
type salts struct {
	store string

	mu   sync.Mutex
	keys map[string][]byte
}

type saltLine struct {
	Run string `json:"run"` // as subjects have it
	Key []byte `json:"key"`
}

func readSalts(store string) (*salts, error) {
	s := &salts{store: store, keys: map[string][]byte{}}
	return s, s.load()
}

// load reads the file again. A last line that is cut off was never used.
func (s *salts) load() error {
	text, err := read(s.store, saltsName)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	lines := bufio.NewScanner(bytes.NewReader(text[:bytes.LastIndexByte(text, '\n')+1]))
	lines.Buffer(nil, 1<<17)
	for lines.Scan() {
		var l saltLine
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		if err := json.Unmarshal(lines.Bytes(), &l); err != nil || len(l.Key) != sha256.Size {
			return fmt.Errorf("%w: a line of %s of the audit: restore it from a backup", ErrDamaged, saltsName)
		}
		s.keys[l.Run] = l.Key
	}
	return lines.Err()
}

// of returns the salt of an event. Where the run has no key, it makes one if add is set.
func (s *salts) of(subject string, sequence uint64, add bool) (salt audit.Salt, err error) {
	run, _ := audit.Trial(subject)
	s.mu.Lock()
	defer s.mu.Unlock()
	key := s.keys[run]
	if key == nil && !add {
		if err := s.load(); err != nil {
			return salt, err
		}
		key = s.keys[run] // the owner may have added it
	}
	if key == nil && !add {
		return salt, fmt.Errorf("%w: no salts of run %q in %s of the audit: restore the file from a backup", ErrDamaged, run, saltsName)
	}
	if key == nil {
		key = make([]byte, sha256.Size)
		_, _ = rand.Read(key) // never fails
		line, err := json.Marshal(saltLine{Run: run, Key: key})
		if err == nil {
			err = appendLine(s.store, saltsName, line)
		}
		if err != nil {
			return salt, fmt.Errorf("add a run to the audit: %w", err)
		}
		s.keys[run] = key
	}
	return audit.SaltOf(key, sequence)
}

// appendLine appends a line to a file of the ledger and syncs it. It begins with a line
// feed, so that a line that was cut off before stays one of its own.
func appendLine(store, name string, line []byte) error {
	root, path := beneath.At(store), filepath.Join(store, dirName, name)
	f, err := root.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil && info.Size() > 0 {
		last := make([]byte, 1)
		if _, err = f.ReadAt(last, info.Size()-1); err == nil && last[0] != '\n' {
			line = append([]byte{'\n'}, line...)
		}
	}
	if err == nil {
		_, err = f.Write(append(line, '\n'))
	}
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil && info.Size() == 0 {
		err = root.SyncDir(filepath.Dir(path))
	}
	return err
}
