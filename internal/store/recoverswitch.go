package store

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/share"
)

// A recovery builds the new log under recoverTemp and writes what it did into
// recoverName. From then on it can only be finished, by whoever runs it next:
//
//	recover.json   {ready, the report}; the last to go
//	.tmp-recover/  log/, until it is renamed to STORE/log
//
// The old log becomes STORE/log.damaged, or log.damaged-2 and so on.
const (
	recoverName = "recover.json"
	recoverTemp = durable.TempPrefix + "recover"
)

// journal is recover.json.
type journal struct {
	Ready  bool      `json:"ready"` // the new log is complete, the rest is renames
	From   string    `json:"from"`
	Report Recovered `json:"report"`
}

// finish puts the new log in its place. Every step may have been done before.
func (r *recovery) finish() error {
	built, log := filepath.Join(r.dir, recoverTemp, "log"), filepath.Join(r.dir, "log")
	id := identity{
		Product: product, Store: r.report.Store, Format: Format, Created: time.Now().UTC(),
		Formerly: r.report.Formerly, Recovered: r.report.Sequence, Owner: ownerAfter(r.dir),
	}
	text, err := json.MarshalIndent(id, "", "  ")
	if err != nil {
		return err
	}
	root := beneath.At(r.dir)
	sync := func() error { return durable.SyncDir(r.dir) }
	for _, step := range []struct {
		name string
		do   func() error
	}{
		{"remove the views", func() error {
			var errs []error
			for _, name := range []string{"views", readName, endName, cardName, copyName} {
				errs = append(errs, os.RemoveAll(filepath.Join(r.dir, name)))
			}
			return errors.Join(errs...)
		}},
		{"set the log aside", func() error {
			if r.report.Aside == "" || exists(r.report.Aside) || !exists(built) {
				return nil
			}
			return os.Rename(log, r.report.Aside)
		}},
		{"sync", sync},
		{"place the log", func() error {
			if !exists(built) {
				return nil
			}
			return os.Rename(built, log)
		}},
		{"make directories", func() error {
			return errors.Join(root.MkdirAll(filepath.Join(r.dir, "data"), 0o700), root.MkdirAll(filepath.Join(r.dir, "blobs"), 0o700),
				share.Dirs(r.dir, log), share.Tree(log, nil), sync())
		}},
		{"write the identity", func() error { return durable.Write(filepath.Join(r.dir, "store.json"), append(text, '\n')) }},
		{"remove what was built", func() error { return errors.Join(os.RemoveAll(filepath.Join(r.dir, recoverTemp)), sync()) }},
		{"remove the journal", func() error { return errors.Join(removed(filepath.Join(r.dir, recoverName)), sync()) }},
	} {
		err := r.step(step.name)
		if err == nil {
			err = step.do()
		}
		if err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return durable.SyncDir(filepath.Dir(r.dir))
}

func readJournal(dir string) (j journal, found bool, err error) {
	text, err := readFile(filepath.Join(dir, recoverName))
	if errors.Is(err, os.ErrNotExist) {
		return j, false, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &j)
	}
	return j, err == nil, err
}

func writeJournal(dir string, j journal) error {
	text, err := json.MarshalIndent(j, "", "  ")
	if err != nil {
		return err
	}
	return durable.Write(filepath.Join(dir, recoverName), append(text, '\n'))
}
