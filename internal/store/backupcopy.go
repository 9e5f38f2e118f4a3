package store

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
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/durable"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/projections"
)

// errVanished reports that files of a checkpoint were removed during the copy.
var errVanished = errors.New("its files are gone")

// copier copies files that are not written to any more. A copy gets its name once its
// bytes are durable, and the time of the original, by which a second run finds finished
// copies. Originals that are hard links of each other become hard links of each other.
// Its methods may be called concurrently.
type copier struct {
	from, to beneath.Root // follow no symbolic link

	link bool        // hard-link the originals of checkpoints instead
	tell func(int64) // called with bytes done; may be nil

	mu     sync.Mutex
	copies map[fileKey]*copied
	sum    copySum
}

// copySum counts the work of a copier.
type copySum struct {
	Files  int   `json:"files"`
	Bytes  int64 `json:"bytes"`  // written or shared by the filesystem
	Linked int   `json:"linked"` // files that only got another name
	Kept   int   `json:"kept"`   // files that existed already
}

// fileKey identifies a file with several names. An inode number may be reused after a
// removal; size and time detect that.
type fileKey struct {
	device, inode  uint64
	size, modified int64
}

// copied locates the copy of a file with several names.
type copied struct {
	mu   sync.Mutex
	path string
}

// newCopier returns a copier from one directory of a store or backup to another.
func newCopier(from, to string, link bool, tell func(int64)) *copier {
	if tell == nil {
		tell = func(int64) {}
	}
	return &copier{from: beneath.At(from), to: beneath.At(to), link: link, tell: tell, copies: map[fileKey]*copied{}}
}

// count adds to the sum.
func (c *copier) count(add func(*copySum)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	add(&c.sum)
}

// checkpoint copies the directory of a checkpoint, its receipt last. It returns
// [errVanished] if files disappear meanwhile.
func (c *copier) checkpoint(ctx context.Context, from, to string) error {
	entries, err := c.from.ReadDir(from)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", errVanished, err)
	}
	if err == nil {
		err = c.to.MkdirAll(to, 0o700)
	}
	if err != nil {
		return err
	}
	receipt := false
	for _, e := range entries {
		switch name := e.Name(); {
		case strings.HasSuffix(name, partialSuffix):
		case name == checkpoint.ReceiptFile:
			receipt = true
		default:
			if err := c.place(ctx, filepath.Join(from, name), filepath.Join(to, name), c.link); err != nil {
				return err
			}
		}
	}
	if err := c.to.SyncDir(to); err != nil || !receipt {
		return err
	}
	if err := c.place(ctx, filepath.Join(from, checkpoint.ReceiptFile), filepath.Join(to, checkpoint.ReceiptFile), c.link); err != nil {
		return err
	}
	return c.to.SyncDir(to)
}

// partialSuffix ends the name of a file that is being written: see package data.
const partialSuffix = ".tmp"

// tree copies all files below a directory except those that are being written. A
// missing directory is empty.
func (c *copier) tree(ctx context.Context, from, to string) error {
	entries, err := c.from.ReadDir(from)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = c.to.MkdirAll(to, 0o700)
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		source, target := filepath.Join(from, e.Name()), filepath.Join(to, e.Name())
		switch {
		case strings.HasPrefix(e.Name(), durable.TempPrefix), strings.HasSuffix(e.Name(), partialSuffix):
			continue
		case e.IsDir():
			err = c.tree(ctx, source, target)
		default:
			err = c.file(ctx, source, target)
		}
		if err != nil {
			return err
		}
	}
	return c.to.SyncDir(to)
}

// file copies one file. It never links, so that damage to the store's log does not
// reach that of its backup.
func (c *copier) file(ctx context.Context, from, to string) error {
	return c.place(ctx, from, to, false)
}

// place copies one file, or links it.
func (c *copier) place(ctx context.Context, from, to string, link bool) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	in, err := c.from.Open(from)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %w", errVanished, err)
	}
	if err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	defer func() { _ = in.Close() }() // opened for reading only
	info, err := in.Stat()
	if err != nil {
		return err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("copy %s: this system does not report how many names a file has", from)
	}
	there, err := c.to.Lstat(to)
	same := err == nil && there.Mode().IsRegular() && there.Size() == info.Size() && there.ModTime().Equal(info.ModTime())
	if st.Nlink > 1 && !link {
		l := c.copyOf(fileKey{st.Dev, st.Ino, info.Size(), info.ModTime().UnixNano()})
		l.mu.Lock()
		defer l.mu.Unlock()
		if !same && l.path != "" {
			err := c.relink(c.to, l.path, to)
			if err == nil {
				c.tell(info.Size())
				c.count(func(s *copySum) { s.Linked++ })
				return nil
			}
			// Its directory may be gone, or it has the maximum number of names.
			if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EMLINK) {
				return err
			}
		}
		defer func() {
			if same {
				l.path = to
			}
		}()
	}
	if same {
		c.tell(info.Size())
		c.count(func(s *copySum) { s.Kept++ })
		return nil
	}
	if link {
		err := c.relink(c.from, from, to)
		if err == nil {
			c.tell(info.Size())
			c.count(func(s *copySum) { s.Linked++ })
			return nil
		}
		if errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%w: %w", errVanished, err)
		}
		if !errors.Is(err, unix.EMLINK) {
			return fmt.Errorf("%w: links need one filesystem and the rights to the files: leave --link out", err)
		}
	}
	if err := c.write(ctx, in, info, to); err != nil {
		return fmt.Errorf("copy %s: %w", from, err)
	}
	same = true
	c.count(func(s *copySum) { s.Files++; s.Bytes += info.Size() })
	return nil
}

func (c *copier) copyOf(key fileKey) *copied {
	c.mu.Lock()
	defer c.mu.Unlock()
	l := c.copies[key]
	if l == nil {
		l = &copied{}
		c.copies[key] = l
	}
	return l
}

// relink gives a file below root another name among the copies and replaces an
// existing file of that name.
func (c *copier) relink(root beneath.Root, from, to string) error {
	err := root.Link(from, c.to, to)
	if errors.Is(err, fs.ErrExist) {
		if err = c.to.Remove(to); err == nil {
			err = root.Link(from, c.to, to)
		}
	}
	return err
}

// write copies the bytes. Filesystems that can share them do.
func (c *copier) write(ctx context.Context, in *os.File, info fs.FileInfo, to string) (err error) {
	temp := to + partialSuffix
	if err := c.to.RemoveAll(temp); err != nil {
		return err
	}
	out, err := c.to.OpenFile(temp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, info.Mode().Perm()|0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.to.RemoveAll(temp))
		}
	}()
	if unix.IoctlFileClone(int(out.Fd()), int(in.Fd())) == nil {
		c.tell(info.Size())
	} else {
		err = c.stream(ctx, out, in, info.Size())
	}
	if err == nil {
		err = out.Sync()
	}
	if err = errors.Join(err, out.Close()); err != nil {
		return err
	}
	if err := c.to.Chtimes(temp, info.ModTime()); err != nil {
		return err
	}
	return c.to.Rename(temp, to)
}

// copyPiece is the number of bytes copied between two checks of the context.
const copyPiece = 32 << 20

func (c *copier) stream(ctx context.Context, out, in *os.File, size int64) error {
	for left := size; left > 0; {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		n, err := io.CopyN(out, in, min(left, copyPiece))
		left -= n
		c.tell(n)
		if err != nil {
			return err // also io.EOF: the file was truncated meanwhile
		}
	}
	return nil
}

// copyWidth is the number of checkpoints copied in parallel. Syncs of small files take
// longer than the writes, and run well in parallel.
const copyWidth = 8

// checkpointCopier copies checkpoints and checks that each copy is complete.
type checkpointCopier struct {
	from   string     // directory of the source data
	data   *data.Root // of the copies
	copier *copier
	total  atomic.Int64 // expected bytes

	mu      sync.Mutex
	lacking map[checkpoint.Ref]Incomplete
	outside map[checkpoint.Ref]OutsideFiles
}

// progress returns a function that adds up bytes and calls report with the sum.
func (f *checkpointCopier) progress(report func(done, total int64)) func(int64) {
	if report == nil {
		return nil
	}
	var mu sync.Mutex
	done := int64(0)
	return func(n int64) {
		mu.Lock()
		defer mu.Unlock()
		done += n
		report(done, max(done, f.total.Load()))
	}
}

// each copies checkpoints. It calls receipt for a copy that has none.
func (f *checkpointCopier) each(ctx context.Context, rows []projections.Checkpoint, receipt func(context.Context, projections.Checkpoint) error) error {
	g, within := errgroup.WithContext(ctx)
	g.SetLimit(copyWidth)
	for _, c := range rows {
		if within.Err() != nil {
			break
		}
		g.Go(func() error { return f.one(within, c, receipt) })
	}
	if err := g.Wait(); err != nil {
		return err
	}
	return ctx.Err()
}

func (f *checkpointCopier) one(ctx context.Context, c projections.Checkpoint, receipt func(context.Context, projections.Checkpoint) error) error {
	ref := RefOf(c)
	name := c.Run + "@" + c.ID
	digest, err := checkpoint.ParseDigest(c.Manifest)
	if err != nil {
		return fmt.Errorf("checkpoint %s: %w", name, err)
	}
	to := filepath.Join(f.data.Dir(), ref.String())
	err = f.copier.checkpoint(ctx, filepath.Join(f.from, ref.String()), to)
	if errors.Is(err, errVanished) {
		f.lacks(ref, name, err.Error())
		return nil
	}
	if err != nil {
		return fmt.Errorf("checkpoint %s: %w", name, err)
	}
	if receipt != nil && !exists(filepath.Join(to, checkpoint.ReceiptFile)) {
		if err := receipt(ctx, c); err != nil && ctx.Err() == nil {
			f.lacks(ref, name, err.Error())
			return nil
		}
	}
	report, err := f.data.VerifyWith(ctx, ref, digest, data.VerifyOptions{Quick: true})
	if err != nil {
		return err
	}
	if !report.Clean() {
		f.lacks(ref, name, report.Findings[0].String())
		return nil
	}
	files, err := f.data.AdoptedBy(ctx, ref)
	if err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.lacking, ref)
	if len(files) > 0 {
		f.outside[ref] = OutsideFiles{Checkpoint: name, Files: files}
	}
	return nil
}

func (f *checkpointCopier) lacks(ref checkpoint.Ref, name, problem string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lacking[ref] = Incomplete{Checkpoint: name, Problem: problem}
}

// lacked counts the incomplete checkpoints.
func (f *checkpointCopier) lacked() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.lacking)
}

// remove removes the copy of a checkpoint, if it exists.
func (f *checkpointCopier) remove(ref checkpoint.Ref) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.lacking, ref)
	delete(f.outside, ref)
	return f.copier.to.RemoveAll(filepath.Join(f.data.Dir(), ref.String()))
}

// findings returns the report's lists about checkpoints, sorted.
func (f *checkpointCopier) findings() (outside []OutsideFiles, incomplete []Incomplete) {
	f.mu.Lock()
	defer f.mu.Unlock()
	outside, incomplete = []OutsideFiles{}, []Incomplete{}
	for _, o := range f.outside {
		outside = append(outside, o)
	}
	for _, l := range f.lacking {
		incomplete = append(incomplete, l)
	}
	slices.SortFunc(outside, func(a, b OutsideFiles) int { return cmp.Compare(a.Checkpoint, b.Checkpoint) })
	slices.SortFunc(incomplete, func(a, b Incomplete) int { return cmp.Compare(a.Checkpoint, b.Checkpoint) })
	return outside, incomplete
}

// syncDirs makes the names of all copies durable.
func (f *checkpointCopier) syncDirs() error {
	dir := f.data.Dir()
	root := f.copier.to
	if err := root.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	err := eachDir(root, dir, 2, root.SyncDir)
	return errors.Join(err, root.SyncDir(dir), root.SyncDir(filepath.Dir(dir)))
}

// eachDir calls do for the directories up to depth levels below dir. A symbolic link
// among them is an error, since a store has none.
func eachDir(root beneath.Root, dir string, depth int, do func(string) error) error {
	entries, err := root.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		if e.Type() == fs.ModeSymlink {
			return &beneath.TypeError{Path: path, Type: fs.ModeSymlink}
		}
		if !e.IsDir() {
			continue
		}
		if depth > 1 {
			err = eachDir(root, path, depth-1, do)
		}
		if err == nil {
			err = do(path)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// countCheckpoints counts the directories of checkpoints in a data directory.
func countCheckpoints(dir string) (n int, err error) {
	root := beneath.At(filepath.Dir(dir))
	err = eachDir(root, dir, 2, func(path string) error {
		if filepath.Dir(filepath.Dir(path)) != dir {
			return nil // of a run
		}
		entries, err := root.ReadDir(path)
		n += len(entries)
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return n, err
}

// ErrBackup reports that a directory is a backup, which is read-only.
var ErrBackup = problem.New(problem.Denied, "this is a backup")

// A backup and a restore write a mark first and store.json last. A directory with a
// mark and without store.json is unfinished, and no command takes it for a store.
//
//	DIR/backup.json    stays: with store.json, DIR is a backup, which is read-only
//	DIR/restore.json   is removed at the end
const (
	backupName  = "backup.json"
	restoreName = "restore.json"
)

// copyMark is backup.json or restore.json.
type copyMark struct {
	Product string    `json:"product"`
	Store   string    `json:"store"` // identity of the source store
	From    string    `json:"from"`  // the source directory
	Begun   time.Time `json:"begun"`
	// For a complete backup: the end of its log, and its counts.
	Whole       bool      `json:"whole"`
	Made        time.Time `json:"made,omitzero"`
	Sequence    uint64    `json:"sequence,omitempty"`
	Event       string    `json:"event,omitempty"` // ID of that event
	Checkpoints int       `json:"checkpoints"`
	Incomplete  int       `json:"incomplete,omitempty"` // checkpoints that were incomplete in the store
}

// readCopyMark reads a mark. A missing mark is [os.ErrNotExist].
func readCopyMark(path string) (m copyMark, err error) {
	text, err := readFile(path)
	if err != nil {
		return m, err
	}
	if err := json.Unmarshal(text, &m); err != nil {
		return m, fmt.Errorf("%w: %s is not valid JSON: %w; make the copy again in another directory", ErrDamaged, path, err)
	}
	if m.Product != product || m.Store == "" {
		return m, fmt.Errorf("%w: %s was not written by %s", ErrForeign, path, product)
	}
	return m, nil
}

func writeCopyMark(path string, m copyMark) error {
	text, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	return durable.Write(path, append(text, '\n'))
}

// unfinished returns an error if a backup or a restore into dir has not finished.
func unfinished(dir string) error {
	if exists(filepath.Join(dir, "store.json")) {
		return nil
	}
	for name, how := range map[string]string{
		backupName:  "a backup into it did not end: run the same `ckptstore backup` again, which finishes it, or remove the directory",
		restoreName: "a restore into it did not end: run the same `ckptstore restore` again, which finishes it, or remove the directory",
	} {
		if exists(filepath.Join(dir, name)) {
			return fmt.Errorf("%w in %s: %s", ErrNoStore, dir, how)
		}
	}
	return nil
}

// backedUp returns [ErrBackup], with the next step, if dir is a backup.
func backedUp(dir string) error {
	m, err := readCopyMark(filepath.Join(dir, backupName))
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case err != nil:
		return err
	}
	return fmt.Errorf("%w of store %s: %s is not written to: `ckptstore restore %s --store NEW` makes a store of it", ErrBackup, m.Store, dir, dir)
}

// destination is a directory that a backup or a restore writes.
type destination struct {
	dir  string
	mark copyMark
	name string // of the mark file
	lock *os.File
}

// openDestination takes dir, which must be absent, empty, or left by an interrupted run
// of the same command. from is the source store or backup.
func openDestination(dir, name string, mark copyMark) (_ *destination, err error) {
	path := filepath.Join(dir, name)
	here, err := readCopyMark(path)
	switch {
	case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		if err := emptyPlace(dir); err != nil {
			return nil, err
		}
		if err := makeOwn(dir); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, err
	case exists(filepath.Join(dir, "store.json")):
		return nil, fmt.Errorf("%w: %s has a copy of store %s, made on %s: choose another directory", ErrExists, dir, here.Store, here.Made.Local().Format(time.DateTime))
	case here.Store != mark.Store || here.From != mark.From:
		return nil, fmt.Errorf("%w: %s has an unfinished copy of store %s from %s: finish that, remove the directory, or choose another", ErrExists, dir, here.Store, here.From)
	default:
		mark.Begun = here.Begun
	}
	lock, err := tryLock(dir)
	if err == nil && lock == nil {
		err = fmt.Errorf("%w: another process writes to %s: wait for it or end it", ErrLocked, dir)
	}
	if err != nil {
		return nil, err
	}
	if exists(filepath.Join(dir, "store.json")) { // another process has just finished there
		return nil, errors.Join(fmt.Errorf("%w: %s has a copy of store %s: choose another directory", ErrExists, dir, mark.Store), unlock(lock))
	}
	d := &destination{dir: dir, mark: mark, name: name, lock: lock}
	if err := errors.Join(writeCopyMark(path, mark), durable.SyncDir(filepath.Dir(dir))); err != nil {
		return nil, errors.Join(err, d.close())
	}
	return d, nil
}

func (d *destination) close() error { return unlock(d.lock) }

// emptyPlace returns an error unless a directory is absent or empty.
func emptyPlace(dir string) error {
	entries, err := os.ReadDir(dir)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil
	case errors.Is(err, syscall.ENOTDIR):
		return fmt.Errorf("%w: %s is a file: name a directory", ErrNotEmpty, dir)
	case err != nil:
		return err
	case exists(filepath.Join(dir, "store.json")):
		return fmt.Errorf("%w: %s has a store: choose an empty or a new directory", ErrExists, dir)
	}
	for _, e := range entries {
		if e.Name() != lockName { // from a copy interrupted before its mark
			return fmt.Errorf("%s is %w (it has %q): choose an empty or a new directory", dir, ErrNotEmpty, e.Name())
		}
	}
	return nil
}

// apart returns an error if two directories are the same or one contains the other.
func apart(from, to string) error {
	a, b := resolved(from), resolved(to)
	if within(a, b) || within(b, a) {
		return fmt.Errorf("%w: %s and %s overlap: choose a directory outside the other", ErrLocation, from, to)
	}
	return nil
}
