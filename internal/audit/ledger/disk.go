package ledger

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// Steps of the owner, see [Options].
const (
	stepSalted    = "salted"    // the key of a new run is durable
	stepTiled     = "tiled"     // a full tile or a full bundle of entries is a file
	stepSealed    = "sealed"    // audit.sealed is decided
	stepFolded    = "folded"    // a head is due
	stepListed    = "listed"    // it is in heads
	stepAnchored  = "anchored"  // it is next to the key
	stepSaved     = "saved"     // the state is saved
	stepSigned    = "signed"    // the head has a note
	stepWitnessed = "witnessed" // with the cosignatures that the policy wants
	stepPublished = "published" // in checkpoint
	stepShortened = "shortened" // heads has lost its oldest lines
	stepGranted   = "granted"   // a request is removed
	stepHalted    = "halted"    // the reason is a file
)

// errTaken reports that this process does not own the store any more.
var errTaken = problem.New(problem.Conflict, "another machine has taken the store: this process writes no more of its audit")

// disk writes the files of the ledger for the owner. A write is durable when it returns.
// After an error the file is as it was, or as if the write had succeeded, or has a torn
// line that readers skip: the caller may repeat the write. It refuses to write after the
// store was lost to another owner.
type disk struct {
	store string
	lost  <-chan struct{}
	step  func(step string, done bool) error
	made  map[string]bool // directories of tiles whose names are durable; at most madeMost
}

// do runs a write of a step.
func (d *disk) do(step string, write func() error) error {
	err := d.step(step, false)
	if err == nil {
		err = d.held()
	}
	if err == nil {
		err = write()
	}
	if err == nil {
		err = d.step(step, true)
	}
	return err
}

// held returns [errTaken] after the store was lost.
func (d *disk) held() error {
	select {
	case <-d.lost:
		return errTaken
	default:
		return nil
	}
}

func (d *disk) path(name string) string { return filepath.Join(d.store, dirName, name) }

// replace writes a whole file.
func (d *disk) replace(step, name string, data []byte) error {
	return d.do(step, func() error { return durable.WriteBelow(beneath.At(d.store), d.path(name), data) })
}

// append appends a line.
func (d *disk) append(step, name string, line []byte) error {
	return d.do(step, func() error { return appendLine(d.store, name, line) })
}

// tile is a full tile or a full bundle of entries, below the directory of the ledger.
type tile struct {
	path string
	data []byte
}

const (
	tilesAtOnce = 64 // files that are open for one write
	madeMost    = 64 // a directory has a thousand tiles
)

// tiles writes tiles and bundles, one call at a time. A file that exists must have the same
// bytes. The files share the syncs of their directories.
func (d *disk) tiles(list []tile) error {
	for some := range slices.Chunk(list, tilesAtOnce) {
		if err := d.someTiles(some); err != nil {
			return err
		}
	}
	return nil
}

func (d *disk) someTiles(list []tile) (err error) {
	if err := d.held(); err != nil {
		return err
	}
	root := beneath.At(d.store)
	var begun []begunTile
	defer func() {
		for _, b := range begun { // not renamed
			err = errors.Join(err, b.file.Close(), root.Remove(b.file.Name()))
		}
	}()
	dirs, fresh := map[string]bool{}, map[string]bool{}
	for _, t := range list {
		full := d.path(t.path)
		dirs[filepath.Dir(full)] = true
		for dir := filepath.Dir(full); !d.made[dir] && len(dir) > len(d.store); dir = filepath.Dir(dir) {
			dirs[filepath.Dir(dir)], fresh[dir] = true, true
		}
		had, err := root.ReadFile(full)
		if err == nil && !bytes.Equal(had, t.data) {
			err = fmt.Errorf("%w: %s of the audit has other bytes than the log leads to: the log or the file was changed: compare with a backup; `ckptstore audit verify` shows where", ErrDamaged, t.path)
		}
		if err == nil {
			continue
		}
		if errors.Is(err, fs.ErrNotExist) {
			err = root.MkdirAll(filepath.Dir(full), 0o700)
		}
		if err != nil {
			return err
		}
		f, err := durable.CreateBelow(root, filepath.Dir(full))
		if err != nil {
			return err
		}
		begun = append(begun, begunTile{f, full})
		if _, err := f.Write(t.data); err != nil {
			return err
		}
	}
	// All of them are on their way to the disk before the first is waited for.
	for _, b := range begun {
		_ = unix.SyncFileRange(int(b.file.Fd()), 0, 0, unix.SYNC_FILE_RANGE_WRITE) // only sooner
	}
	for _, b := range begun {
		if err := b.file.Sync(); err != nil {
			return err
		}
	}
	renamed := 0
	for len(begun) > 0 {
		b := begun[0]
		err := d.step(stepTiled, false)
		if err == nil {
			err = d.held()
		}
		if err == nil {
			err = root.Rename(b.file.Name(), b.to)
		}
		if err != nil {
			return err
		}
		begun = begun[1:]
		renamed++
		if err := b.file.Close(); err != nil {
			return err
		}
	}
	for dir := range dirs {
		if err := root.SyncDir(dir); err != nil {
			return err
		}
	}
	if d.made == nil || len(d.made) > madeMost {
		d.made = map[string]bool{}
	}
	maps.Copy(d.made, fresh)
	for range renamed {
		if err := d.step(stepTiled, true); err != nil {
			return err
		}
	}
	return nil
}

// begunTile is a tile under a temporary name.
type begunTile struct {
	file *os.File
	to   string
}

// appendLine appends a line to a file of the ledger and syncs it.
func appendLine(store, name string, line []byte) error {
	root, path := beneath.At(store), filepath.Join(store, dirName, name)
	f, err := root.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	begun, err := appendTo(f, line)
	err = errors.Join(err, f.Close())
	if err == nil && begun {
		err = root.SyncDir(filepath.Dir(path))
	}
	return err
}

// lined is a file to which lines are appended.
type lined interface {
	io.ReaderAt
	io.Writer
	Stat() (fs.FileInfo, error)
	Sync() error
	Truncate(size int64) error
}

// appendTo appends a line, and begins it with a line feed where the last line was cut off,
// so that the two stay apart. If that fails, it takes back what it wrote. It reports
// whether the file was empty.
func appendTo(f lined, line []byte) (begun bool, err error) {
	info, err := f.Stat()
	if err != nil {
		return false, err
	}
	var text []byte
	if info.Size() > 0 {
		last := make([]byte, 1)
		if _, err := f.ReadAt(last, info.Size()-1); err != nil {
			return false, err
		}
		if last[0] != '\n' {
			text = append(text, '\n')
		}
	}
	n, err := f.Write(append(append(text, line...), '\n'))
	if err == nil {
		err = f.Sync()
	}
	if err != nil {
		// Only what this call has written: another owner may append meanwhile.
		if now, serr := f.Stat(); serr == nil && now.Size() == info.Size()+int64(n) {
			err = errors.Join(err, f.Truncate(info.Size()), f.Sync())
		}
	}
	return info.Size() == 0, err
}
