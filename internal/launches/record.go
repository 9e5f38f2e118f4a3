package launches

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/private"
)

// kept is the number of launches to keep. The runs launched longest ago are
// removed first.
const kept = 1000

// maxRecord bounds the size of a record in bytes.
const maxRecord = 16 << 10

// Record stores a launch, replacing the previous launch of its run. The error
// includes what to do so that later launches are recorded.
func (l Launch) Record(ctx context.Context) error {
	_, err := within(ctx, func() (struct{}, error) { return struct{}{}, l.record() })
	if err != nil {
		return fmt.Errorf("record the launch of run %q: %w; set XDG_STATE_HOME to a directory of this user", l.Run, err)
	}
	return nil
}

func (l Launch) record() error {
	dir, err := makeDir()
	if err != nil {
		return err
	}
	defer func() { _ = dir.Close() }()
	text, err := json.Marshal(l)
	if err != nil {
		return err
	}
	if err := replace(dir, l.key(), append(text, '\n')); err != nil {
		return err
	}
	return prune(dir)
}

// replace replaces a file's content atomically.
func replace(dir *os.Root, name string, text []byte) error {
	temporary := fmt.Sprintf(".%s.%d", name, os.Getpid())
	err := dir.Remove(temporary) // left by a killed process
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := dir.OpenFile(temporary, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = dir.Rename(temporary, name)
	}
	if err != nil {
		return errors.Join(err, dir.Remove(temporary))
	}
	return nil
}

// prune removes the oldest records in excess of kept.
func prune(dir *os.Root) error {
	entries, err := fs.ReadDir(dir.FS(), ".")
	if err != nil || len(entries) <= kept {
		return err
	}
	var infos []fs.FileInfo
	for _, e := range entries {
		info, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // another process prunes too
		}
		if err != nil {
			return err
		}
		infos = append(infos, info)
	}
	slices.SortFunc(infos, func(a, b fs.FileInfo) int {
		return cmp.Or(a.ModTime().Compare(b.ModTime()), strings.Compare(a.Name(), b.Name()))
	})
	for _, info := range infos[:max(0, len(infos)-kept)] {
		if err := dir.Remove(info.Name()); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// Prove returns nil if this user's trainer recorded exactly this launch, as the
// last launch of its run. Otherwise it returns [ErrUnproven] with the reason.
func (l Launch) Prove(ctx context.Context) error {
	recorded, err := within(ctx, l.recorded)
	if errors.Is(err, fs.ErrNotExist) {
		err = errors.New("no trainer of this user has recorded a launch of the run in this home")
	}
	if err != nil {
		return fmt.Errorf("%w: %w", ErrUnproven, err)
	}
	if how := l.differs(recorded); how != "" {
		return fmt.Errorf("%w: %s", ErrUnproven, how)
	}
	return nil
}

// recorded reads the record of the run. It returns an error for a record that
// another user may have written.
func (l Launch) recorded() (r Launch, err error) {
	dir, err := openDir()
	if err != nil {
		return r, err
	}
	defer func() { _ = dir.Close() }()
	info, err := dir.Lstat(l.key())
	if err != nil {
		return r, err
	}
	if err := private.File(filepath.Join(dir.Name(), l.key()), info, "remove it"); err != nil {
		return r, err
	}
	f, err := dir.Open(l.key())
	if err != nil {
		return r, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxRecord))
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(text, &r); err != nil {
		return r, fmt.Errorf("%s: %w", f.Name(), err)
	}
	return r, nil
}
