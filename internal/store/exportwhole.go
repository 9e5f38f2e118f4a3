package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/foreign"
)

// Origin records where a self-contained export came from. It is ORIGIN.json in the
// directory of the export:
//
//	DIR/
//	  ORIGIN.json
//	  data/<run>/<trial>/<checkpoint>/   as in a store: see package data
//
// So DIR is a store without a log: commands that need only receipts can read it, and
// Recover makes a log for it.
type Origin struct {
	Store       string            `json:"store"`
	Run         string            `json:"run"`
	Trial       string            `json:"trial"`
	Checkpoint  string            `json:"checkpoint"`
	Sequence    uint64            `json:"sequence"` // of the committed event, in the log of Store
	Event       string            `json:"event"`    // its ID
	CommittedAt time.Time         `json:"committed_at"`
	Manifest    checkpoint.Digest `json:"manifest"` // named by the event
	// Rewritten reports that the export has another manifest, with the same tensors,
	// boxes and digests: files that the original shared with other checkpoints, or had
	// adopted, became its own.
	Rewritten bool `json:"rewritten"`
}

const originFile = "ORIGIN.json"

// Whole describes an export by [ExportWhole].
type Whole struct {
	Path    string // of the directory
	Place   string // of the checkpoint in it, such as data/run/main/step-1.a1
	Files   int
	Tensors int
	Values  int
	Bytes   int64 // of tensors and values
	Origin  Origin
}

// ExportWhole copies a committed checkpoint into a directory that is a store by itself,
// except for the log: it has no hard link to another file and names no file outside.
// digest is the manifest's digest from the log; zero takes the receipt's. ExportWhole
// writes and syncs everything next to dir and renames it at the end, so that dir is
// complete or missing. It returns a [*foreign.OccupiedError] if dir is not empty. It calls
// stale with directories that killed exports have left, and progress with the bytes read
// so far. Both may be nil.
func ExportWhole(ctx context.Context, data *data.Root, ref checkpoint.Ref, digest checkpoint.Digest, dir string, stale func(string), progress func(bytes int64)) (Whole, error) {
	out, err := exportWhole(ctx, data, ref, digest, dir, stale, progress)
	if err != nil {
		return Whole{}, fmt.Errorf("export to %s: %w", dir, err)
	}
	return out, nil
}

func exportWhole(ctx context.Context, root *data.Root, ref checkpoint.Ref, digest checkpoint.Digest, dir string, stale func(string), progress func(int64)) (out Whole, err error) {
	dir, err = freePlace(dir, root.Dir())
	if err != nil {
		return out, err
	}
	if left, err := filepath.Glob(globbed(dir) + ".partial-*"); err == nil && stale != nil {
		for _, path := range left {
			stale(path)
		}
	}
	made, err := makeParents(dir)
	if err != nil {
		return out, fmt.Errorf("%w; choose a directory where you may write", err)
	}
	partial := fmt.Sprintf("%s.partial-%016x", dir, rand.Uint64())
	if err := os.Mkdir(partial, 0o755); err != nil {
		return out, fmt.Errorf("%w; choose a directory where you may write", err)
	}
	defer func() {
		if err != nil {
			// If the removal fails, its name shows that it is not the export.
			err = errors.Join(err, os.RemoveAll(partial))
		}
	}()
	to, err := data.Open(vfs.Default, filepath.Join(partial, "data"))
	if err != nil {
		return out, err
	}
	read := int64(0)
	copied, err := root.CopyTo(ctx, ref, digest, to, func(n int64) {
		if read += n; progress != nil {
			progress(read)
		}
	})
	if err != nil {
		return out, err
	}
	m, r := copied.Manifest, copied.Receipt
	out = Whole{
		Path: dir, Place: "data/" + ref.String(), Files: copied.Files + 1, Tensors: len(m.Layout.Tensors), Values: len(m.Layout.Values), Bytes: copied.Bytes,
		Origin: Origin{
			Store: r.Store, Run: r.Run, Trial: r.Trial, Checkpoint: r.Checkpoint, Sequence: r.Sequence, Event: r.Event,
			CommittedAt: r.CommittedAt, Manifest: copied.Original, Rewritten: copied.Original != r.Manifest,
		},
	}
	if err := writeOrigin(filepath.Join(partial, originFile), out.Origin); err != nil {
		return out, err
	}
	if err := durable.SyncDir(partial); err != nil {
		return out, err
	}
	// Replaces an empty directory, which [os.Rename] would not do, and fails for a
	// directory that has files by now.
	if err := syscall.Rename(partial, dir); err != nil {
		return out, fmt.Errorf("rename %s to %s: %w", partial, dir, err)
	}
	for _, name := range append(made, dir) {
		if err := durable.SyncDir(filepath.Dir(name)); err != nil {
			return out, err
		}
	}
	return out, nil
}

// makeParents makes the directories above a path and returns those it made.
func makeParents(path string) (made []string, err error) {
	for dir := filepath.Dir(path); ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(dir); err == nil {
			break
		} else if !errors.Is(err, fs.ErrNotExist) || dir == "/" {
			return nil, err
		}
		made = append(made, dir)
	}
	return made, os.MkdirAll(filepath.Dir(path), 0o755)
}

func writeOrigin(path string, o Origin) error {
	text, err := json.MarshalIndent(o, "", "  ")
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(append(text, '\n'))
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// freePlace returns the absolute path of a directory that is missing or empty, and not in
// the data of the source store.
func freePlace(dir, data string) (string, error) {
	full, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	names, err := os.ReadDir(full)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return "", fmt.Errorf("%w; choose another directory", err)
	case len(names) > 0:
		return "", &foreign.OccupiedError{Dir: dir, Holds: names[0].Name(), Alien: true}
	}
	if data, err = filepath.Abs(data); err == nil {
		data, err = filepath.EvalSymlinks(data)
	}
	if err != nil {
		return "", err
	}
	// If the end of the path does not exist yet, check its nearest existing parent.
	for at := full; ; at = filepath.Dir(at) {
		real, err := filepath.EvalSymlinks(at)
		if err == nil {
			real = filepath.Join(real, strings.TrimPrefix(full, at))
			if real == data || strings.HasPrefix(real, data+"/") {
				return "", &foreign.OccupiedError{Dir: dir, Source: data}
			}
			return real, nil
		}
		if !errors.Is(err, fs.ErrNotExist) || at == "/" {
			return "", err
		}
	}
}

// globbed returns a pattern that matches only path.
func globbed(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}
