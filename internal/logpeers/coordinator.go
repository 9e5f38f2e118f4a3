package logpeers

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/ckptstore/ckptstore/internal/durable"
)

// Coordinator is STORE/join/log/coordinator.json: which trainer coordinates a job of the
// store. It exists for the nodes of a job whose coordinator is gone: another peer of the log
// coordinates then, at another address. The file decides nothing. The lease of the run does.
type Coordinator struct {
	Job      string `json:"job"`
	Index    int    `json:"index"`    // of its node
	Endpoint string `json:"endpoint"` // HOST:PORT
}

func coordinatorPath(store string) string { return filepath.Join(joinDir(store), "coordinator.json") }

// Announce makes a coordinator known. Its caller holds the lease of the run until it has called
// [Coordinator.Withdraw], so that no other coordinator is announced meanwhile.
func (c Coordinator) Announce(store string) error {
	text, err := json.Marshal(c)
	if err == nil {
		err = durable.Write(coordinatorPath(store), text)
	}
	if err != nil {
		return fmt.Errorf("announce the coordinator: %w", err)
	}
	return nil
}

// Withdraw removes the announcement, unless it is another coordinator's by now.
func (c Coordinator) Withdraw(store string) error {
	if now, err := ReadCoordinator(store); err != nil || now != c {
		return err
	}
	if err := os.Remove(coordinatorPath(store)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("withdraw the coordinator: %w", err)
	}
	return nil
}

// ReadCoordinator returns the coordinator that was announced last; zero if there is none.
func ReadCoordinator(store string) (c Coordinator, err error) {
	// Listing asks the server of a network filesystem for new names.
	entries, err := os.ReadDir(joinDir(store))
	name := filepath.Base(coordinatorPath(store))
	if err != nil || !slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.Name() == name }) {
		return c, err
	}
	text, err := os.ReadFile(coordinatorPath(store))
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil // removed meanwhile
	}
	if err == nil {
		err = json.Unmarshal(text, &c)
	}
	if err != nil {
		return c, fmt.Errorf("read the coordinator: %w", err)
	}
	return c, nil
}

// Turn returns the position of a peer among those that may follow a coordinator; -1 for a
// node without a copy.
func (c Coordinator) Turn(index int) int {
	switch {
	case index < 0 || index >= Copies || index == c.Index:
		return -1
	case c.Index < index && c.Index >= 0:
		return index - 1
	}
	return index
}
